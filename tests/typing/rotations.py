# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Random Hadamard transforms."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
q = fp4kit.quantize(x, rht=True, rht_rounding="none")
back = fp4kit.dequantize(q, undo_rht=True)
fp4kit.hadamard_transform(x, 0xD7E8, direction="columnwise", inverse=True)
fp4kit.hadamard_transform(x, direction="row")  # wrong
fp4kit.hadamard_transform(x, rounding="bfloat16")  # wrong
fp4kit.quantize(x, rht="yes")  # wrong
fp4kit.dequantize(q, undo_hadamard=True)  # wrong
