# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Rounding, searches and activations."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
fp4kit.quantize(x, rounding="stochastic", seed=1, subsequence=2)
fp4kit.quantize(x, scale_search="four_over_six", search_error="mae", e4m3_max=256)
fp4kit.quantize(x, activation="dgelu", activation_input=x)
fp4kit.quantize(x, rounding="random")  # wrong
fp4kit.quantize(x, seed="one")  # wrong
fp4kit.quantize(x, scale_search="4/6")  # wrong
fp4kit.quantize(x, activation="swigloo")  # wrong
