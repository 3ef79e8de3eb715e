# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Fusion groups: who shares a second level, and that they do in what is written."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4kit.checkpoint.models.fusion import FUSED, absent_siblings, fusion_group, groups, settle
from fp4kit.checkpoint.operations import quantize_checkpoint
from fp4kit.checkpoint.options import CheckpointOptions
from fp4kit.checkpoint.verify.structure import structure_faults
from fp4kit.io.stream import chunks

#: checkpoints.md, section 3.
TABLE = [
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("fc1", "fc3"),
    ("c_fc_0", "c_fc_1"),
    ("gate_proj", "dense_h_to_4h"),
]
ALONE = ["o_proj", "down_proj", "w2", "fc2", "dense", "q_b_proj", "kv_b_proj", "gate", "to_out.0"]
PARENTS = [
    "",
    "model.layers.0.self_attn",
    "m.layers.12.mlp.experts.7",
    "enc.layer.0.attention.self",
]


def weight(parent, member):
    return f"{parent}.{member}.weight" if parent else f"{member}.weight"


@pytest.mark.parametrize("members", TABLE)
@pytest.mark.parametrize("parent", PARENTS)
def test_every_row_of_the_table(members, parent):
    names = [weight(parent, member) for member in members]
    for order in itertools.permutations(names):
        assert list(groups(order).values()) == [list(order)]
    assert len({fusion_group(name) for name in names}) == 1
    for name in names:
        assert fusion_group(name.removesuffix(".weight") + ".bias") is None
        assert groups([name]) == {}


@pytest.mark.parametrize("member", ALONE)
def test_what_is_fused_with_nothing(member):
    assert fusion_group(f"model.layers.0.x.{member}.weight") is None


@pytest.mark.parametrize("parent", ["model.layers.3.self_attn.indexer", "indexer"])
def test_an_indexer_fuses_other_weights(parent):
    """DeepSeek V3.2: vLLM's wk_weights_proj. There is no wq, and wq_b stands alone."""
    names = [weight(parent, member) for member in ("wq_b", "wk", "weights_proj")]
    assert list(groups(names).values()) == [names[1:]]
    assert fusion_group(names[0]) is None
    assert fusion_group(weight(parent, "q_proj")) is None
    assert absent_siblings(names) == []
    beside = weight(f"{parent}_2", "wk")
    assert absent_siblings([beside]) == [weight(f"{parent}_2", m) for m in ("wq", "wv")]


def test_members_are_whole_parts_of_names():
    for member in {name for row in FUSED for name in row}:
        assert fusion_group(f"a.{member}x.weight") is None
        assert fusion_group(f"a.x{member}.weight") is None
        assert fusion_group(f"a.{member}.x.weight") is None
        assert fusion_group(f"a.{member}") is None


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(sorted({m for r in TABLE for m in r}))))
)
def test_no_group_reaches_beyond_its_parent(chosen):
    """Experts have parents of their own, so that they do not share with each other."""
    names = list(
        dict.fromkeys(f"mlp.experts.{expert}.{member}.weight" for expert, member in chosen)
    )
    found = groups(names)
    assert all(len({name.rsplit(".", 2)[0] for name in members}) == 1 for members in found.values())
    listed = [name for members in found.values() for name in members]
    assert len(listed) == len(set(listed))
    assert all([n for n in names if n in members] == members for members in found.values())


@given(st.data())
def test_a_group_is_kept_whole(data):
    names = [weight(parent, member) for parent in PARENTS for row in TABLE[:4] for member in row]
    names += [f"{parent}.o_proj.weight" for parent in PARENTS[1:]]
    kept = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    reasons = {name: "some reason" if name in kept else "" for name in names}
    settled = settle(reasons, groups(names))
    for name in names:
        mates = [n for n in names if fusion_group(n) and fusion_group(n) == fusion_group(name)]
        touched = name in kept or any(mate in kept for mate in mates)
        assert bool(settled[name]) == touched
        if touched and name not in kept:
            assert any(mate in settled[name] for mate in mates)
            assert "some reason" in settled[name]


@pytest.mark.parametrize(
    ("given_names", "expected"),
    [
        (["a.q_proj"], ["a.k_proj", "a.v_proj"]),
        (["a.q_proj", "a.k_proj", "a.v_proj"], []),
        (["a.q_proj", "b.k_proj"], ["a.k_proj", "a.v_proj", "b.q_proj", "b.v_proj"]),
        (["a.o_proj", "a.dense"], []),
        (["a.fc1"], []),  # most models with an fc1 have no fc3
        (["a.w1"], ["a.w3"]),
        (["query"], []),
    ],
)
def test_absent_siblings(given_names, expected):
    found = absent_siblings([f"{name}.weight" for name in given_names])
    assert sorted(found) == sorted(f"{name}.weight" for name in expected)


# ------------------------------------------------------------------------------------------------
# Written checkpoints
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("members", TABLE)
def test_members_share_one_scale_from_every_shard(checkpoints, tmp_path, members, layout):
    """E6: the amax is that of all members, known before the block scales of any of them."""
    tensors = {}
    for number, member in enumerate(members):
        for parent in ("a.experts.0", "a.experts.1"):
            name = weight(parent, member)
            scale = 10.0 ** ((number + len(parent) * 3 + int(parent[-1])) % 3)
            tensors[name] = checkpoints.normal((48, 64), "F32", number, scale)
    assign = {name: number % 3 for number, name in enumerate(tensors)}
    tensors["z.weight"] = checkpoints.normal((16, 16), "F32", 9)
    assign["z.weight"] = 2
    tensors["y"], assign["y"] = checkpoints.normal((3,)), 1
    source = checkpoints.save(tmp_path / "in", tensors, {}, shards=3, assign=assign)
    options = CheckpointOptions(layout=layout, max_shard_size=4000, include=("*",))
    report = quantize_checkpoint(source, tmp_path / "out", options)
    assert len(report.groups) == 2
    written = checkpoints.read(tmp_path / "out")
    suffix = "_global_scale" if layout == "compressed-tensors" else "_scale_2"
    for names in report.groups.values():
        assert len(names) == len(members)
        amax = np.float32(checkpoints.amax(*(tensors[name][1] for name in names)))
        expected = np.float32(2688) / amax if suffix == "_global_scale" else amax / np.float32(2688)
        for name in names:
            assert checkpoints.array(written[f"{name}{suffix}"]) == expected
    holders = {
        n: p.name
        for p in (tmp_path / "out").glob("*.safetensors")
        for n in checkpoints.read_file(p)[0]
    }
    for names in report.groups.values():
        assert len({holders[f"{name}{suffix}"] for name in names}) == 1
    assert structure_faults(tmp_path / "out") == []


@settings(max_examples=8, deadline=None)
@given(whole=st.integers(1, 60_000), chunk=st.integers(300, 20_000))
def test_groups_of_any_size_in_slabs_of_any_size(checkpoints, tmp_path_factory, whole, chunk):
    """Larger than what is read at once or not: two passes over the data, or one."""
    tensors, config = checkpoints.llama(1, dtype="F32")
    folder = tmp_path_factory.mktemp("chunks")
    source = checkpoints.save(folder / "in", tensors, config, shards=2)
    quantize_checkpoint(source, folder / "plain", CheckpointOptions())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(chunks, "WHOLE_BYTES", whole)
        patched.setattr(chunks, "CHUNK_BYTES", chunk)
        quantize_checkpoint(source, folder / "cut", CheckpointOptions())
    assert checkpoints.digest(folder / "cut") == checkpoints.digest(folder / "plain")
