# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How much of a tensor each format keeps: SQNR and size, as the table of docs/choosing.md.

    python benchmarks/accuracy.py [--weights MODEL.safetensors]

SQNR is 10 log10(sum x^2 / sum (x - y)^2). Random tensors are 1024 x 1024 float32 of seed 0: normal
values, and Student's t with 4 degrees of freedom for a heavy tail. Weights are the 2-D tensors of
linear layers of a safetensors file; their errors are added up as if they were one tensor. No
number depends on the machine. It is a proxy: it says nothing of a model's answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import fp4kit
from fp4kit.api.metrics import ErrorStats, error_sums
from fp4kit.backend.interface import ErrorSums

SHAPE = (1024, 1024)
#: What is measured: words for the table, format and options.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("nvfp4", "nvfp4", {}),
    ("nvfp4, `scale_search='four_over_six'`", "nvfp4", {"scale_search": "four_over_six"}),
    ("nvfp4, `scale_search='sweep'`", "nvfp4", {"scale_search": "sweep"}),
    ("nvfp4, `block_shape='2d'`", "nvfp4", {"block_shape": "2d"}),
    ("nvfp4, one level (layout mlx)", "nvfp4", {"recipe": "nvfuser", "second_level": "none"}),
    ("mxfp4, rule `even` (default)", "mxfp4", {}),
    *((f"mxfp4, rule `{rule}`", "mxfp4", {"scale_rule": rule}) for rule in ("floor", "rceil")),
    ("mxfp8", "mxfp8", {}),
    ("mxfp8_e5m2", "mxfp8_e5m2", {}),
    *(
        (f"fp8, granularity `{name}`", "fp8", {"granularity": name})
        for name in ("tensor", "channel", "block")
    ),
]


def random_tensors() -> dict[str, list[np.ndarray]]:
    """The seeded tensors by name."""
    return {
        "normal": [np.random.default_rng(0).standard_normal(SHAPE, np.float32)],
        "Student t(4)": [np.random.default_rng(0).standard_t(4, SHAPE).astype(np.float32)],
    }


def linear_weights(path: str | Path) -> Iterator[np.ndarray]:
    """The float32 weights of a file that are 2-D, embeddings left out."""
    with fp4kit.open(path) as file:
        for name, weight in file.items():
            if weight.dtype == np.float32 and weight.ndim == 2 and "embed" not in name:
                yield weight


def measure(tensors: list[np.ndarray], format: str, options: dict[str, Any]) -> ErrorStats:
    """Errors of several tensors, as if they were one."""
    total, nbytes = ErrorSums(), 0
    for x in tensors:
        q = fp4kit.quantize(x, format, **options)
        total += error_sums(x, q)
        nbytes += q.nbytes
    return ErrorStats.from_sums(total, nbytes)


def table(data: dict[str, list[np.ndarray]]) -> list[str]:
    """The lines of a Markdown table: a row for each case, a column for each kind of data."""
    lines = [f"| | bits per element | {' | '.join(data)} |", "|---" * (len(data) + 2) + "|"]
    for words, format, options in CASES:
        stats = [measure(tensors, format, options) for tensors in data.values()]
        cells = [f"{stats[0].bits_per_element:.2f}", *(f"{one.sqnr:.2f}" for one in stats)]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", metavar="FILE", help="safetensors file with float32 weights")
    arguments = parser.parse_args()
    data = random_tensors()
    if arguments.weights:
        data["weights"] = list(linear_weights(arguments.weights))
    print("\n".join(table(data)))


if __name__ == "__main__":
    main()
