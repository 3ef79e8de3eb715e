# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""`fp4kit quantize MODEL.gguf`: what stands in the file, as the gguf package reads it."""

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

import fp4kit
from command_line import fail, succeed
from fp4kit.errors import OptionError
from fp4kit.io.ggml import BLOCK_LAYOUTS
from fp4kit.io.gguf_rules import why_one_level
from fp4kit.reference.scaling import convert_second_level
from gguf_models import EMBD, FF, fields, opened, values, weights, write_model

KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0]
DTYPES = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}


def rounded(array, kind):
    """What a source of an element type holds."""
    return np.asarray(array.astype(DTYPES.get(kind, np.float32)))


def raw(tensor):
    """Bytes of a tensor."""
    return np.ascontiguousarray(tensor.data).view(np.uint8).tobytes()


def second_of(found, name):
    """The `.scale` of a weight, or None."""
    tensor = found.get(f"{name.removesuffix('.weight')}.scale")
    return None if tensor is None else np.asarray(tensor.data)


def parts_of(tensor, form):
    """Codes (one per byte, in order) and scale bytes of a tensor in blocks, from its bytes."""
    layout = BLOCK_LAYOUTS[form]
    blocks = np.frombuffer(raw(tensor), np.uint8).reshape(-1, layout.type.nbytes)
    codes = blocks[:, layout.scales :].reshape(-1, layout.half)
    elements = np.concatenate([codes & 15, codes >> 4], axis=1)
    return elements.reshape(-1), blocks[:, : layout.scales].reshape(-1)


def check_weight(tensor, second, array, form, **choices):
    """A weight of a file is what fp4kit.quantize makes of each expert."""
    experts = array if array.ndim == 3 else array[None]
    codes, scales, seconds = [], [], []
    for expert in experts:
        made = fp4kit.quantize(expert, form, **choices)
        codes.append(np.stack([made.packed & 15, made.packed >> 4], -1).reshape(-1))
        scales.append(np.asarray(made.block_scale).reshape(-1))
        if form == "nvfp4":
            keeps = np.asarray(made.amax, np.float32).reshape(-1)
            largest = choices.get("e4m3_max", 448)
            seconds.append(convert_second_level(keeps, "amax", "decode_scale", largest))
    found = parts_of(tensor, form)
    assert np.array_equal(found[0], np.concatenate(codes))
    assert np.array_equal(found[1], np.concatenate(scales))
    if form == "nvfp4":
        assert np.array_equal(second, np.concatenate(seconds))
    else:
        assert second is None


