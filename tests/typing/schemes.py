# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Schemes as objects."""

import numpy as np

import fp4kit
from fp4kit import Scheme

scheme = Scheme("nvfp4", recipe="torchao", scale_layout="swizzled_128x4")
other: Scheme = scheme.replace(recipe="modelopt")
fp4kit.quantize(np.ones((32, 64), np.float32), scheme, seed=1)
names = {scheme: "first", other: "second"}
Scheme("nvfp5")  # wrong
Scheme("nvfp4", recipe="torch")  # wrong
Scheme("nvfp4", "torchao")  # wrong
Scheme("nvfp4", colour="red")  # wrong
Scheme("mxfp8", scale_rule="round")  # wrong
scheme.recipe = "te"  # wrong
