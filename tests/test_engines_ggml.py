# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""ggml's own decoders and encoders of FP4 beside fp4kit's: `make engines`."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import fp4kit

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

import engine_models as models
import ggml_library
from fp4kit.io.ggml import BLOCK_LAYOUTS
from gguf_models import every_block, opened, values, write_blocks

NAME = "blk.0.ffn_up.weight"


@pytest.mark.parametrize("name", BLOCK_LAYOUTS)
def test_every_code_under_every_scale_byte(name, tmp_path):
    """ggml on a CPU, the gguf package and fp4kit; 0xFF alone is NaN here, and `verify` says so.

    ggml on CUDA decodes 0xFF of NVFP4 to 0: there is no value that all of them agree on.
    """
    layout = BLOCK_LAYOUTS[name]
    kind, blocks = Kind(layout.type.number), every_block(layout)
    path = write_blocks(tmp_path / "m.gguf", NAME, blocks, kind)
    back = tmp_path / "back.gguf"
    fp4kit.dequantize_file(path, back, "float32")
    ours = values(opened(back)[NAME])
    theirs = ggml_library.decode(blocks, kind)
    with np.errstate(all="ignore"):
        assert np.array_equal(theirs.view(np.uint32), gguf.dequantize(blocks, kind).view(np.uint32))
    nan = (blocks[:, : layout.scales] == 0xFF).repeat(layout.format.block_size, axis=1)
    assert np.isnan(ours[nan]).all()
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    largest = {"nvfp4": 480.0 * 6, "mxfp4": np.inf}[name]
    assert np.abs(theirs[nan]).max() == largest
    assert fp4kit.verify(path).faults == [
        f"{NAME}_scale: {layout.scales} of {256 * layout.scales} block scales are NaN"
    ]


def by_ggml(source, target, kind):
    """The weights that fp4kit quantizes, through an encoder of ggml's own."""
    found = {}
    for name, tensor in opened(source).items():
        found[name] = np.array(values(tensor))
        if name.startswith("blk.") and found[name].ndim == 2:
            blocks = ggml_library.encode(found[name], kind)
            found[name] = ggml_library.decode(blocks, kind)
    return models.write(target, "llama", found)


CHOICES = {
    "nvfp4": {"scheme": "nvfp4"},
    "sweep": {"scheme": "nvfp4", "scale_search": "sweep"},
    "mxfp4": {"scheme": "mxfp4"},
}


@pytest.mark.parametrize("size", [1.0, 0.25])
def test_less_divergence_than_ggmls_own_encoders(size, tmp_path):
    """KL divergence of the next token from float32, with weights of several sizes.

    ggml's blocks are decoded, so that they do not have the engine's error of activations, and
    fp4kit's do.
    """
    weights = models.tensors("llama")
    for name, array in weights.items():
        if name.startswith("blk.") and array.ndim == 2:
            weights[name] = array * np.float32(size)
    source, target = models.write(tmp_path / "m.gguf", "llama", weights), tmp_path / "q.gguf"
    tokens = np.random.default_rng(7).integers(0, models.VOCAB, models.CONTEXT)
    reference, found = models.logits(source, tokens), {}
    for kind in (Kind.NVFP4, Kind.MXFP4):
        by_ggml(source, target, kind)
        found[f"ggml {kind.name}"] = models.divergence(reference, models.logits(target, tokens))
    for name, choices in CHOICES.items():
        fp4kit.quantize_file(source, target, force=True, **choices)
        found[name] = models.divergence(reference, models.logits(target, tokens))
    assert 0 < found["sweep"] < 0.9 * min(found["ggml NVFP4"], found["ggml MXFP4"])
    assert found["sweep"] < found["nvfp4"] < found["mxfp4"]
