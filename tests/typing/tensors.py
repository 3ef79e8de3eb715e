# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Tensors as objects."""

import numpy as np

import fp4kit

q = fp4kit.quantize(np.ones((32, 64), np.float32))
part: fp4kit.QuantizedTensor = q[1:3]
there: fp4kit.QuantizedTensor = q.to("cuda:1")
same: bool = q == part
count: int = len(q) + q.ndim + q.size + q.nbytes
values, codes, scales = q.dequantize(np.float16), q.codes(), q.block_scale_values()
host = np.asarray(q)
print(q.shap)  # wrong
q.shape = (1, 2)  # wrong
q.to()  # wrong
q.dequantize(undo_hadamard=True)  # wrong
text: str = q.nbytes  # wrong
