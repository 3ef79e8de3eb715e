# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A small file that looks like a language model, to try the commands on.

The bytes are the same on every machine: only integer arithmetic and the correctly rounded
operations of binary64 (+, -, *, /, sqrt) are used on the raw output of the PCG64 generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fp4kit.io.containers import TensorSpec
from fp4kit.io.write.files import check_output, output_suffix
from fp4kit.io.write.safetensors import SafetensorsWriter

SEED = 20260828
HIDDEN = 512
INTERMEDIATE = 1536
LAYERS = 4
VOCABULARY = 8192
KEY_VALUE = 128
#: One input channel in this many is an outlier, this many times as large as the others.
OUTLIER_EVERY = 128
OUTLIER_FACTOR = 6.0


def demo_tensors() -> list[TensorSpec]:
    """Names and shapes of a Llama of about 20 million parameters, in bfloat16."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEY_VALUE, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCABULARY, HIDDEN)}
    for number in range(LAYERS):
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    shapes.update({"model.norm": (HIDDEN,), "lm_head": (VOCABULARY, HIDDEN)})
    return [TensorSpec(f"{name}.weight", "BF16", shape) for name, shape in shapes.items()]


def student_t_quantiles() -> NDArray[np.float64]:
    """The 65536 midpoint quantiles of Student's t with 4 degrees of freedom, unit variance.

    Its distribution function is algebraic: F = 1/2 + 3/8 s (1 - s^2/12), s = t / sqrt(1 + t^2/4).
    """
    target = (np.arange(1 << 16) + 0.5) / (1 << 16) - 0.5
    low, high = np.full(1 << 16, -2.0), np.full(1 << 16, 2.0)
    # Bisection over s in (-2, 2), to well below one unit of bfloat16.
    for _ in range(48):
        middle = (low + high) * 0.5
        below = 0.375 * middle * (1 - middle * middle / 12) < target
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    s = (low + high) * 0.5
    quantiles: NDArray[np.float64] = s / np.sqrt(1 - s * s * 0.25) / np.sqrt(2.0)
    return quantiles


def to_bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of finite values rounded to bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return rounded


def _data() -> Iterator[tuple[TensorSpec, NDArray[np.uint16]]]:
    """Every tensor with its bfloat16 bits."""
    generator = np.random.PCG64(SEED)
    table = student_t_quantiles().astype(np.float32)

    def draw(count: int) -> NDArray[np.float32]:
        raw = generator.random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        values: NDArray[np.float32] = table[raw]
        return values

    for spec in demo_tensors():
        values = draw(prod(spec.shape))
        if len(spec.shape) == 1:
            yield spec, to_bfloat16_bits(np.float32(1) + values * np.float32(0.125))
            continue
        values = values.reshape(spec.shape)
        # About 0.02, as trained projections have it; a power of two keeps the product exact.
        channels = np.full(spec.shape[1], 2.0**-6, np.float32)
        first = int(generator.random_raw()) % OUTLIER_EVERY
        channels[first::OUTLIER_EVERY] *= np.float32(OUTLIER_FACTOR)
        values *= channels
        yield spec, to_bfloat16_bits(values)


def write_demo(path: Path, *, force: bool = False) -> None:
    """Writes a Llama-shaped bfloat16 safetensors file of about 20 million seeded parameters.

    Weights are heavy-tailed (Student's t with 4 degrees of freedom) with a few outlier channels.

    Args:
        path: .safetensors file to write, atomically.
        force: replace an existing file.

    Raises:
        OptionError: if the file exists and `force` is False, or has another suffix.
        OutputError: if it cannot be written.
    """
    path = Path(path)
    output_suffix(path, (".safetensors",))
    tensors = demo_tensors()
    # There is no source that the output could overwrite.
    nbytes = sum(spec.nbytes for spec in tensors)
    output = check_output(None, path, force=force, nbytes=nbytes)
    with SafetensorsWriter(output, tensors, {"format": "pt"}) as writer:
        for spec, bits in _data():
            writer.write(spec.name, 0, bits.reshape(-1).view(np.uint8))
        writer.finish()
