# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How codes and scales are used: a W4A4 matrix product in NumPy, as a tensor core computes it.

y = x @ w.T with both operands in NVFP4. Codes of a block are multiplied exactly, every block is
scaled by both block scales, and the sum by both second-level scales.

    python examples/matrix_product.py
"""

import ml_dtypes
import numpy as np

import fp4kit

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def operand(q: fp4kit.QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """Values of the codes (rows, blocks, 16) and block scales (rows, blocks) of an operand."""
    codes = np.stack([q.packed & 15, q.packed >> 4], axis=-1)
    values = E2M1[codes].reshape(*q.block_scale.shape, 16)
    return values, q.block_scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def main() -> None:
    """Compares the product of codes with those of decoded and of original operands."""
    random = np.random.default_rng(0)
    x = random.standard_normal((32, 256), np.float32)
    w = random.standard_normal((64, 256), np.float32)
    scheme = fp4kit.Scheme("nvfp4")
    qx, qw = fp4kit.quantize(x, scheme), fp4kit.quantize(w, scheme)

    (a, a_scale), (b, b_scale) = operand(qx), operand(qw)
    blocks = np.einsum("ikc,jkc->ijk", a, b)
    total = np.einsum("ijk,ik,jk->ij", blocks, a_scale, b_scale)
    y = total * (qx.amax / 2688) * (qw.amax / 2688)

    decoded = fp4kit.dequantize(qx, "float32") @ fp4kit.dequantize(qw, "float32").T
    print("equals the product of decoded operands:", np.allclose(y, decoded, rtol=1e-4, atol=1e-4))
    print(f"SQNR of the product: {fp4kit.error_stats(x @ w.T, y).sqnr:.1f} dB")


if __name__ == "__main__":
    main()
