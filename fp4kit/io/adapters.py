# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA and its like) by the names of their tensors: they are no models."""

from __future__ import annotations

import re
from collections.abc import Collection

from fp4kit.errors import FileFormatError

#: Parts of the names of low-rank factors: those of peft, kohya, diffusers and LyCORIS.
FACTOR = re.compile(
    r"(^|[._])(lora_(embedding_)?[AB]|lora_[ab]|lora_(up|down|mid)|lora\.(up|down)|"
    r"lora_linear_layer|lokr_(w[12](_[ab])?|t2)|hada_(w[12]_[ab]|t[12])|oft_(blocks|diag)|diff(_b)?|"
    r"vera_([AB]|lambda_[bd])|ia3_l|lora_magnitude_vector|dora_scale)([.]|$)"
)
#: Part of the name of a weight that has its adapter beside it, in models that come with some.
BASE = ".base_layer."
ADVICE = (
    "quantizing it alone gives nothing that can be loaded: merge it into its base model first "
    "(merge_and_unload in peft, or the merge of the tool that made it), and give the merged model"
)


def refuse_adapter(path: object, names: Collection[str], *, said: bool = False) -> None:
    """Refuses what holds an adapter and no model.

    Args:
        path: file or directory, for the message.
        names: names of its tensors.
        said: whether its settings call it an adapter.

    Raises:
        FileFormatError: if more than half of the tensors are low-rank factors, and none is a weight
            that they belong to; or if `said`.
    """
    factors = sum(FACTOR.search(name) is not None for name in names)
    alone = 2 * factors > len(names) and not any(BASE in name for name in names)
    if said or alone:
        raise FileFormatError(f"{path}: is an adapter, no model; {ADVICE}")
