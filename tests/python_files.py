# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What the tests of files from Python share: small tensors, and mappings that fail."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import fp4kit

NAME = "model.layers.0.mlp.down_proj.weight"
X = np.random.default_rng(0).standard_normal((32, 64), np.float32)
Q = fp4kit.quantize(X)
CONFIG = {"model_type": "llama", "dtype": "bfloat16"}


def one_line(error):
    assert isinstance(error.value, fp4kit.Fp4kitError)
    assert "\n" not in str(error.value)
    return str(error.value)


def quantized(**options):
    return fp4kit.quantize(X, **options)


class Failing(Mapping):
    """A mapping that fails when a value is fetched for the second time."""

    def __init__(self, values, name, error=KeyboardInterrupt):
        self._values, self._name, self._error, self._asked = values, name, error, 0

    def __getitem__(self, name):
        self._asked += name == self._name
        if self._asked > 1:
            raise self._error
        return self._values[name]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)
