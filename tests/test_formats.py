# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The table of formats: traits say what they mean, and what nothing can store is refused."""

from __future__ import annotations

import pytest

from fp4kit.errors import OptionError
from fp4kit.formats import ALL_FORMATS, E2M1, E4M3, ElementType, FormatSpec

E2M3 = ElementType("e2m3", 6, 2, 3, bias=1, max_code=0x1F, nan_code=0x1F)


def test_element_without_a_packing_is_refused() -> None:
    with pytest.raises(OptionError, match="mxfp6: no packing is known for e2m3 elements of 6 bits"):
        FormatSpec("mxfp6", E2M3, 32, "e8m0", False, "even")


def test_scale_of_an_unknown_type_is_refused() -> None:
    with pytest.raises(OptionError, match="scale_type='float16' is not known"):
        FormatSpec("halves", E4M3, 32, "float16", False, None)


def test_block_that_ends_within_a_byte_is_refused() -> None:
    with pytest.raises(OptionError, match="blocks of 15 codes end within a byte"):
        FormatSpec("odd", E2M1, 15, "e4m3", False, None)


@pytest.mark.parametrize("spec", ALL_FORMATS.values(), ids=ALL_FORMATS)
def test_traits_agree(spec: FormatSpec) -> None:
    assert spec.codes_per_byte * spec.element.bits == 8
    assert spec.packs_nibbles is spec.transposes_columns is (spec.element.bits == 4)
    assert spec.packed_cols(spec.block_size + 1) == 2 * spec.block_size // spec.codes_per_byte
