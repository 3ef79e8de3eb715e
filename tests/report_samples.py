# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Reports as commands give them, made up: for pages that no small model would fill."""

import math
import random

import ml_dtypes
import numpy as np

from fp4kit.files.survey_report import (
    CandidateError,
    ChoiceGroup,
    KeptTensor,
    Point,
    SurveyedTensor,
    SurveyReport,
    mean_error,
)

#: Modules of a layer: shape, and how much worse than normal they come out.
MODULES = {
    "self_attn.q_proj": ((4096, 4096), 0.3),
    "self_attn.k_proj": ((1024, 4096), 0.5),
    "self_attn.v_proj": ((1024, 4096), 0.0),
    "self_attn.o_proj": ((4096, 4096), 0.2),
    "mlp.gate_proj": ((14336, 4096), 0.1),
    "mlp.up_proj": ((14336, 4096), 0.0),
    "mlp.down_proj": ((4096, 14336), 1.5),
}
#: Names that would like to be more than names.
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<!--<script>",
    "a\"b'c&amp;<b>bold</b>",
    "line\nfeed\ttab\x00null\x1b[31mred",
    "right\u202eto left",
    "layers.0.${alert(1)}`x`",
    "datum.value]; alert(1); [",
    "\ud800 alone",
    "layers.1." + "very_long_" * 60,
)


def stats_of(sqnr, elements, bits=4.5):
    """Statistics of a tensor, plausible ones."""
    noise = 10 ** (-sqnr / 10)
    return {
        "elements": elements,
        "mse": noise * 4.1e-4,
        "relative_rms": 100 * math.sqrt(noise),
        "sqnr": sqnr,
        "max_abs_error": 0.0123456789 * (1 + 30 * noise),
        "cosine": 1 - noise / 2,
        "saturated": 0.1086 + noise,
        "zero_codes": 0.0690 + noise,
        "scale_underflow": max(0.0, 19 - sqnr) / 500,
        "scale_subnormal": max(0.0, 20 - sqnr) / 50,
        "bits_per_element": bits,
    }


def entry_of(name, shape, sqnr, action="quantize"):
    """The entry of a tensor that was quantized."""
    elements = math.prod(shape)
    return {
        "name": name,
        "shape": list(shape),
        "dtype": "bfloat16",
        "action": action,
        "reason": "",
        "format": "nvfp4",
        "bytes_before": 2 * elements,
        "bytes_after": elements * 9 // 16 + 4,
        "stats": stats_of(sqnr, elements),
        "exact": False,
        "overflow": False,
        "at_max_code": 0.1086,
        "facts": {
            "format": "nvfp4",
            "recipe": "te",
            "shape": list(shape),
            "dtype": "bfloat16",
            "scale_layout": "linear",
            "nibble_order": "low_first",
            "second_level": {"direction": "encode", "bits": "3f800000"},
        },
    }


def kept_of(name, shape, reason="1-D"):
    """The entry of a tensor that was left alone."""
    nbytes = 2 * math.prod(shape)
    rest = {"dtype": "bfloat16", "action": "keep", "reason": reason, "format": None}
    sizes = {"bytes_before": nbytes, "bytes_after": nbytes}
    return {"name": name, "shape": list(shape), **rest, **sizes, "stats": None, "facts": {}}


def quantize_report(tensors=None, layers=32, experts=0, seed=0):
    """What `quantize --json` prints of a model; `tensors` replaces those of layers."""
    rng = random.Random(seed)
    if tensors is None:
        tensors = [kept_of("model.embed_tokens.weight", (32000, 4096), "an embedding")]
        for layer in range(layers):
            edge = 1.5 if layer in (0, layers - 1) else 0
            for module, (shape, worse) in MODULES.items():
                names = [module]
                if experts and module.startswith("mlp."):
                    names = [f"mlp.experts.{number}.{module[4:]}" for number in range(experts)]
                tensors += [
                    entry_of(
                        f"model.layers.{layer}.{name}.weight",
                        shape,
                        20.45 - worse * (1 + edge) - rng.expovariate(4) + rng.gauss(0, 0.05),
                    )
                    for name in names
                ]
            tensors.append(kept_of(f"model.layers.{layer}.input_layernorm.weight", (4096,)))
        tensors.append(kept_of("lm_head.weight", (32000, 4096), "the output layer"))
    done = [tensor for tensor in tensors if tensor["stats"]]
    kept = [tensor for tensor in tensors if not tensor["stats"]]
    total = {"stats": None}
    if done:
        noise = sum(10 ** (-tensor["stats"]["sqnr"] / 10) for tensor in done) / len(done)
        elements = sum(tensor["stats"]["elements"] for tensor in done)
        stats = stats_of(-10 * math.log10(noise), elements)
        total = {"stats": stats, "exact": False, "overflow": False, "at_max_code": 0.1086}
    return {
        "source": "Llama-3-8B",
        "target": "Llama-3-8B-NVFP4",
        "dry_run": False,
        "options": {"format": "nvfp4", "layout": "compressed-tensors", "exclude": []},
        "seconds": 12.3,
        "warnings": [],
        "tensors": tensors,
        "total": {
            "tensors": len(done),
            "bytes_before": sum(tensor["bytes_before"] for tensor in done),
            "bytes_after": sum(tensor["bytes_after"] for tensor in done),
            **total,
        },
        "kept": {"tensors": len(kept), "bytes": sum(tensor["bytes_after"] for tensor in kept)},
    }


