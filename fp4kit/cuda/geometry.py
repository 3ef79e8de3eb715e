# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How much a thread, a block and a multiprocessor take: measured, and given to the kernels as `-D`.

`benchmarks/NOTES.md` says what was tried.
"""

from __future__ import annotations

#: Elements that a lane quantizes (kLaneElements).
LANE = 16
#: Threads of a block, of every kernel but one.
THREADS = 256
#: 16-element lanes in flight of a thread of `quantize_rowwise_any_kernel`, by bytes of an element.
QUANTIZE_UNROLL = {2: 2, 4: 1}
#: Thread blocks per multiprocessor of `quantize_rowwise_kernel` and
#: `quantize_rowwise_swizzled_kernel`, likewise.
FLAT_BLOCKS = {2: 5, 4: 4}
#: The same of the kernels that work on tiles.
TILE_BLOCKS = 4
#: Blocks of tiles of 128 columns, and the shared memory that a block of them asks for: what it
#: needs at most, and what it needs where all vectors share a level: then three of them fit an H100.
WIDE_BLOCKS = 3
WIDE_BYTES_MOST, WIDE_BYTES = 84 << 10, 74 << 10
#: Groups in flight of a thread that rotates rows, likewise.
ROTATE_UNROLL = {2: 2, 4: 1}
#: Lanes in flight of `quantize_dequantize_kernel`, and its blocks per multiprocessor.
FUSED_UNROLL = {2: 2, 4: 1}
FUSED_BLOCKS = 4
#: Thread blocks per multiprocessor of `quantize_residual_kernel`, by bytes of an element.
RESIDUAL_BLOCKS = {2: 4, 4: 3}
#: The same of the kernel that stages rows of reordered channels to dequantize them.
RESIDUAL_DEQUANTIZE_STAGED = 4
#: Threads of the one that quantizes them, of a block at most and of a multiprocessor: as many as
#: have the registers that they need. What is spilled finds no cache beside the staged rows.
RESIDUAL_STAGED_THREADS = 640
#: 16-byte output pieces that a thread of `dequantize_rowwise_kernel` has in flight.
DEQUANTIZE_UNROLL = 4
#: The same where all is flat and a piece is FP8 codes or float32 results.
DEQUANTIZE_UNROLL_HEAVY = 2
#: Groups of 16 in flight of a thread under float32 scales that are known.
GRID_UNROLL = 4
