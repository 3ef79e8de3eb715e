# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Makes tests/golden/fp8/values.npz by torch, compressed-tensors and ModelOpt (peers environment).

`python tests/golden_fp8.py` writes it; `tests/test_peers_fp8.py` compares it with what the
installed peers give. Inputs are raw bits, codes are bytes, scales float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from modelopt.torch.export.quant_utils import to_quantized_weight

FILE = Path(__file__).parent / "golden" / "fp8" / "values.npz"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCK = 128


def raw(tensor: torch.Tensor) -> np.ndarray:
    """The bits of floats, or the bytes of codes."""
    views = {4: (torch.int32, np.uint32), 2: (torch.int16, np.uint16), 1: (torch.uint8, np.uint8)}
    signed, unsigned = views[tensor.element_size()]
    return tensor.contiguous().view(signed).numpy().view(unsigned)


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Rows of many magnitudes, one of them zeros, one of subnormals."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(136, 272, generator=generator)
    x *= torch.exp2(torch.randint(-12, 6, (136, 1), generator=generator).float())
    x[5], x[7] = 0, -0.0
    x[9] *= 1e-36 if dtype != torch.float16 else 1e-4
    return x.to(dtype)


def blocks(x: torch.Tensor) -> torch.Tensor:
    """(row blocks, 128, column blocks, 128), padded with zeros."""
    rows, cols = -(-x.shape[0] // BLOCK), -(-x.shape[1] // BLOCK)
    padded = x.new_zeros(rows * BLOCK, cols * BLOCK)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded.reshape(rows, BLOCK, cols, BLOCK)


def _compressed_tensors(x: torch.Tensor, granularity: str) -> tuple[torch.Tensor, ...]:
    structure = {"block_structure": [BLOCK, BLOCK]} if granularity == "block" else {}
    arguments = QuantizationArgs(
        num_bits=8, type="float", strategy=granularity, symmetric=True, **structure
    )
    if granularity == "channel":
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    elif granularity == "tensor":
        low, high = torch.aminmax(x)
    else:
        low, high = blocks(x).amin((1, 3)), blocks(x).amax((1, 3))
    scale, _ = calculate_qparams(low, high, arguments)
    return quantize(x, scale, None, arguments, dtype=torch.float8_e4m3fn), scale


def _modelopt(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = x.abs().amax().float() / 448.0
    return to_quantized_weight(x, scale, "fp8"), scale


def _deepseek(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = blocks(x).abs().amax((1, 3)).float() / 448.0
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    spread = spread[: x.shape[0], : x.shape[1]]
    return (x.float() / spread).to(torch.float8_e4m3fn), scale


def cases() -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """(recipe/granularity/dtype, arrays)."""
    for name, dtype in DTYPES.items():
        x = sample(dtype)
        results = {
            f"compressed-tensors/{granularity}": _compressed_tensors(x, granularity)
            for granularity in ("tensor", "channel", "block")
        }
        results |= {"modelopt/tensor": _modelopt(x), "deepseek/block": _deepseek(x)}
        yield f"input/{name}", {"x": raw(x)}
        for key, (codes, scale) in results.items():
            yield f"{key}/{name}", {"codes": raw(codes), "scale": scale.float().numpy()}


def casts() -> Iterator[tuple[str, np.ndarray]]:
    """torch's cast of every 16-bit float: (target/source, codes)."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for target in (torch.float8_e4m3fn, torch.float8_e5m2):
        for name in ("float16", "bfloat16"):
            codes = bits.view(DTYPES[name]).to(target)
            yield f"{str(target).removeprefix('torch.float8_')}/{name}", raw(codes)


def vectors() -> dict[str, np.ndarray]:
    """All arrays of the file."""
    result = {f"cast/{name}": codes for name, codes in casts()}
    for name, arrays in cases():
        result |= {f"{name}/{part}": array for part, array in arrays.items()}
    return result


if __name__ == "__main__":
    np.savez_compressed(FILE, **vectors())
