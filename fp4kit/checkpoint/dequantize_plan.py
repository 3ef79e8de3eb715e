# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Planning how a quantized checkpoint becomes plain numbers again."""

from __future__ import annotations

from fp4kit.formats import DTYPES, one_of
from fp4kit.io.safetensors import DTYPE_CODES, TensorSpec
from fp4kit.io.source import SourceTensor
from fp4kit.io.work import TensorPlan

from .directory import Checkpoint
from .layouts import Summary
from .model_dtype import stating
from .options import DequantizeOptions
from .plan import CheckpointPlan, Unit, in_stored_order, pack
from .sources import open_quantized


def plan_dequantize(checkpoint: Checkpoint, options: DequantizeOptions) -> CheckpointPlan:
    """Decides about every tensor of a quantized checkpoint.

    Weights in FP8 are decoded as well; tensors that are not quantized stay as they are.

    Raises:
        OptionError: for an unknown element type.
        FileFormatError: if nothing is quantized, or in a way that is not known.
    """
    one_of("dtype", options.dtype, DTYPES)
    opened = open_quantized(checkpoint)
    source = opened.source
    units: dict[str, Unit] = {}
    for name, tensor in list(source.tensors.items()):
        plain, reason = tensor, tensor.note or "not quantized"
        if source.is_decoded(name) and options.dtype != tensor.dtype:
            plain = source.cast(name, options.dtype)
        units[name] = Unit([TensorPlan(plain, "keep", reason)])
    if opened.quantized is not None:
        for name, entry in opened.quantized.entries.items():
            spec = TensorSpec(name, DTYPE_CODES[options.dtype], entry.shape)
            plain = SourceTensor(spec, options.dtype, entry.nbytes)
            units[name] = Unit([TensorPlan(plain, "dequantize", origin=entry)])
    limit = options.max_shard_size if checkpoint.is_directory else 1 << 62
    return CheckpointPlan(
        source=source,
        options=options,
        layout=None,
        shards=pack(in_stored_order(source, units), checkpoint.base, limit),
        summary=Summary("", ()),
        dropped=opened.dropped,
        config=stating(checkpoint.config, options.dtype),
    )
