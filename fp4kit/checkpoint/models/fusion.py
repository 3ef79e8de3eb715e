# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Weights that engines fuse into one: they must share a second-level scale, or all be left alone.

The table is that of checkpoints.md section 3, read in the sources of vLLM, SGLang and
TensorRT-LLM. Sharing too much is harmless, sharing too little decodes wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WEIGHT = ".weight"
#: Last parts of module names that stand in one fused module.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj", "dense_h_to_4h"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("fc1", "fc3"),
    ("c_fc_0", "c_fc_1"),
)
#: The same inside an `indexer` (DeepSeek V3.2), where a `wk` has no `wq` and `wv` beside it.
INDEXER = "indexer"
FUSED_INDEXER = ("wk", "weights_proj")
#: Members that every model with one of the group has: an engine builds the fused module whole.
WHOLE = frozenset((FUSED[0], FUSED[2], FUSED[4], ("gate_proj", "up_proj")))
_GROUPS = {member: members for members in FUSED for member in members}
_WHOLE = {member: members for members in WHOLE for member in members}


def _is_indexer(parent: str) -> bool:
    return parent.rpartition(".")[2] == INDEXER


def _split(name: str) -> tuple[str, str]:
    """(everything before, last part) of the module that a weight belongs to."""
    parent, _, last = name.removesuffix(WEIGHT).rpartition(".")
    return parent, last


def fusion_group(name: str) -> str | None:
    """The group that a weight belongs to, or None.

    Args:
        name: name of a weight, for example `model.layers.0.self_attn.q_proj.weight`.

    Returns:
        Its parent module with the members, for example `model.layers.0.self_attn.{q_proj,...}`:
        experts have parents of their own, and so groups of their own.
    """
    if not name.endswith(WEIGHT):
        return None
    parent, last = _split(name)
    members = _GROUPS.get(last)
    if _is_indexer(parent):
        members = FUSED_INDEXER if last in FUSED_INDEXER else None
    if members is None:
        return None
    listed = "{" + ",".join(members) + "}"
    return f"{parent}.{listed}" if parent else listed


def groups(names: Iterable[str]) -> dict[str, list[str]]:
    """Fusion groups of two or more members among some weights, members in the given order."""
    found: dict[str, list[str]] = {}
    for name in names:
        key = fusion_group(name)
        if key is not None:
            found.setdefault(key, []).append(name)
    return {key: members for key, members in found.items() if len(members) > 1}


def absent_siblings(names: Iterable[str]) -> list[str]:
    """Weights that an engine builds beside these in one fused module, but that are not there."""
    given = set(names)
    siblings = []
    for name in names:
        parent, last = _split(name)
        for member in () if _is_indexer(parent) else _WHOLE.get(last, ()):
            sibling = f"{parent}.{member}{WEIGHT}" if parent else f"{member}{WEIGHT}"
            if sibling not in given:
                siblings.append(sibling)
    return list(dict.fromkeys(siblings))


def settle(reasons: Mapping[str, str], fused: Mapping[str, list[str]]) -> dict[str, str]:
    """Leaves a whole group alone where one member is."""
    settled = dict(reasons)
    for members in fused.values():
        kept = next((name for name in members if reasons[name]), None)
        if kept is None:
            continue
        for name in members:
            if not settled[name]:
                settled[name] = f"fused with {kept}, which is kept ({reasons[kept]})"
    return settled
