# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""GGUF files as the gguf package has them: every code, every scale byte, every type."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from fp4kit.cpu.ggml_blocks import codes_of_blocks, join_blocks, scales_of_blocks
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.io.ggml import BLOCK_LAYOUTS, GGML_TYPES, LAYOUTS_BY_TYPE
from fp4kit.io.read.open import open_source
from gguf_models import EMBD, every_block, opened, values, weights, write_blocks, write_model
from tensor_files import read_one

LAYOUTS = list(BLOCK_LAYOUTS.values())
FORMATS = list(BLOCK_LAYOUTS)


def test_the_table_of_types_is_that_of_the_package():
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    ours = {one.number: (one.name, one.elements, one.nbytes) for one in GGML_TYPES.values()}
    # Its Q8_1, which no file has, is not that of ggml's own sources.
    theirs.pop(Kind.Q8_1)
    assert {number: ours[number] for number in theirs} == theirs
    assert {number: LAYOUTS_BY_TYPE[number].file_type for number in LAYOUTS_BY_TYPE} == {
        Kind.NVFP4: gguf.LlamaFileType.MOSTLY_NVFP4,
        Kind.MXFP4: gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    }


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_under_every_scale_byte(name, tmp_path):
    layout = BLOCK_LAYOUTS[name]
    kind, blocks = Kind(layout.type.number), every_block(layout)
    path = write_blocks(tmp_path / "m.gguf", "blk.0.ffn_up.weight", blocks, kind)
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(blocks, kind)
    with fp4kit.open(path) as tensors:
        assert tensors.layout == "gguf"
        found = tensors["blk.0.ffn_up.weight"]
    ours = np.asarray(fp4kit.dequantize(found, "float32"))
    # Where ggml has a value for a byte that means NaN: 0xFF of either.
    scale = blocks[:, : layout.scales].repeat(layout.format.block_size, axis=1)
    known = scale != 0xFF
    assert np.isnan(ours[~known]).all()
    # ggml's table of codes has one zero.
    assert np.array_equal(
        (ours + 0.0)[known].view(np.uint32), (theirs + 0.0)[known].view(np.uint32)
    )
    if name == "nvfp4":
        assert np.array_equal(ours[known].view(np.uint32), theirs[known].view(np.uint32))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_blocks_there_and_back(layout, count, seed):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, count * layout.code_bytes, np.uint8)
    scales = rng.integers(0, 256, count * layout.scales, np.uint8)
    blocks = np.empty(count * layout.type.nbytes, np.uint8)
    join_blocks(packed, scales, layout.scales, blocks)
    codes, factors = np.empty_like(packed), np.empty_like(scales)
    codes_of_blocks(blocks, layout.scales, layout.half, codes)
    same = np.arange(256, dtype=np.uint8)
    scales_of_blocks(blocks, layout.scales, layout.half, same, factors)
    assert np.array_equal(codes, packed)
    assert np.array_equal(factors, scales)
    # By the definition: byte i of a scale holds the elements i and i + half of its block.
    elements = np.stack([packed & 15, packed >> 4], -1).reshape(-1, 2, layout.half)
    expected = (elements[:, 0] | elements[:, 1] << 4).reshape(count, -1)
    assert np.array_equal(blocks.reshape(count, -1)[:, layout.scales :], expected)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_range_of_parts(data, tmp_path_factory):
    layout = data.draw(st.sampled_from(LAYOUTS))
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    blocks = rng.integers(0, 0x7F, (rows, columns * layout.type.nbytes), np.uint8)
    path = tmp_path_factory.mktemp("parts") / "m.gguf"
    write_blocks(path, "w", blocks, Kind(layout.type.number))
    with open_source(path) as source:
        for name in ("w_packed", "w_scale"):
            whole = read_one(source, name)
            first = data.draw(st.integers(0, len(whole)))
            last = data.draw(st.integers(first, len(whole)))
            piece = bytearray(last - first)
            source.read(name, first, memoryview(piece))
            assert bytes(piece) == whole[first:last]


def test_plain_types_and_q8_0(tmp_path):
    rng = np.random.default_rng(0)
    plain = {
        "f32": rng.standard_normal((3, 5)).astype(np.float32),
        "f16": rng.standard_normal((3, 5)).astype(np.float16),
        "f64": rng.standard_normal((2, 3)),
        "i8": np.arange(6, dtype=np.int8).reshape(2, 3),
        "i64": np.arange(6).reshape(3, 2, 1),
    }
    data = gguf.quantize(rng.standard_normal((7, 4, 96)).astype(np.float32), Kind.Q8_0)
    path = write_blocks(tmp_path / "m.gguf", "q8", data, Kind.Q8_0, plain)
    with fp4kit.open(path) as tensors:
        assert tensors.layout is None
        for name, array in plain.items():
            assert tensors[name].dtype == array.dtype
            assert np.array_equal(tensors[name], array)
        found = tensors["q8"]
        assert tensors.info("q8").note == "Q8_0, read as float32"
        assert tensors.info("q8").nbytes == data.nbytes
    assert found.dtype == np.float32
    assert np.array_equal(found, gguf.dequantize(data, Kind.Q8_0).reshape(7, 4, 96))


