# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""How far llama.cpp's output moves when a model is quantized: KL divergence per byte of text.

`train MODEL.gguf` makes a model to measure with: a Llama of 1.8 million weights that reads bytes,
trained for some minutes on the sources of Python's standard library (environment of `make peers`).
`measure MODEL.gguf` quantizes it with fp4kit and with llama.cpp's own encoders, and runs all of
them in llama.cpp over text that it was not trained on (environment of `make engines`).
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

EMBD, FF, HEADS, LAYERS, VOCAB, CONTEXT = 256, 768, 4, 2, 256, 256
EPSILON, ROPE = 1e-5, 10000.0
#: ggml's numbers of file types for its own quantizer.
LLAMA_FILE_TYPES = {"llama.cpp Q8_0": 7, "llama.cpp Q4_K_M": 15, "llama.cpp Q4_0": 2}


def text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and others to measure with."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py"))
    content = [path.read_bytes() for path in files]
    held = b"".join(content[7::8])
    rest = b"".join(one for number, one in enumerate(content) if number % 8 != 7)
    return np.frombuffer(rest, np.uint8), np.frombuffer(held, np.uint8)


def train(path: Path, steps: int, seed: int = 0) -> None:
    """Trains the model and writes it in float32."""
    import torch
    from torch.nn import functional

    torch.manual_seed(seed)
    size = EMBD // HEADS
    weights = {"token_embd.weight": (VOCAB, EMBD), "output.weight": (VOCAB, EMBD)}
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights[f"{at}{name}.weight"] = (EMBD, EMBD)
        weights |= {f"{at}ffn_{name}.weight": (FF, EMBD) for name in ("gate", "up")}
        weights[f"{at}ffn_down.weight"] = (EMBD, FF)
    made = {name: torch.randn(shape) * shape[1] ** -0.5 for name, shape in weights.items()}
    norms = [
        f"blk.{layer}.{name}_norm.weight" for layer in range(LAYERS) for name in ("attn", "ffn")
    ]
    made |= {name: torch.ones(EMBD) for name in [*norms, "output_norm.weight"]}
    for value in made.values():
        value.requires_grad_()
    angles = torch.outer(torch.arange(CONTEXT), ROPE ** (-torch.arange(0, size, 2) / size))
    cos, sin = angles.cos(), angles.sin()

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * made[name]

    def turned(x: Any) -> Any:
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = cos[: x.shape[-2]], sin[: x.shape[-2]]
        return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)

    def forward(tokens: Any) -> Any:
        x = made["token_embd.weight"][tokens]
        for layer in range(LAYERS):
            at = f"blk.{layer}."
            h = norm(x, f"{at}attn_norm.weight")
            q, k, v = (
                (h @ made[f"{at}attn_{name}.weight"].T).unflatten(-1, (HEADS, size)).transpose(1, 2)
                for name in "qkv"
            )
            y = functional.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(-2) @ made[f"{at}attn_output.weight"].T
            h = norm(x, f"{at}ffn_norm.weight")
            gate, up = (h @ made[f"{at}ffn_{name}.weight"].T for name in ("gate", "up"))
            x = x + (functional.silu(gate) * up) @ made[f"{at}ffn_down.weight"].T
        return norm(x, "output_norm.weight") @ made["output.weight"].T

    data = torch.from_numpy(text()[0].astype(np.int64))
    optimizer = torch.optim.AdamW(made.values(), 2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        starts = torch.randint(len(data) - CONTEXT // 2 - 1, (8,))
        batch = torch.stack([data[start : start + CONTEXT // 2 + 1] for start in starts])
        loss = functional.cross_entropy(
            forward(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(step, f"{loss.item():.3f} nats per byte", flush=True)
    write(path, {name: value.detach().numpy() for name, value in made.items()})


def write(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Writes the model as llama.cpp loads it."""
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_vocab_size, VOCAB), (writer.add_context_length, CONTEXT),
        (writer.add_embedding_length, EMBD), (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, FF), (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, HEADS), (writer.add_rope_dimension_count, EMBD // HEADS),
        (writer.add_layer_norm_rms_eps, EPSILON), (writer.add_rope_freq_base, ROPE),
        (writer.add_file_type, 0),
    ):  # fmt: skip
        add(value)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, value in weights.items():
        writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_ggml(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The weights that fp4kit quantizes, through an encoder of ggml's own."""
    import ggml_library

    weights = {}
    for tensor in gguf.GGUFReader(source).tensors:
        weights[tensor.name] = array = np.array(tensor.data, np.float32)
        if tensor.name.startswith("blk.") and "norm" not in tensor.name:
            blocks = ggml_library.encode(array, kind)
            weights[tensor.name] = ggml_library.decode(blocks, kind)
    write(target, weights)


def by_llama(source: Path, target: Path, file_type: int) -> None:
    """The model through llama.cpp's own quantizer."""
    import llama_cpp

    asked = llama_cpp.llama_model_quantize_default_params()
    asked.ftype = file_type
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), asked) == 0


def measure(path: Path, windows: int) -> None:
    """Prints the divergence of every kind of quantization."""
    import fp4kit
    from engine_models import Engine, log_softmax

    held = text()[1]
    starts = np.linspace(0, len(held) - CONTEXT - 1, windows).astype(int)
    batches = [held[start : start + CONTEXT] for start in starts]

    def run(model: Path) -> list[np.ndarray]:
        with Engine(model, context=CONTEXT) as engine:
            return [engine.run(batch) for batch in batches]

    reference = run(path)
    rows = np.arange(CONTEXT - 1)
    pairs = zip(reference, batches, strict=True)
    loss = -np.mean([log_softmax(found)[rows, batch[1:]].mean() for found, batch in pairs])
    print(f"float32: {loss:.4f} nats per byte over {windows} windows of {CONTEXT} bytes")
    choices = {
        "nvfp4": {"scheme": "nvfp4"},
        "nvfp4 four_over_six": {"scheme": "nvfp4", "scale_search": "four_over_six"},
        "nvfp4 sweep": {"scheme": "nvfp4", "scale_search": "sweep"},
        "mxfp4": {"scheme": "mxfp4"},
    }
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "q.gguf"
        for name, given in choices.items():
            fp4kit.quantize_file(path, target, force=True, **given)
            show(f"fp4kit {name}", target, run(target), reference)
        for kind in (gguf.GGMLQuantizationType.NVFP4, gguf.GGMLQuantizationType.MXFP4):
            by_ggml(path, target, kind)
            show(f"ggml's encoder of {kind.name}", target, run(target), reference)
        for name, file_type in LLAMA_FILE_TYPES.items():
            by_llama(path, target, file_type)
            show(name, target, run(target), reference)


def show(name: str, path: Path, found: list[np.ndarray], reference: list[np.ndarray]) -> None:
    """One line of the result."""
    from engine_models import divergence

    pairs = list(zip(reference, found, strict=True))
    mean = np.mean([divergence(p, q) for p, q in pairs])
    same = np.mean([(p.argmax(-1) == q.argmax(-1)).mean() for p, q in pairs])
    print(f"{name:26} {mean:.5f} nats, {same:.1%} of the first choices", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["train", "measure"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--windows", type=int, default=24)
    given = parser.parse_args()
    if given.command == "train":
        train(given.model, given.steps)
    else:
        measure(given.model, given.windows)


if __name__ == "__main__":
    main()
