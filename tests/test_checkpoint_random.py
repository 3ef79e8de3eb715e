# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Made-up checkpoints of any names, shapes, types and cuts: whole, verified, and decoded."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.checkpoint.operations import (
    convert_checkpoint,
    dequantize_checkpoint,
    plan_quantize_checkpoint,
    quantize_checkpoint,
)
from fp4kit.checkpoint.options import CheckpointOptions, ConvertOptions, DequantizeOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.checkpoint.verify.values import value_faults

LAYOUTS = ("compressed-tensors", "modelopt", "comfy")
PARENTS = ["", "a", "model.layers.0.mlp", "model.layers.0.mlp.experts.1", "x.self_attn", "visual.b"]
MODULES = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "gate",
    "w1",
    "w3",
    "norm",
    "lm_head",
    "fc1",
    "fc3",
    "embed_tokens",
    "conv1d",
    "router",
    "dense",
    "query",
    "key",
]
LASTS = ["weight", "bias", "scale_factor", "weight.extra"]
#: Sizes around blocks and tiles.
SIZES = st.one_of(
    st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33, 48, 64, 96, 128, 129, 160]), st.integers(0, 70)
)

names = st.builds(
    lambda parent, module, last: ".".join(part for part in (parent, module, last) if part),
    st.sampled_from(PARENTS),
    st.sampled_from(MODULES),
    st.sampled_from(LASTS[:1] * 5 + LASTS),
)
shapes = st.one_of(
    st.tuples(SIZES, SIZES),
    st.tuples(SIZES, st.sampled_from([16, 32, 64, 96])),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)
dtypes = st.sampled_from(["BF16", "BF16", "BF16", "F16", "F32", "I64"])
kinds = st.sampled_from(
    [(layout, "nvfp4") for layout in LAYOUTS] + [("compressed-tensors", "mxfp4")]
)


def make(checkpoints, described, seed):
    rng = np.random.default_rng(seed)
    return {
        name: checkpoints.normal(
            shape, dtype, int(rng.integers(1 << 30)), 0.0 if rng.random() < 0.1 else 30.0
        )
        for name, (shape, dtype) in described.items()
    }


@settings(max_examples=40, deadline=None)
@given(
    described=st.dictionaries(names, st.tuples(shapes, dtypes), min_size=1, max_size=12),
    kind=kinds,
    shards=st.integers(1, 4),
    size=st.sampled_from([1, 3000, 20_000, 10**9]),
    activations=st.sampled_from([None, "uncalibrated"]),
    tied=st.booleans(),
    data=st.data(),
    seed=st.integers(0, 1 << 30),
)
def test_any_checkpoint(
    checkpoints, tmp_path_factory, described, kind, shards, size, activations, tied, data, seed
):
    layout, format = kind
    tensors = make(checkpoints, described, seed)
    place = {name: data.draw(st.integers(0, shards - 1)) for name in tensors}
    used = sorted(set(place.values()))
    place = {name: used.index(number) for name, number in place.items()}
    folder = tmp_path_factory.mktemp("any")
    config = {"tie_word_embeddings": tied}
    source = checkpoints.save(folder / "in", tensors, config, shards=len(used), assign=place)
    options = CheckpointOptions(
        layout=layout, format=format, activations=activations, max_shard_size=size
    )
    plan = plan_quantize_checkpoint(source, options)
    report = quantize_checkpoint(source, folder / "q", options)
    assert [(t.name, t.action, t.reason) for t in plan.tensors] == [
        (t.name, t.action, t.reason) for t in report.tensors
    ]
    chosen = {t.name for t in report.tensors if t.action == "quantize"}
    assert structure_faults(folder / "q", plain=not chosen) == []
    written = checkpoints.read(folder / "q")
    given_tensors = checkpoints.stored(tensors)
    assert all(written[name] == given_tensors[name] for name in tensors.keys() - chosen)
    if not chosen:
        assert "no tensor is quantized; all are kept" in report.warnings
        return
    assert value_faults(folder / "q", source) == []
    back = folder / "q"
    if format == "nvfp4":
        second = data.draw(st.sampled_from([one for one in LAYOUTS if one != layout]))
        convert_checkpoint(folder / "q", folder / "c", ConvertOptions(second, max_shard_size=size))
        assert structure_faults(folder / "c") == []
        back = folder / "c"
    options = DequantizeOptions("float32", max_shard_size=size)
    dequantize_checkpoint(back, folder / "d", options)
    decoded = checkpoints.read(folder / "d")
    assert {name: t[1] for name, t in decoded.items()} == {
        name: array.shape for name, (_, array) in tensors.items()
    }
    for name in tensors:
        if name not in chosen:
            assert decoded[name] == given_tensors[name]
            continue
        got, original = checkpoints.array(decoded[name]), tensors[name][1].astype(np.float32)
        assert np.isfinite(got).all()
        # Half of the widest step of E2M1 beside its largest value, and the block scale's rounding.
        assert np.abs(got - original).max() <= np.abs(original).max() / 4
