# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Builds sdist and wheel, installs the wheel elsewhere and runs `fp4kit quantize` from /.

A program rather than a test: it needs the network, and pytest would import the checkout.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd):
    print("+", *map(str, command), flush=True)
    return subprocess.run([str(part) for part in command], cwd=cwd, check=True, text=True)


def check_sdist(path):
    """It holds every file that is installed, what a build needs, and nothing else."""
    with tarfile.open(path) as archive:
        members = [PurePosixPath(m.name) for m in archive.getmembers() if m.isfile()]
    names = {"/".join(name.parts[1:]) for name in members}
    installed = {
        file.relative_to(ROOT).as_posix()
        for top in ("fp4kit", "cli", "kernels_cu")
        for file in (ROOT / top).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }
    assert installed <= names, sorted(installed - names)
    other = {name for name in names - installed if not name.startswith("fp4kit.egg-info/")}
    allowed = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"}
    assert other == allowed | {"pyproject.toml", "setup.cfg"}, sorted(other)


def main():
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        # Without --wheel the wheel is built from the sdist, as an installation from it would.
        run(sys.executable, "-m", "build", "--outdir", place, ROOT, cwd="/")
        (sdist,) = place.glob("fp4kit-*.tar.gz")
        check_sdist(sdist)
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
        shipped += "assert (f / 'quantize/rowwise.cu').is_file()\n"
        shipped += "assert (f / 'common/numerics.cuh').is_file()"
        run(python, "-c", shipped, cwd="/")
        known = "from importlib.metadata import metadata; m = metadata('fp4kit')\n"
        known += "assert m['License-Expression'] == 'Apache-2.0', m.items()\n"
        known += "assert len(m.get_all('Project-URL')) == 5, m.items()\n"
        known += "assert 'Typing :: Typed' in m.get_all('Classifier'), m.items()"
        run(python, "-c", known, cwd="/")
        assert packed.stat().st_size < 0.4 * source.stat().st_size
    print("wheel smoke: passed")


if __name__ == "__main__":
    main()
