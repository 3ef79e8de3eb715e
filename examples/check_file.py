# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What each format does to the tensors of a file: errors and sizes, before anything is written.

python examples/check_file.py MODEL.safetensors
"""

import sys

import fp4kit

SCHEMES = [
    fp4kit.Scheme("nvfp4"),
    fp4kit.Scheme("nvfp4", scale_search="sweep"),
    fp4kit.Scheme("mxfp4"),
    fp4kit.Scheme("mxfp8"),
]


def main(path: str) -> None:
    """Prints a row for each 2-D tensor: SQNR in dB under every scheme."""
    print("SQNR dB:", ", ".join(map(str, SCHEMES)))
    before, after = 0, [0] * len(SCHEMES)
    with fp4kit.open(path) as file:
        for name, x in file.items():
            if x.ndim != 2 or x.shape[1] % 32:
                continue
            tensors = [fp4kit.quantize(x, scheme) for scheme in SCHEMES]
            errors = [fp4kit.error_stats(x, q).sqnr for q in tensors]
            print(f"{name:50}", " ".join(f"{error:6.2f}" for error in errors))
            before += x.nbytes
            after = [total + q.nbytes for total, q in zip(after, tensors, strict=True)]
    print("smaller by", " ".join(f"{before / total:.2f}" for total in after))


if __name__ == "__main__":
    main(sys.argv[1])
