# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Why a kernel was chosen, in words: what `FP4KIT_TRACE=1` says of each launch.

The choices themselves stand in `launch.py`, `variants.py`, `search.py`, `measured.py`,
`members.py` and `matmul_choice.py`; `kernels_cu/README.md` lists them in full.
"""

from __future__ import annotations

from fp4kit import trace

from .compile import Instance

#: What a kernel needs, by its name: the first that fits is taken.
REASONS = {
    "quantize_rowwise_swizzled": "rows of whole nvfp4 blocks, aligned, one second level, "
    "swizzled_128x4 scales with whole tiles across",
    "quantize_rowwise": "rows of whole blocks, aligned, at most one second level",
    "quantize_rowwise_any": "rows that are ragged or misaligned, or several second levels",
    "quantize_rowwise_search": "a scale search along rows of whole blocks, aligned, one second "
    "level",
    "quantize_per_token": "each row makes its own second level: one read measures and quantizes",
    "quantize_tiles": "columns, both directions, 2-D blocks, a rotation, or rows that no kernel of "
    "rows takes",
    "repeat_scales": "linear scales of 2-D blocks in both directions: one of 16 is computed",
    "quantize_rowwise_activated": "an activation of rows of whole blocks, aligned",
    "quantize_rowwise_column_sums": "column sums beside rows of whole blocks, aligned",
    "quantize_dequantize": "plain blocks, aligned, of one element type",
    "dequantize_rowwise": "rows, by the widest access that alignment and scales allow",
    "dequantize_columnwise": "blocks along the columns",
    "quantize_grid_measured": "float32 scales that rows or blocks make, aligned, rows that fit "
    "registers: one read",
    "quantize_grid_any": "float32 scales that rows or blocks make, not aligned",
    "quantize_grid": "float32 scales that are given, or of the whole tensor, columns or long rows",
    "dequantize_grid": "float32 scales",
    "quantize_residual": "residual channels in order, aligned",
    "quantize_residual_reordered": "reordered channels whose rows fit shared memory",
    "quantize_residual_any": "residual channels that are misaligned, or rows too long to stage",
    "dequantize_residual": "residual channels in order, aligned",
    "dequantize_residual_reordered": "reordered channels whose rows fit shared memory",
    "dequantize_residual_any": "residual channels that are misaligned, or rows too long to stage",
    "multiply_small": "few rows, not quantized, aligned; FP4 weights that are prepared, or rows of "
    "whole tiles of 16 x 128, aligned",
    "grouped_quantize_rowwise": "plain rows of whole blocks in all members, aligned",
    "grouped_quantize_rowwise_swizzled": "plain rows of whole nvfp4 blocks in all members, "
    "aligned, swizzled_128x4 scales",
    "grouped_quantize_tiles": "what the members' kernel of rows does not take",
    "matmul_any": "operands of any kind, layout, alignment and shape",
    "matmul_ragged": "rows that a device array cuts into ranges with a weight each",
    "matmul_finish": "sums of pieces of the depth, or of a GEMM with a bias, c, or levels of rows",
    "matmul_decode": "many rows: operands are decoded for cuBLAS",
    "matmul_factor": "the one factor of a GEMM's sums",
    "matmul_nan": "the NaN of a GEMM",
    "decode_prepared": "many rows: prepared weights are decoded for cuBLAS as they lie",
}
OTHERWISE = "the only kernel of its operation"


def trace_launch(device: int, instance: Instance, grid: tuple[int, ...]) -> None:
    """Says which instance is launched on so many thread blocks, and why."""
    blocks = "x".join(map(str, grid))
    reason = REASONS.get(instance.kernel, OTHERWISE)
    trace.say(f"cuda:{device}", f"{instance.expression}, {blocks} blocks", reason)
