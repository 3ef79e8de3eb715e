# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The demo file: its bytes, and that its weights are like those of a model."""

import hashlib

import numpy as np
import pytest
import safetensors.numpy

from fp4kit.demo import demo_tensors, write_demo
from fp4kit.errors import OptionError


def test_the_demo_is_the_same_everywhere(tmp_path):
    path = tmp_path / "demo.safetensors"
    write_demo(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == "3bcafbc4412a8d1bd41644e21265e206dd7a65dd1480191b087c6398a9673d2b"
    assert 19e6 < sum(np.prod(spec.shape) for spec in demo_tensors()) < 22e6
    with pytest.raises(OptionError, match="--force"):
        write_demo(path)
    write_demo(path, force=True)
    with pytest.raises(OptionError, match=r"\.safetensors"):
        write_demo(tmp_path / "demo.bin")
    weights = safetensors.numpy.load_file(path)["model.layers.0.mlp.up_proj.weight"]
    weights = weights.astype(np.float64)
    rms = np.sqrt(np.mean(weights**2, axis=0))
    assert np.sum(rms > 4 * np.median(rms)) == 4  # outlier channels
    body = weights[:, rms < 4 * np.median(rms)].ravel()
    assert np.mean(body**4) / np.mean(body**2) ** 2 > 4  # heavier than a normal distribution's 3
