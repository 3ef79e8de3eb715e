# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Directions, and what they make of a result."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
one: fp4kit.QuantizedTensor = fp4kit.quantize(x, direction="columnwise")
pair: fp4kit.DirectionPair = fp4kit.quantize(x, direction="both")
rowwise, columnwise = pair
print(rowwise.packed, pair.columnwise.block_scale)
fp4kit.quantize(x, direction="row")  # wrong
fp4kit.quantize(x, direction="column")  # wrong
fp4kit.quantize(x, axis="both")  # wrong
print(pair.packed)  # wrong
wrong: fp4kit.QuantizedTensor = fp4kit.quantize(x, direction="both")  # wrong
