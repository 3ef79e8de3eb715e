# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Calibrating takes the memory of one layer, also where experts are stored one by one."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import fp4kit
from fp4kit.files import calibrate as calibration
from fp4kit.io.containers import TensorSpec
from fp4kit.io.moments import read_moments
from fp4kit.io.write.files import Output
from fp4kit.io.write.safetensors import SafetensorsWriter
from test_peers_survey import SIZES, saved, tokenizer

torch = pytest.importorskip("torch", reason="the peers extra is not installed")
transformers = pytest.importorskip("transformers", reason="the peers extra is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS, HIDDEN, INNER, EXPERTS = 12, 512, 1024, 8
#: Calibrates a small model first, so that libraries are loaded, then the large one; prints what was
#: resident before and at most.
SCRIPT = """
import ctypes, gc, json, sys
import fp4kit

def resident(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

small, large, text = sys.argv[1:]
fp4kit.calibrate(small, text, small + ".safetensors")
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = resident("VmRSS")
report = fp4kit.calibrate(large, text, large + ".safetensors")
print(json.dumps([before, resident("VmHWM"), len(report.modules), report.warnings]))
"""


def write_model(folder, layers, hidden, inner, experts):
    """A model with single experts of bfloat16 in a file for each layer; returns its bytes."""
    folder.mkdir()
    config = transformers.Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": layers, "hidden_size": hidden, "head_dim": 32},
        moe_intermediate_size=inner, num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    config.architectures, config.dtype = ["Qwen3MoeForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    tokenizer(folder)
    with torch.device("meta"):
        made = transformers.Qwen3MoeForCausalLM(config)
    random = np.random.default_rng(0)
    noise = (random.standard_normal(inner * hidden, np.float32) * 0.05).view(np.uint32) >> 16
    specs: dict[str, list[TensorSpec]] = {}
    for name, value in made.state_dict().items():
        file = name.split(".")[2] if ".layers." in name else "rest"
        shape = tuple(value.shape)
        singles = [(name, shape)]
        if ".experts." in name:
            base, _, kind = name.rpartition(".")
            kinds = ["down_proj"] if kind == "down_proj" else ["gate_proj", "up_proj"]
            one = (shape[1] // len(kinds), shape[2])
            singles = [(f"{base}.{n}.{k}.weight", one) for n in range(experts) for k in kinds]
        specs.setdefault(file, []).extend(TensorSpec(n, "BF16", s) for n, s in singles)
    weight_map = {}
    for key, each in specs.items():
        path = folder / f"model-{key}.safetensors"
        with SafetensorsWriter(Output(path), each, {"format": "pt"}) as file:
            for spec in each:
                values = np.resize(noise.astype(np.uint16), spec.shape)
                file.write(spec.name, 0, values.reshape(-1).view(np.uint8))
                weight_map[spec.name] = path.name
            file.finish()
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_one_layer_is_in_memory(tmp_path):
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8\n" * 4)
    write_model(tmp_path / "small", 2, 64, 32, 4)
    total = write_model(tmp_path / "large", LAYERS, HIDDEN, INNER, EXPERTS)
    layer = total // LAYERS
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, "small", "large", "text.txt"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, peak, modules, _ = json.loads(done.stdout.splitlines()[-1])
    assert modules > LAYERS * 4
    assert total > 300_000_000
    # One layer, and what does not grow with the model.
    assert peak - before < 2 * layer + 60_000_000, (before, peak, layer, total)
    assert not list(tmp_path.glob(".calibrate-*"))


MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 32,
            "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_experts_are_put_together_as_transformers_does(kind, tmp_path, monkeypatch):
    name, more = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    folder = saved(tmp_path / "in", config, getattr(transformers, f"{name}ForCausalLM"))
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5\nw9 w8 w7\n")
    own = fp4kit.calibrate(folder, tmp_path / "text.txt", tmp_path / "own.safetensors")
    assert any(".experts." in module for module in own.modules)
    monkeypatch.setattr(calibration, "merged_state", lambda *_: None)
    theirs = fp4kit.calibrate(folder, tmp_path / "text.txt", tmp_path / "theirs.safetensors")
    assert own.modules == theirs.modules
    one, other = (read_moments(tmp_path / f"{n}.safetensors") for n in ("own", "theirs"))
    assert one.rows == other.rows
    assert one.effect.keys() == one.second.keys()
    for module in one.second:
        np.testing.assert_array_equal(one.second[module], other.second[module])
        np.testing.assert_array_equal(one.effect[module], other.effect[module])