def test_ranges_of_q8_0(tmp_path):
    data = gguf.quantize(np.random.default_rng(0).standard_normal((2, 64), "f4"), Kind.Q8_0)
    path = write_blocks(tmp_path / "m.gguf", "q8", data, Kind.Q8_0)
    with open_source(path) as source:
        whole = read_one(source, "q8")
        for first, last in ((0, 4), (4, 132), (128, 256), (60, 512), (512, 512)):
            piece = bytearray(last - first)
            source.read("q8", first, memoryview(piece))
            assert bytes(piece) == whole[first:last]


def test_types_that_are_not_decoded_are_bytes(tmp_path):
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2 * 144), np.uint8)
    path = write_blocks(tmp_path / "m.gguf", "k", blocks, Kind.Q4_K)
    with fp4kit.open(path) as tensors:
        info = tensors.info("k")
        assert (info.shape, info.dtype) == ((3, 512), "q4_k")
        assert info.note == "Q4_K is not decoded here: taken as its bytes"
        assert np.array_equal(tensors["k"], blocks)


@pytest.mark.parametrize("spelling", ["blk.0.ffn_up.scale", "blk.0.ffn_up.weight.scale"])
def test_both_spellings_of_the_second_level(spelling, tmp_path):
    blocks = every_block(BLOCK_LAYOUTS["nvfp4"])[4:68]
    second = {spelling: np.array([0.25], np.float32)}
    path = write_blocks(tmp_path / "m.gguf", "blk.0.ffn_up.weight", blocks, Kind.NVFP4, second)
    with fp4kit.open(path, decode="float32") as tensors:
        assert list(tensors) == ["blk.0.ffn_up.weight"]
        found = tensors["blk.0.ffn_up.weight"]
    assert np.array_equal(found, gguf.dequantize(blocks, Kind.NVFP4) * np.float32(0.25))


def test_a_second_level_for_each_expert(tmp_path):
    blocks = every_block(BLOCK_LAYOUTS["nvfp4"])[4:64].reshape(3, 20, -1)
    seconds = np.array([0.25, 3.0, 1.7], np.float32)
    path = tmp_path / "m.gguf"
    more = {"blk.0.ffn_up_exps.scale": seconds}
    write_blocks(path, "blk.0.ffn_up_exps.weight", blocks, Kind.NVFP4, more)
    with fp4kit.open(path) as tensors:
        found = tensors["blk.0.ffn_up_exps.weight"]
    ours = np.asarray(fp4kit.dequantize(found, "float32"))
    theirs = gguf.dequantize(blocks, Kind.NVFP4).reshape(3, 20, 64) * seconds[:, None, None]
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)


@pytest.mark.parametrize(
    "second", [np.ones(2, np.float32), np.ones(1, np.float16), np.ones((3, 2), np.float32)]
)
def test_a_second_level_of_another_shape_is_refused(second, tmp_path):
    blocks = every_block(BLOCK_LAYOUTS["nvfp4"])[4:64].reshape(3, 20, -1)
    more = {"blk.0.ffn_up_exps.scale": second}
    path = write_blocks(tmp_path / "m.gguf", "blk.0.ffn_up_exps.weight", blocks, Kind.NVFP4, more)
    with pytest.raises(FileFormatError, match=r"its second level .* expected F32 of 1 or 3 values"):
        fp4kit.open(path)


def test_version_2_is_read(tmp_path):
    path = write_model(tmp_path / "m.gguf", weights())
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    with fp4kit.open(path) as tensors:
        assert tensors.metadata["general.architecture"] == "llama"
        assert tensors.metadata["some.flag"] == "True"
        assert "tokenizer.ggml.tokens" not in tensors.metadata
        assert tensors["blk.0.attn_q.weight"].shape == (EMBD, EMBD)


def test_a_model_in_shards(tmp_path):
    found = weights()
    first = write_model(tmp_path / "m.gguf", found, shards=3)
    with fp4kit.open(first) as tensors:
        assert set(tensors) == set(found)
        assert tensors["output.weight"].shape == found["output.weight"].shape
    second = tmp_path / "m-00002-of-00003.gguf"
    with pytest.raises(OptionError, match=r"is a shard of a model; give the first, m-00001-of"):
        fp4kit.open(second)
    third = tmp_path / "m-00003-of-00003.gguf"
    aside = third.rename(tmp_path / "aside")
    with pytest.raises(FileFormatError, match=r"m-00003-of-00003\.gguf: cannot be read: No such"):
        fp4kit.open(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(FileFormatError, match=r"says that it is shard 2 of 3, not 3 of 3"):
        fp4kit.open(first)
    aside.rename(third)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(OptionError, match=r"does not end in -00001-of-00003\.gguf"):
        fp4kit.open(alone)


def test_what_the_package_reads_is_what_is_read(tmp_path):
    path = write_model(tmp_path / "m.gguf", weights(experts=3), "qwen3moe", kind=Kind.Q8_0)
    theirs = opened(path)
    with fp4kit.open(path) as tensors:
        assert list(tensors) == list(theirs)
        for name, tensor in theirs.items():
            assert np.array_equal(tensors[name], values(tensor)), name
