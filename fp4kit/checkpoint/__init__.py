# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Model directories and diffusers pipelines, quantized as inference engines load them.

An operation (`operations.py`) opens a checkpoint, plans every tensor from headers and JSON files,
carries the plan out, and verifies the result. Each room imports only those above it:

- `options.py`: what is asked for.
- `models/`: what is known of models: names, fused and tied weights, how experts lie.
- `layouts/`: how engines store a quantized checkpoint, and how they match ignore lists.
- `read/`: directories, shards and headers, and what the JSON files say about a quantization.
- `views/`: whatever is stored, as logical float tensors that are computed while they are read.
- `plan/`: which tensors are quantized, decoded or converted, and what the ignore list names.
- `report.py`, `compare.py`, `inspect.py`: what the user sees.
- `verify/`: faults of a checkpoint, with or without its source.
- `write/`: shards, JSON files, and the notes that `--resume` needs.
"""
