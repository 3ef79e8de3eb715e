# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""transformers loads checkpoints of several formats, and calibration sees what layers are given."""

from __future__ import annotations

import numpy as np
import pytest

import fp4kit
from fp4kit.errors import FileFormatError, OptionError
from fp4kit.files import run_layers
from fp4kit.io.moments import read_moments

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")
pytest.importorskip("compressed_tensors", reason="the peers extra is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")
#: FP8 weights are decoded in bfloat16 by compressed-tensors: one step of it.
TOLERANCE = 2.0**-7
WORDS = [f"w{number}" for number in range(62)]


def tokenizer(folder):
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate([*WORDS, "<unk>", "</s>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)


def saved(folder, config, kind):
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer(folder)
    return folder


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = transformers.LlamaConfig(**SIZES)
    folder = tmp_path_factory.mktemp("models") / "llama"
    return saved(folder, config, transformers.LlamaForCausalLM)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    config = transformers.Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=4,
        num_experts_per_tok=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "moe"
    return saved(folder, config, transformers.Qwen2MoeForCausalLM)


@pytest.fixture
def text(tmp_path):
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, count)) for count in (5, 9, 9, 17)]
    (tmp_path / "text.txt").write_text("\n".join([*lines, "", "  "]))
    return tmp_path / "text.txt"


@pytest.mark.parametrize("small", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("auto", ["AutoModelForCausalLM", "AutoModel"])
def test_transformers_loads_several_formats(small, auto, llama, tmp_path):
    report = fp4kit.survey(llama, [small, "fp8", "bf16"], budget=6.5, pins=["*1*o_proj=bf16"])
    assert set(report.plan.values()) == {small, "fp8", "bf16"}
    fp4kit.quantize_checkpoint(llama, tmp_path / "mixed", plan=report.plan)
    fp4kit.dequantize_checkpoint(tmp_path / "mixed", tmp_path / "plain")
    read = getattr(transformers, auto).from_pretrained
    expected = dict(read(tmp_path / "plain", dtype="bfloat16").named_parameters())
    model, info = read(tmp_path / "mixed", dtype="bfloat16", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "mismatched_keys"))
    unexpected = set(info["unexpected_keys"])
    assert unexpected <= ({"lm_head.weight"} if auto == "AutoModel" else set())
    model(torch.arange(8).reshape(1, 8))  # decompresses
    found = dict(model.named_parameters())
    for name, weight in expected.items():
        difference = (found[name].float() - weight.float()).abs().max()
        assert difference <= TOLERANCE * weight.float().abs().max(), name


def inputs_of(folder, text, names):
    """What linear layers were given, by hooks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    words = transformers.AutoTokenizer.from_pretrained(folder)
    seen = {name: [] for name in names}
    for name, module in model.named_modules():
        if name in seen:
            module.register_forward_hook(lambda _, x, y, name=name: seen[name].append(x[0]))
    with torch.no_grad():
        for line in filter(str.strip, text.read_text().splitlines()):
            model(torch.tensor([words(line)["input_ids"]]))
    return {
        name: torch.cat([x.reshape(-1, x.shape[-1]) for x in each]).double()
        for name, each in seen.items()
    }


def test_moments_are_those_of_the_inputs(llama, text, tmp_path):
    report = fp4kit.calibrate(llama, text, tmp_path / "m.safetensors")
    assert (report.texts, report.tokens, report.unseen) == (4, 40, [])
    found = read_moments(tmp_path / "m.safetensors")
    assert len(found.second) == 14
    for name, x in inputs_of(llama, text, report.modules).items():
        np.testing.assert_allclose(found.second[name], x.square().mean(0).numpy(), rtol=0.02)
        assert found.amax[name] == pytest.approx(float(x.abs().max()), rel=0.02)
    surveyed = fp4kit.survey(llama, ["nvfp4"], moments=tmp_path / "m.safetensors")
    assert surveyed.moments
    assert not surveyed.warnings
    weight, x = fp4kit.open(llama), inputs_of(llama, text, report.modules)
    for tensor in surveyed.tensors:
        # The output's error, without what moments leave out: products of different channels.
        w = weight[tensor.name].astype(np.float32)
        d = w - fp4kit.dequantize(fp4kit.quantize(w))
        inner = x[tensor.name.removesuffix(".weight")].numpy()
        true = np.square(inner @ d.T).sum() / np.square(inner @ w.T).sum()
        assert 0.4 * true < tensor.errors["nvfp4"].output_noise < 2.5 * true


def test_experts_that_no_token_reached(moe, tmp_path):
    (tmp_path / "text.txt").write_text("w1\n")
    report = fp4kit.calibrate(moe, tmp_path / "text.txt", tmp_path / "m.safetensors")
    assert len(report.unseen) == 2 * 3 * 3  # of four experts in two layers one each is seen
    assert all(".experts." in name for name in report.unseen)
    assert "no token reached 18 of" in report.warnings[0]
    surveyed = fp4kit.survey(moe, ["nvfp4", "fp8"], moments=tmp_path / "m.safetensors", budget=6)
    assert "18 of" in surveyed.warnings[0]
    fp4kit.quantize_checkpoint(
        moe, tmp_path / "out", plan=surveyed.plan, activations=tmp_path / "m.safetensors"
    )
    assert fp4kit.verify(tmp_path / "out").ok


def test_pages_of_layers_are_given_back(llama, text, tmp_path, monkeypatch):
    released = []
    monkeypatch.setattr(run_layers, "_release", lambda found: released.append(len(list(found))))
    fp4kit.calibrate(llama, text, tmp_path / "m.safetensors", effects=False)
    assert released == [9, 9] * 3  # two layers, texts of three lengths
    released.clear()
    fp4kit.calibrate(llama, text, tmp_path / "n.safetensors")
    assert released == [9] * 4 * 3  # and once more when derivatives were taken
    read = [
        fp4kit.io.moments.read_moments(tmp_path / name)
        for name in ("m.safetensors", "n.safetensors")
    ]
    assert [len(each.effect) for each in read] == [0, 14]
    for name in read[0].second:
        np.testing.assert_array_equal(read[0].second[name], read[1].second[name])
        assert read[0].rows[name] == read[1].rows[name] == 40


def test_what_cannot_be_calibrated(llama, text, tmp_path):
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(OptionError, match="holds no text"):
        fp4kit.calibrate(llama, tmp_path / "empty.txt", tmp_path / "m.safetensors")
    with pytest.raises(OptionError, match="no such file"):
        fp4kit.calibrate(llama, tmp_path / "none.txt", tmp_path / "m.safetensors")
    (tmp_path / "model").mkdir()
    for path in llama.glob("*.safetensors"):
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(FileFormatError, match="transformers cannot load it"):
        fp4kit.calibrate(tmp_path / "model", text, tmp_path / "m.safetensors")
    assert not (tmp_path / "m.safetensors").exists()
