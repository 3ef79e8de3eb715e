# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Groups of matrices."""

import numpy as np

import fp4kit

x = np.ones((48, 64), np.float32)
group = fp4kit.quantize_grouped(x, first_dims=[16, 32])
member: fp4kit.QuantizedTensor = group[0]
sizes: list[int] = [len(one) for one in group]
parts: tuple[fp4kit.QuantizedTensor, ...] = group[1:]
pair: fp4kit.GroupedPair = fp4kit.quantize_grouped(x, members=2, direction="both")
fp4kit.quantize_grouped(x, first_dims="16, 32")  # wrong
fp4kit.quantize_grouped(x, members=2, direction="rows")  # wrong
fp4kit.quantize_grouped(x, members=2.5)  # wrong
group.member("first")  # wrong
