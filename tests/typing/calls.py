# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What belongs to a call: backend, policy, output."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
q = fp4kit.quantize(x, backend="cpu", nonfinite="propagate")
fp4kit.quantize(x, out=q)
y = fp4kit.quantize_dequantize(x, dtype=np.float16, backend="reference")
fp4kit.quantize(x, backend="gpu")  # wrong
fp4kit.quantize(x, nonfinite="ignore")  # wrong
fp4kit.quantize(x, out=x)  # wrong
fp4kit.quantize()  # wrong
