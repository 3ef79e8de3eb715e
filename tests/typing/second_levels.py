# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Second-level scales."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
fp4kit.quantize(x, second_level="tensor", amax=6.0)
fp4kit.quantize(x, second_level="per_token")
fp4kit.quantize(x, second_level="none", recipe="nvfuser")
fp4kit.quantize(x, second_level=False)  # wrong
fp4kit.quantize(x, second_level="per-token")  # wrong
fp4kit.quantize_dequantize(x, second_level="row")  # wrong
fp4kit.Scheme("nvfp4", second_level="token")  # wrong