@pytest.mark.parametrize("form", BLOCK_LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_scales_and_second_levels(form, kind, tmp_path):
    arrays = weights()
    path = write_model(tmp_path / "m.gguf", arrays, kind=kind)
    succeed("quantize", path, "--format", form)
    source, found = opened(path), opened(tmp_path / f"m-{form}.gguf")
    for name, tensor in source.items():
        if not name.startswith("blk.") or "norm" in name:
            assert raw(found[name]) == raw(tensor)
            assert found[name].tensor_type == tensor.tensor_type
            continue
        assert found[name].tensor_type == Kind(BLOCK_LAYOUTS[form].type.number)
        array = values(tensor) if kind == Kind.Q8_0 else rounded(arrays[name], kind)
        check_weight(found[name], second_of(found, name), array, form)
    extra = {name for name in found if name not in source}
    assert all(name.endswith(".scale") for name in extra)
    assert bool(extra) == (form == "nvfp4")


@pytest.mark.parametrize("form", BLOCK_LAYOUTS)
@pytest.mark.usefixtures("small_slabs")
def test_experts_have_a_second_level_each(form, tmp_path):
    arrays = weights(experts=3)
    for number, name in enumerate(arrays):
        if "_exps" in name:
            arrays[name] *= np.array([1, 7, 0.01], np.float32)[:, None, None] * (number + 1)
    path = write_model(tmp_path / "m.gguf", arrays, "qwen3moe", kind=Kind.F32)
    succeed("quantize", path, "-o", tmp_path / "q.gguf", "--format", form)
    found = opened(tmp_path / "q.gguf")
    for name in arrays:
        if "_exps" in name:
            second = second_of(found, name)
            assert second is None or second.shape == (3,)
            check_weight(found[name], second, arrays[name], form)
    assert found["blk.0.ffn_gate_inp.weight"].tensor_type == Kind.F32


@pytest.mark.parametrize("search", ["four_over_six", "sweep"])
@pytest.mark.parametrize("largest", [448, 256])
def test_scale_search(search, largest, tmp_path):
    arrays = weights(layers=1)
    path = write_model(tmp_path / "m.gguf", arrays, kind=Kind.F32)
    options = ("--scale-search", search, "--e4m3-max", largest)
    succeed("quantize", path, "-o", tmp_path / "q.gguf", *options)
    found = opened(tmp_path / "q.gguf")
    name = "blk.0.ffn_down.weight"
    choices = {"scale_search": search, "e4m3_max": largest}
    check_weight(found[name], second_of(found, name), arrays[name], "nvfp4", **choices)


@pytest.mark.parametrize(
    ("recipe", "search", "largest"),
    [("te", None, 448), ("te", "sweep", 448), ("te", "four_over_six", 256), ("modelopt", None, 448),
     ("compressed-tensors", None, 448), ("nvfuser", None, 448), ("torchao", None, 448)],
)  # fmt: skip
def test_one_level_where_llama_cpp_applies_none(recipe, search, largest, tmp_path):
    """Qwen2's feed-forward weights: block scales alone, E4M3 of the block's amax / 6."""
    arrays = weights(layers=1, scale=0.5)
    path = write_model(tmp_path / "m.gguf", arrays, "qwen2", kind=Kind.F32)
    options = ["--recipe", recipe]
    if search:
        options += ["--scale-search", search, "--e4m3-max", largest]
    result = succeed("quantize", path, "-o", tmp_path / "q.gguf", "--json", *options)
    found = opened(tmp_path / "q.gguf")
    report = {tensor["name"]: tensor for tensor in json.loads(result.stdout)["tensors"]}
    for name, array in arrays.items():
        if not name.startswith("blk.0.ffn") or "norm" in name:
            continue
        assert second_of(found, name) is None
        reason = f"no .scale of {name.split('.')[2]} in architecture 'qwen2'"
        assert reason in report[name]["facts"]["one_level"]
        decoded = values(found[name])
        error = float(np.square(decoded - array).sum())
        np.testing.assert_allclose(report[name]["stats"]["mse"], error / array.size, rtol=1e-5)
        scales = parts_of(found[name], "nvfp4")[1]
        amax = np.abs(array.reshape(-1, 16)).max(axis=1)
        wanted = (amax / 6).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        if search is None:
            assert np.abs(scales.astype(int) - wanted).max() <= 1
            assert (scales == wanted).mean() > 0.99
    assert second_of(found, "blk.0.attn_q.weight") is not None


def test_a_search_helps_one_level_most(tmp_path):
    arrays = weights(layers=1, scale=0.01)
    path = write_model(tmp_path / "m.gguf", arrays, "qwen2")
    quality = {}
    for search in (None, "four_over_six", "sweep"):
        report = fp4kit.quantize_file(path, force=True, scale_search=search)
        found = {tensor.name: tensor.stats for tensor in report.tensors}
        quality[search] = found["blk.0.ffn_up.weight"].sqnr, found["blk.0.attn_q.weight"].sqnr
    assert quality[None][0] < quality[None][1] - 1  # two levels are better
    assert quality["sweep"][0] > quality[None][0] + 1


def test_where_second_levels_go():
    names = {"blk.3.ffn_up.weight", "blk.4.ffn_up.weight", "blk.4.ffn_up.bias"}
    assert why_one_level("llama", "blk.3.ffn_up.weight", names) == ""
    assert why_one_level("llama", "output.weight", names) == ""
    assert "with a bias" in why_one_level("llama", "blk.4.ffn_up.weight", names)
    assert "'qwen2'" in why_one_level("qwen2", "blk.3.ffn_up.weight", names)
    assert why_one_level("qwen2", "blk.3.attn_q.weight", names) == ""
    assert "ffn_up in" in why_one_level("gemma3", "blk.3.ffn_up.weight", names)
    assert "ffn_gate_up_exps" in why_one_level("llama", "blk.0.ffn_gate_up_exps.weight", names)
    assert "token_embd" in why_one_level("llama", "token_embd.weight", names)
    assert "as far as known" in why_one_level("something new", "blk.3.attn_q.weight", names)


def test_metadata_is_carried_over(tmp_path):
    more = [("a.list", [[1, 2], [3]][0], gguf.GGUFValueType.ARRAY)]
    path = write_model(tmp_path / "m.gguf", weights(), more=more)
    for form, kind in (("nvfp4", 39), ("mxfp4", 38)):
        succeed("quantize", path, "-o", tmp_path / "q.gguf", "--format", form, "--force")
        before, after = fields(path), fields(tmp_path / "q.gguf")
        assert after.pop("general.file_type")[1] == kind
        assert after.pop("general.quantization_version")[1] == 2
        before.pop("general.file_type")
        assert after == before
        assert list(after) == list(before)


def test_include_and_exclude(tmp_path):
    path, target = write_model(tmp_path / "m.gguf", weights()), tmp_path / "q.gguf"
    options = ("--include", "output.weight", "--include", "token_embd*", "--exclude", "*attn_v*")
    succeed("quantize", path, "-o", target, *options)
    found = opened(target)
    assert found["output.weight"].tensor_type == Kind.NVFP4
    assert "output.scale" in found
    assert found["token_embd.weight"].tensor_type == Kind.NVFP4
    assert "token_embd.scale" not in found
    assert found["blk.0.attn_v.weight"].tensor_type == Kind.BF16
    assert found["blk.0.attn_q.weight"].tensor_type == Kind.NVFP4
    text = fail("quantize", path, "-o", tmp_path / "r.gguf", "--exclude", "*nothing*")
    assert "no tensor matches exclude='*nothing*'" in text
    text = fail("quantize", path, "-o", tmp_path / "r.gguf", "--exclude", "*")
    assert "excluded by * (16 tensors)" in text
    assert not (tmp_path / "r.gguf").exists()


def test_rows_that_are_no_whole_blocks(tmp_path):
    arrays = weights(layers=1)
    arrays["blk.0.attn_q.weight"] = arrays["blk.0.attn_q.weight"][:, :96]
    path = write_model(tmp_path / "m.gguf", arrays)
    report = fp4kit.quantize_file(path)
    found = {tensor.name: tensor for tensor in report.tensors}
    assert found["blk.0.attn_q.weight"].reason == "rows of 96 are not whole blocks of 64"
    report = fp4kit.quantize_file(path, scheme="mxfp4")
    assert {tensor.name: tensor.action for tensor in report.tensors}[
        "blk.0.attn_q.weight"
    ] == "quantize"


def test_blocks_in_the_source_stay(tmp_path):
    arrays = weights(layers=1)
    kinds = {"blk.0.attn_q.weight": Kind.MXFP4}
    path = write_model(tmp_path / "m.gguf", arrays, kinds=kinds)
    report = fp4kit.quantize_file(path, tmp_path / "q.gguf")
    reasons = {tensor.name: tensor.reason for tensor in report.tensors}
    assert reasons["blk.0.attn_q.weight"] == "is mxfp4 already"
    found, before = opened(tmp_path / "q.gguf"), opened(path)
    assert raw(found["blk.0.attn_q.weight"]) == raw(before["blk.0.attn_q.weight"])
    with pytest.raises(OptionError, match="no tensor is quantized"):
        fp4kit.quantize_file(tmp_path / "q.gguf", tmp_path / "r.gguf")


def test_types_that_are_not_decoded_stay(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    blocks = np.random.default_rng(0).integers(0, 256, (8, 144), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=Kind.Q4_K)
    writer.add_tensor("blk.0.attn_k.weight", np.ones((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    result = succeed("quantize", tmp_path / "m.gguf", "-o", tmp_path / "q.gguf")
    assert "q4_k is not decoded; give the model in F32, F16, BF16 or Q8_0" in result.stdout
    found = opened(tmp_path / "q.gguf")["blk.0.attn_q.weight"]
    assert found.tensor_type == Kind.Q4_K
    assert raw(found) == blocks.tobytes()


def test_a_model_in_shards(tmp_path):
    arrays = weights()
    first = write_model(tmp_path / "m.gguf", arrays, shards=3)
    succeed("quantize", first)
    one = opened(write_model(tmp_path / "one.gguf", arrays))
    succeed("quantize", tmp_path / "one.gguf")
    whole = opened(tmp_path / "one-nvfp4.gguf")
    assert set(one) < set(whole)
    found, names = {}, []
    for number in range(1, 4):
        path = tmp_path / f"m-nvfp4-{number:05d}-of-00003.gguf"
        found |= opened(path)
        kept = fields(path)
        assert kept["split.no"][1] == number - 1
        assert kept["split.tensors.count"][1] == len(whole)
        names += [path.name]
    assert fields(tmp_path / names[0])["general.file_type"][1] == 39
    assert "general.file_type" not in fields(tmp_path / names[1])
    assert {name: raw(tensor) for name, tensor in found.items()} == {
        name: raw(tensor) for name, tensor in whole.items()
    }
    text = fail("quantize", first, "-o", tmp_path / "q.gguf")
    assert "give its first one a name that ends in -00001-of-00003.gguf" in text
    text = fail("quantize", first)
    assert "m-nvfp4-00001-of-00003.gguf: exists already" in text
    assert fp4kit.verify(tmp_path / names[0], first).ok


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--format", "mxfp8"), 1, "ggml has no mxfp8; choose nvfp4 or mxfp4"),
        (("--format", "fp8"), 1, "ggml has no fp8"),
        (("--pad",), 2, "--pad is not for .gguf files"),
        (("--scale-layout", "linear"), 2, "--scale-layout is not for .gguf files"),
        (("--cast", "float32"), 2, "--cast is not for .gguf files"),
        (("--layout", "comfy"), 2, "--layout is for model directories; a .gguf file stays one"),
        (("-o", "x.safetensors"), 1, "x.safetensors: the output must end in .gguf"),
        (("--include", "x*"), 1, "no tensor matches include='x*'"),
    ],
)
def test_refused(options, code, message, tmp_path):
    path = write_model(tmp_path / "m.gguf", weights(layers=1))
    assert message in fail("quantize", path, *options, code=code)
    assert list(tmp_path.iterdir()) == [path]


def test_from_python(tmp_path):
    path = write_model(tmp_path / "m.gguf", weights(layers=1))
    with pytest.raises(OptionError, match=r"pad is ggml's own in a GGUF file; leave it out"):
        fp4kit.quantize_file(path, pad=True)
    with pytest.raises(OptionError, match="cast is for NumPy's files"):
        fp4kit.quantize_file(path, cast="float32")
    report = fp4kit.quantize_file(path, dry_run=True)
    assert report.target is None
    assert sum(tensor.bytes_after for tensor in report.tensors) < path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]
    made = fp4kit.quantize_file(path)
    assert [t.bytes_after for t in made.tensors] == [t.bytes_after for t in report.tensors]
    size = sum(tensor.bytes_after for tensor in made.tensors)
    assert size < (tmp_path / "m-nvfp4.gguf").stat().st_size < size + 8192


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_shape(data, tmp_path_factory):
    form = data.draw(st.sampled_from(sorted(BLOCK_LAYOUTS)))
    step = BLOCK_LAYOUTS[form].type.elements
    lead = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    shape = (*lead, step * data.draw(st.integers(1, 4)))
    name = "blk.0.ffn_up_exps.weight" if len(shape) == 3 else "blk.0.ffn_up.weight"
    array = np.random.default_rng(0).standard_normal(shape, np.float32)
    folder = tmp_path_factory.mktemp("shape")
    path = write_model(folder / "m.gguf", {name: array}, kind=Kind.F32)
    fp4kit.quantize_file(path, folder / "q.gguf", form)
    found = opened(folder / "q.gguf")
    assert tuple(found[name].shape[::-1]) == shape
    check_weight(found[name], second_of(found, name), array, form)
    assert fp4kit.verify(folder / "q.gguf", path).ok


def test_the_sizes_of_the_samples():
    """What the tests above take for granted."""
    assert EMBD % 64 == FF % 64 == 0
