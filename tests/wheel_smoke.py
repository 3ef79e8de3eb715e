# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel, installs it into a new environment and runs `fp4kit quantize` from /.

A program rather than a test: it needs the network, and pytest would import the checkout.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd):
    print("+", *map(str, command), flush=True)
    return subprocess.run([str(part) for part in command], cwd=cwd, check=True, text=True)


def main():
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", place, ROOT, cwd="/")
        (wheel,) = place.glob("fp4kit-*.whl")
        venv.create(place / "env", with_pip=True)
        python = place / "env" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", wheel, cwd="/")
        tool = place / "env" / "bin" / "fp4kit"
        run(tool, "--version", cwd="/")
        run(tool, "env", cwd="/")
        source, packed, back = (place / name for name in ("in", "packed", "back"))
        source, packed, back = (path.with_suffix(".safetensors") for path in (source, packed, back))
        run(tool, "demo", "-o", source, cwd="/")
        run(tool, "quantize", source, "-o", packed, cwd="/")
        run(tool, "dequantize", packed, "-o", back, "--dtype", "bfloat16", cwd="/")
        run(tool, "compare", source, back, "--min-sqnr", "15", cwd="/")
        shipped = "import importlib.resources as r; f = r.files('fp4kit.kernels_cu')\n"
        shipped += "assert (f / 'quantize.cu').is_file() and (f / 'numerics.cuh').is_file()"
        run(python, "-c", shipped, cwd="/")
        assert packed.stat().st_size < 0.4 * source.stat().st_size
    print("wheel smoke: passed")


if __name__ == "__main__":
    main()
