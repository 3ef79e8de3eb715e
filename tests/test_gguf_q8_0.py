# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Sources in Q8_0, of which large tensors are read twice: first for the amax."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import fp4kit
from fp4kit.errors import NonFiniteError
from gguf_models import opened, write_blocks


@pytest.mark.parametrize("taken", [False, True], ids=["found in blocks", "its name is taken"])
def test_the_amax_of_q8_0_in_pieces(taken, tmp_path, request):
    """Read twice where it is large: the amax comes from the scales and codes of its blocks."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (300, 4, 34), np.uint8)
    scales = (rng.standard_normal((300, 4)) * 1e-3).astype(np.float16)
    scales[0, 0] = 6e-8  # subnormal
    blocks[..., :2] = scales[..., None].view(np.uint8)
    # The largest magnitude is that of a code without a positive counterpart, under a scale below 0.
    blocks[299, 3, :2] = np.array([-0.01], np.float16).view(np.uint8)
    blocks[299, 3, 33] = 0x80
    name = "blk.0.attn_q.weight"
    more = {f"{name}_amax": np.ones(3, np.float32)} if taken else {}
    path = write_blocks(tmp_path / "m.gguf", name, blocks.reshape(300, -1), Kind.Q8_0, more)
    fp4kit.quantize_file(path, tmp_path / "whole.gguf")
    request.getfixturevalue("small_slabs")
    done = []
    fp4kit.quantize_file(path, tmp_path / "pieces.gguf", progress=lambda *at: done.append(at))
    assert (tmp_path / "pieces.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert done[-1][0] == done[-1][1]
    assert len(done) > 4
    (second,) = opened(tmp_path / "whole.gguf")["blk.0.attn_q.scale"].data
    assert second == np.float32(np.float16(0.01)) * np.float32(128) / np.float32(2688)


def test_a_q8_0_scale_that_is_no_number(tmp_path, request):
    request.getfixturevalue("small_slabs")
    blocks = np.ones((300, 4, 34), np.uint8)
    blocks[200, 1, :2] = np.array([np.nan], np.float16).view(np.uint8)
    path = write_blocks(
        tmp_path / "m.gguf", "blk.0.attn_q.weight", blocks.reshape(300, -1), Kind.Q8_0
    )
    with pytest.raises(NonFiniteError, match=r"holds 32 NaN and 0 infinite .* \(200, 32\)"):
        fp4kit.quantize_file(path)
