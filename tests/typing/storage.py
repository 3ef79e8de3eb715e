# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How codes and scales lie in memory."""

import numpy as np

import fp4kit

x = np.ones((32, 64), np.float32)
q = fp4kit.quantize(x, scale_layout="swizzled_128x4", nibble_order="high_first", pad=True)
layout: str = q.scale_layout
fp4kit.swizzle(q.block_scale, "swizzled_8x4")
fp4kit.quantize(x, scale_layout="swizzled")  # wrong
fp4kit.quantize(x, nibble_order="high")  # wrong
fp4kit.quantize(x, pad="yes")  # wrong
fp4kit.quantize(x, block_shape="16x16")  # wrong
