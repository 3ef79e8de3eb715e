# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""A Llama of random weights with quantized linear layers: memory, prefill and decode beside bf16.

Usage: python benchmarks/llama_torch.py [--device cuda] [--layers 16] [--eager] [--no-peers]

The model has the shape of Llama 3.2 1B. It is quantized to a temporary checkpoint in NVFP4 and
loaded by fp4kit.torch.load, as it lies and prepared (where this fp4kit can), and by transformers
with compressed-tensors (where it is installed). Prefill is one forward pass without a cache. Decode
is one token after 512 others in a static cache: on a GPU the replay of a CUDA graph of the whole
step, with --eager (and on a CPU) plain calls, which take the time of Python. `--device cpu --layers
2` shows that it runs. Memory is that of parameters and buffers; `in use` is what the device gave
out beyond the start, caches and workspaces included.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import fp4kit
import fp4kit.torch
from fp4kit import bench

CONTEXT = 512
PREFILL = (512, 2048)
COLUMNS = ("model", "weights GB", "in use GB", "prefill 512", "prefill 2048", "decode")
COMPRESSED = "compressed_tensors"


class Device:
    """Where the models run, and how time and memory are measured there."""

    def __init__(self, name: str, eager: bool) -> None:
        self.name = name
        self.is_gpu = name.startswith("cuda")
        self.graphs = self.is_gpu and not eager
        self._start = self._used()

    def _used(self) -> int:
        if not self.is_gpu:
            return 0
        free, total = torch.cuda.mem_get_info(self.name)
        return int(total - free)

    def in_use(self) -> int:
        """Bytes that the device has given out since the start."""
        return self._used() - self._start

    def wait(self) -> None:
        """Waits until everything is computed."""
        if self.is_gpu:
            torch.cuda.synchronize(self.name)

    def empty(self) -> None:
        """Gives back what is held for later use."""
        if self.is_gpu:
            import cupy

            torch.cuda.empty_cache()
            cupy.get_default_memory_pool().free_all_blocks()

    def seconds(self, call: Callable[[], object], repeat: int) -> float:
        """Median time of a call, after one that is not counted."""
        call()
        times = []
        for _ in range(repeat):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def config_of(options: argparse.Namespace) -> Any:
    """Llama 3.2 1B, unless the command line says otherwise."""
    heads = max(options.hidden // 64, 1)
    return transformers.LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=options.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


def empty_model(config: Any) -> Any:
    """The model without numbers."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def checkpoint(folder: Path, config: Any, device: Device) -> None:
    """Writes the random model as `plain` and its quantized form as `nvfp4`."""
    torch.manual_seed(0)
    with torch.device(device.name):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "plain")
    del model
    place = "cuda" if device.is_gpu else "cpu"
    fp4kit.quantize_checkpoint(folder / "plain", folder / "nvfp4", "nvfp4", device=place)


def models(folder: Path, device: Device, peers: bool) -> Iterator[tuple[str, Any]]:
    """Every way to hold the model, one after the other."""
    auto = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(folder / "plain", dtype=torch.bfloat16)
    yield "bf16", plain.to(device.name).eval()
    del plain
    config = transformers.AutoConfig.from_pretrained(folder / "nvfp4")
    for prepare in (False, True) if hasattr(fp4kit, "prepare") else (False,):
        model = empty_model(config)
        fp4kit.torch.load(model, folder / "nvfp4", device=device.name, prepare=prepare)
        yield f"fp4kit.torch.load{', prepared' if prepare else ''}", model
        del model
    if peers and importlib.util.find_spec(COMPRESSED):
        loaded = auto.from_pretrained(folder / "nvfp4", dtype=torch.bfloat16)
        yield "transformers, compressed-tensors", loaded.to(device.name).eval()


def prefill(model: Any, tokens: int, device: Device, repeat: int) -> float:
    """Tokens per second of one pass over a prompt."""
    ids = torch.arange(tokens, device=device.name)[None] % model.config.vocab_size
    seconds = device.seconds(
        lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1), repeat
    )
    return tokens / seconds


class Decoder:
    """Steps of one token in a static cache.

    The mask is given: every step looks at the first 512 tokens, so that all steps are alike and
    nothing of them depends on the host.
    """

    def __init__(self, model: Any, device: Device, steps: int) -> None:
        self._model = model
        length = CONTEXT + steps
        self._cache = transformers.StaticCache(config=model.config, max_cache_len=length)
        ids = torch.arange(CONTEXT, device=device.name)[None] % model.config.vocab_size
        mask = torch.ones(CONTEXT, length, dtype=torch.bool, device=device.name).tril()
        self._call(ids, mask, torch.arange(CONTEXT, device=device.name)[None])
        self._token = ids[:, -1:].clone()
        self._mask = torch.arange(length, device=device.name)[None] < CONTEXT
        self._position = torch.full((1, 1), CONTEXT, device=device.name)

    def _call(self, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        result = self._model(
            input_ids=ids,
            attention_mask=mask[None, None],
            position_ids=position,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = result.logits
        return logits

    def step(self) -> None:
        """Computes the next token from the last one."""
        logits = self._call(self._token, self._mask, self._position)
        self._token.copy_(logits[:, -1:].argmax(-1))
        self._position.add_(1)


def decode(model: Any, device: Device, repeat: int) -> float:
    """Tokens per second, one after the other."""
    warm = 4
    decoder = Decoder(model, device, repeat + 2 * warm)
    step = decoder.step
    if device.graphs:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warm):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    return 1 / device.seconds(step, repeat)


def measured(name: str, model: Any, device: Device, repeat: int) -> list[str]:
    """A row of the table."""
    rates = [prefill(model, tokens, device, max(repeat // 10, 1)) for tokens in PREFILL]
    rates.append(decode(model, device, repeat))
    # Some readers decode when the model is first called.
    tensors = {id(one): one.nbytes for one in [*model.parameters(), *model.buffers()]}
    used = f"{device.in_use() / 1e9:.2f}" if device.is_gpu else "-"
    return [name, f"{sum(tensors.values()) / 1e9:.2f}", used, *(f"{rate:,.0f}" for rate in rates)]


def main() -> None:
    """Prints a table in markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--repeat", type=int, default=50, help="decoded tokens that are timed")
    parser.add_argument("--eager", action="store_true", help="decode without CUDA graphs")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = Device(options.device, options.eager)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    hardware = bench.open_machine("cuda" if device.is_gpu else "cpu").hardware
    print(f"{hardware}; fp4kit {fp4kit.__version__}, {versions}")
    print(f"`python {' '.join(sys.argv)}`; tokens per second, batch 1", end="")
    print(f"; decode {'by replays of a CUDA graph' if device.graphs else 'without CUDA graphs'}")
    if not (options.no_peers or importlib.util.find_spec(COMPRESSED)):
        print("compressed-tensors is not installed: transformers' own reader is left out")
    print(f"\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        checkpoint(Path(folder), config_of(options), device)
        device.empty()
        for name, model in models(Path(folder), device, not options.no_peers):
            row = measured(name, model, device, options.repeat)
            print(f"| {' | '.join(row)} |", flush=True)
            del model
            device.empty()


if __name__ == "__main__":
    main()