#: Candidates of a survey: normal SQNR and bits a weight.
CANDIDATES = {
    "nvfp4": (20.4, 4.5),
    "nvfp4+sweep": (21.8, 4.5),
    "mxfp4": (18.9, 4.25),
    "mxfp8": (31.5, 8.25),
    "fp8": (33.0, 8.0),
    "bf16": (math.inf, 16.0),
}


def survey_report(layers=16, *, budget=True, seed=1):
    """What `survey --json` prints."""
    rng = random.Random(seed)
    tensors = []
    for layer in range(layers):
        for module, (shape, worse) in MODULES.items():
            errors = {}
            lost = worse * (2 if layer in (0, layers - 1) else 1) + rng.expovariate(3)
            for name, (normal, bits) in CANDIDATES.items():
                noise = 0.0 if normal == math.inf else 10 ** (-(normal - lost) / 10)
                errors[name] = CandidateError(int(math.prod(shape) * bits / 8), noise)
            full, nbytes = f"model.layers.{layer}.{module}", 2 * math.prod(shape)
            tensors.append(
                SurveyedTensor(f"{full}.weight", shape, "bfloat16", nbytes, full, errors)
            )
    kept = [KeptTensor("lm_head.weight", (32000, 4096), "bfloat16", 262144000, "the output layer")]
    weights = sum(tensor.elements for tensor in tensors)

    def point(picks, label=""):
        picked = list(zip(tensors, picks, strict=True))
        nbytes = sum(tensor.errors[pick].nbytes for tensor, pick in picked)
        error = mean_error(tensor.errors[pick] for tensor, pick in picked)
        shares = {
            name: sum(tensor.elements for tensor, pick in picked if pick == name) / weights
            for name in CANDIDATES
        }
        whole = nbytes + kept[0].nbytes
        return Point(nbytes, whole, 8 * nbytes / weights, error, shares, label)

    order = sorted(range(len(tensors)), key=lambda at: -tensors[at].errors["nvfp4"].noise)
    mixtures = []
    for wide in range(0, len(tensors) + 1, 8):
        picks = ["nvfp4+sweep"] * len(tensors)
        for at in order[:wide]:
            picks[at] = "fp8"
        mixtures.append((point(picks), picks))
    chosen, picks = mixtures[3]
    return SurveyReport(
        source="Llama-3-8B",
        candidates=list(CANDIDATES),
        tensors=tensors,
        kept=kept,
        groups=[
            ChoiceGroup(tensor.group, (tensor.name,), pick if budget else None)
            for tensor, pick in zip(tensors, picks, strict=True)
        ],
        uniform=[point([name] * len(tensors), name) for name in CANDIDATES],
        frontier=[mixture for mixture, _ in mixtures] if budget else [],
        chosen=chosen if budget else None,
        recommendation=["Take nvfp4+sweep with the 24 worst tensors in fp8."] if budget else [],
        options={"formats": list(CANDIDATES), "budget": 4.8 if budget else None},
        versions={"fp4kit": "0.1.0"},
        seconds=3.2,
    ).to_json()


def model_tensors(layers=12, width=256):
    """Weights of a small model: heavy tails in some modules, a block that is flushed."""
    rng = np.random.default_rng(0)
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width // 4, width),
        "self_attn.v_proj": (width // 4, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (2 * width, width),
        "mlp.up_proj": (2 * width, width),
        "mlp.down_proj": (width, 2 * width),
    }
    bfloat16 = ml_dtypes.bfloat16
    tensors = {"model.embed_tokens.weight": rng.standard_normal((1000, width)) * 0.02}
    for layer in range(layers):
        for module, shape in shapes.items():
            values = rng.standard_t(3 + layer, shape) * 0.02
            if layer in (0, layers - 1) and module == "self_attn.o_proj":
                values = rng.uniform(-0.05, 0.05, shape)  # many values between large codes
            elif layer in (0, layers - 1) and module == "mlp.down_proj":
                # A few large rows: whole blocks of the others are flushed.
                values = rng.uniform(-0.05, 0.05, shape) * np.exp(rng.normal(size=(width, 1)) * 2.5)
            tensors[f"model.layers.{layer}.{module}.weight"] = values
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(width)
    tensors["lm_head.weight"] = rng.standard_normal((1000, width)) * 0.02
    return {name: values.astype(bfloat16) for name, values in tensors.items()}
