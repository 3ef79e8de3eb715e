# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How fast GGUF models of every source type become NVFP4 and MXFP4.

Usage: python benchmarks/gguf_speed.py [--layers 2] [--repeat 5] [--folder DIR] [--json]

Layers of a Llama of 8 billion weights, random, in F32, F16, BF16 and Q8_0 (environment of `make
test`: the gguf package writes them). Rates are those of the best repeat, by the clock and by the
time of processors, which other work on the machine does not count in; repeats of all cases are
interleaved. Sources are in the page cache; what is written is not waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

import fp4kit

SOURCES = ("F32", "F16", "BF16", "Q8_0")
#: A scheme, and what is asked beside it.
TARGETS: dict[str, dict[str, str]] = {
    "nvfp4": {"scheme": "nvfp4"},
    "mxfp4": {"scheme": "mxfp4"},
    "nvfp4 sweep": {"scheme": "nvfp4", "scale_search": "sweep"},
}
SHAPES = {
    "attn_q": (4096, 4096), "attn_k": (1024, 4096), "attn_v": (1024, 4096),
    "attn_output": (4096, 4096), "ffn_gate": (14336, 4096), "ffn_up": (14336, 4096),
    "ffn_down": (4096, 14336),
}  # fmt: skip


def write(path: Path, source: str, layers: int) -> int:
    """Writes a model; returns its weights."""
    kind, rng = gguf.GGMLQuantizationType[source], np.random.default_rng(0)
    layer = {
        name: gguf.quantize(rng.standard_normal(shape, np.float32) * np.float32(0.02), kind)
        for name, shape in SHAPES.items()
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(0)
    for number in range(layers):
        for name, data in layer.items():
            writer.add_tensor(f"blk.{number}.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return layers * sum(rows * cols for rows, cols in SHAPES.values())


def measure(folder: Path, layers: int, repeat: int) -> list[dict[str, object]]:
    """The best of the repeats of every case."""
    counts = {name: write(folder / f"{name}.gguf", name, layers) for name in SOURCES}
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for turn in range(repeat + 1):
        for source in SOURCES:
            for target, choices in TARGETS.items():
                out = folder / "out.gguf"
                wall, spent = time.perf_counter(), time.process_time()
                fp4kit.quantize_file(folder / f"{source}.gguf", out, force=True, **choices)
                found = time.perf_counter() - wall, time.process_time() - spent
                # The first turn compiles and fills the page cache.
                known = best.get((source, target), found) if turn > 1 else found
                best[source, target] = min(known[0], found[0]), min(known[1], found[1])
    rows: list[dict[str, object]] = []
    for (source, target), (wall, spent) in best.items():
        size = (folder / f"{source}.gguf").stat().st_size
        rows.append({
            "source": source, "target": target, "wall_s": wall, "processor_s": spent,
            "input_mb_s": size / wall / 1e6, "weights_m_s": counts[source] / wall / 1e6,
            "processor_s_of_g_weights": spent / counts[source] * 1e9,
        })  # fmt: skip
    return rows


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where models are written, 6 GB")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rows = measure(Path(folder), given.layers, given.repeat)
    if given.json:
        print(json.dumps({"rows": rows, "processors": len(os.sched_getaffinity(0))}))
        return
    print("source  target       MB/s in   M weights/s   s of processors for 1e9 weights")
    for row in rows:
        print(
            f"{row['source']:7} {row['target']:12} {row['input_mb_s']:7.0f} "
            f"{row['weights_m_s']:13.0f} {row['processor_s_of_g_weights']:12.2f}"
        )


if __name__ == "__main__":
    main()
