# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What threads of llama.cpp ask for or complain about, rebuilt as inputs.

Pull requests and issues by number; those about checkpoints (15415, 19769, 21095, 28636) are in
tests/test_gguf_convert.py, and what the engine computes in tests/test_engines_*.py.

- 22858, 23692, 25153, 25446: llama-quantize makes no NVFP4, or none with second levels.
- 22897: second levels of 1, or one for all experts; 23563, 23629: scales that nothing applies.
- 23572: NVFP4 made by hand has the accuracy of Q3_K.
- 19769, 21095: codes of ModelOpt, and of compressed-tensors, whose second levels are reciprocal.
- 15415: DeepSeek in NVFP4; 28636: NVFP4 beside FP8 in one checkpoint.
"""

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

import fp4kit
from gguf_models import EMBD, FF, fields, opened, values, weights, write_model


def quantized(tmp_path, found, architecture="llama", **choices):
    path = write_model(tmp_path / "m.gguf", found, architecture)
    report = fp4kit.quantize_file(path, tmp_path / "q.gguf", force=True, **choices)
    assert fp4kit.verify(tmp_path / "q.gguf", path).ok
    return opened(tmp_path / "q.gguf"), report


def test_a_sound_nvfp4_of_a_bf16_model(tmp_path):
    """Pull request 22858: what llama-quantize made was "like Q3_K"."""
    _, report = quantized(tmp_path, weights(scale=0.02), scale_search="sweep")
    assert report.total_stats.sqnr > 21.5
    _, naive = quantized(tmp_path, weights(scale=0.02), "qwen2")
    assert naive.total_stats.sqnr > 19.5


def test_second_levels_are_those_of_the_weights(tmp_path):
    """Pull request 22897: one for each weight and each expert, in decode direction, none of 1."""
    arrays = weights(experts=3)
    found, _ = quantized(tmp_path, arrays, "qwen3moe")
    for name, array in arrays.items():
        if not name.startswith("blk.") or "norm" in name or "gate_inp" in name:
            continue
        second = np.asarray(found[f"{name.removesuffix('.weight')}.scale"].data)
        experts = values(found[name]).reshape(len(second), -1) * second[:, None]
        amax = np.abs(array).reshape(len(second), -1).max(axis=1)
        assert len(second) == (3 if "_exps" in name else 1)
        np.testing.assert_allclose(second, amax / 2688, rtol=0.01)
        np.testing.assert_allclose(np.abs(experts).max(axis=1), amax, rtol=0.05)


def test_experts_alone(tmp_path):
    """Pull request 25446: experts in NVFP4, everything else as a Q8_0 model has it."""
    path = write_model(tmp_path / "m.gguf", weights(experts=3), "qwen3moe", kind=Kind.Q8_0)
    fp4kit.quantize_file(path, tmp_path / "q.gguf", exclude=["*attn*"])
    found, before = opened(tmp_path / "q.gguf"), opened(path)
    for name, tensor in before.items():
        if "_exps" in name:
            assert found[name].tensor_type == Kind.NVFP4
        else:
            assert found[name].tensor_type == tensor.tensor_type
            assert np.array_equal(found[name].data, tensor.data)
    assert fp4kit.verify(tmp_path / "q.gguf", path).ok


def test_layers_that_predict_further_tokens(tmp_path):
    """Pull request 23563: a `.scale` of theirs kept models from loading; they get one level."""
    arrays = weights(layers=1)
    names = ("blk.0.nextn.eh_proj.weight", "blk.0.nextn.shared_head_head.weight")
    arrays |= {name: np.full((64, EMBD), 0.01, np.float32) for name in names}
    found, report = quantized(tmp_path, arrays, "qwen35")
    for name in names:
        assert found[name].tensor_type == Kind.NVFP4
        assert f"{name.removesuffix('.weight')}.scale" not in found
    assert any("llama.cpp applies no .scale of" in warning for warning in report.warnings)


def test_the_file_says_what_it_is(tmp_path):
    """Pull requests 22858 and 22897: `general.file_type` of NVFP4 was none that tools knew."""
    for scheme, file_type in (("nvfp4", gguf.LlamaFileType.MOSTLY_NVFP4),
                              ("mxfp4", gguf.LlamaFileType.MOSTLY_MXFP4_MOE)):  # fmt: skip
        path = write_model(tmp_path / "m.gguf", weights())
        fp4kit.quantize_file(path, tmp_path / "q.gguf", scheme, force=True)
        found = fields(tmp_path / "q.gguf")
        assert found["general.file_type"][1] == file_type
        assert found["general.quantization_version"][1] == gguf.GGML_QUANT_VERSION


def test_small_weights(tmp_path):
    """A second level keeps the accuracy of weights that block scales alone cannot reach."""
    for scale in (1e-2, 1e-4, 1e-8):
        found = {name: array * np.float32(scale / 0.02) for name, array in weights().items()}
        _, report = quantized(tmp_path, found)
        assert report.total_stats.sqnr > 20


def test_mistral_3_has_feed_forward_scales(tmp_path):
    """Pull request 23629."""
    found, _ = quantized(tmp_path, weights(), "mistral3")
    assert "blk.0.ffn_down.scale" in found


def test_a_tied_output(tmp_path):
    """Without output.weight the embedding is the output, which may have no `.scale`."""
    arrays = weights()
    del arrays["output.weight"]
    found, _ = quantized(tmp_path, arrays, include=["token_embd.weight"])
    assert found["token_embd.weight"].tensor_type == Kind.NVFP4
    assert "token_embd.scale" not in found


def test_feed_forward_weights_with_a_bias(tmp_path):
    """llama.cpp stops at a `.scale` there."""
    arrays = weights()
    arrays["blk.0.ffn_up.bias"] = np.ones(FF, np.float32)
    found, _ = quantized(tmp_path, arrays)
    assert "blk.0.ffn_up.scale" not in found
    assert "blk.1.ffn_up.scale" in found


def test_input_scales_beside_weights_are_carried_over(tmp_path):
    """Its converter writes them; llama.cpp does not use them."""
    arrays = weights(layers=1)
    arrays["blk.0.attn_q.input_scale"] = np.full(1, 0.5, np.float32)
    found, _ = quantized(tmp_path, arrays)
    assert float(found["blk.0.attn_q.input_scale"].data[0]) == 0.5
    fp4kit.dequantize_file(tmp_path / "q.gguf", tmp_path / "back.gguf")
    assert "blk.0.attn_q.input_scale" in opened(tmp_path / "back.gguf")


def test_experts_of_which_one_is_never_used(tmp_path):
    arrays = weights(experts=3)
    arrays["blk.0.ffn_up_exps.weight"][1] = 0
    found, _ = quantized(tmp_path, arrays, "qwen3moe")
    second = np.asarray(found["blk.0.ffn_up_exps.scale"].data)
    assert np.isfinite(second).all()
    assert (second > 0).all()
    assert not values(found["blk.0.ffn_up_exps.weight"])[1].any()


def test_a_weight_of_zeros(tmp_path):
    arrays = weights()
    arrays["blk.0.attn_q.weight"][:] = 0
    found, _ = quantized(tmp_path, arrays)
    assert not values(found["blk.0.attn_q.weight"]).any()


def test_rows_of_which_ggml_takes_mxfp4_alone(tmp_path):
    """Hidden sizes that are multiples of 32 and not of 64 (2880 / 90 of gpt-oss are both)."""
    arrays = {"blk.0.attn_q.weight": np.ones((64, 96), np.float32)}
    path = write_model(tmp_path / "m.gguf", arrays)
    fp4kit.quantize_file(path, tmp_path / "q.gguf", "mxfp4")
    assert opened(tmp_path / "q.gguf")["blk.0.attn_q.weight"].tensor_type == Kind.MXFP4


def test_a_model_that_is_quantized_already(tmp_path):
    """Q8_0 is a source like others; its embedding and output stay Q8_0."""
    path = write_model(tmp_path / "m.gguf", weights(), kind=Kind.Q8_0)
    fp4kit.quantize_file(path, tmp_path / "q.gguf")
    found, before = opened(tmp_path / "q.gguf"), opened(path)
    assert found["output.weight"].tensor_type == Kind.Q8_0
    assert np.array_equal(found["output.weight"].data, before["output.weight"].data)
    assert fp4kit.verify(tmp_path / "q.gguf", path).ok


def test_metadata_that_only_some_models_have(tmp_path):
    """Chat templates, empty arrays, and arrays of every type of number."""
    more = [("tokenizer.chat_template", "{% for m in messages %}é\n{% endfor %}" * 500,
             gguf.GGUFValueType.STRING)]  # fmt: skip
    path = write_model(tmp_path / "m.gguf", weights(layers=1), more=more)
    fp4kit.quantize_file(path, tmp_path / "q.gguf")
    with fp4kit.open(tmp_path / "q.gguf") as tensors:
        assert tensors.metadata["tokenizer.chat_template"].count("é") == 500


def test_vision_towers_stay(tmp_path):
    arrays = {
        "v.patch_embd.weight": np.ones((EMBD, 64), np.float32),
        "v.position_embd.weight": np.ones((4, 64), np.float32),
        "v.blk.0.attn_q.weight": np.ones((64, 64), np.float32),
    }
    found, _ = quantized(tmp_path, arrays, "clip")
    kinds = {name: tensor.tensor_type for name, tensor in found.items()}
    assert kinds["v.patch_embd.weight"] == kinds["v.position_embd.weight"] == Kind.BF16
    assert kinds["v.blk.0.attn_q.weight"] == Kind.NVFP4
    assert "v.blk.0.attn_q.scale" not in found
