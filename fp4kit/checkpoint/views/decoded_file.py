# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A single file whose weights are FP8, or in another dialect of bytes, as one of floats."""

from __future__ import annotations

from fp4kit.checkpoint.layouts.comfy import LAYERS_KEY, layer_formats, layer_records
from fp4kit.checkpoint.models.experts import Excluded, nothing
from fp4kit.checkpoint.read.directory import listed
from fp4kit.checkpoint.read.foreign_codes import unread_codes
from fp4kit.checkpoint.views.fp8 import find_views
from fp4kit.errors import FileFormatError
from fp4kit.io.metadata import METADATA_KEY, entries_by_names
from fp4kit.io.read.source import Source

from .base import Overlay
from .mxfp4 import byte_views
from .search import unneeded


def decoded_file(
    source: Source, *, excluded: Excluded = nothing, unscaled_fp8: bool = False
) -> Source:
    """The tensors of a file as floats, where they are codes of a dialect that is read here.

    Args:
        source: an open file.
        excluded: whether a tensor is left alone: one that cannot be decoded stays as it is then.
        unscaled_fp8: FP8 without a scale was only cast.

    Returns:
        The source itself if nothing is to be decoded, or if it holds block formats, which are no
        source of a quantization.

    Raises:
        FileFormatError: if weights are quantized in a way that is not read here, or lack a part.
    """
    if METADATA_KEY in source.metadata or entries_by_names(source):
        return source
    layers = layer_formats(layer_records(source, [source.metadata], source.path))
    views = find_views(source, {}, layers, excluded=excluded, unscaled=unscaled_fp8)
    views += byte_views(source)
    result = Overlay(source, views, unneeded(source, {}, views))
    left = {name: tensor for name, tensor in result.tensors.items() if not excluded(name)}
    unread = unread_codes(left, source.tensors)
    if unread:
        raise FileFormatError(
            f"{source.path}: {len(unread)} tensors are quantized in a way that is not read here: "
            f"{listed(unread)}; give the original file"
        )
    if not views:
        return source
    result.metadata = {key: text for key, text in source.metadata.items() if key != LAYERS_KEY}
    return result
