# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Which weights of each architecture llama.cpp multiplies by their `.scale`, read from its sources.

llama.cpp loads `.scale` tensors for every architecture, but applies one only where the graph of the
architecture hands it on. `python tests/gguf_scale_facts.py LLAMA_CPP` writes
fp4kit/io/gguf_scales.json anew from a source tree; `--check` shows the difference. A weight counts
where every use of it in the files of its architecture hands its scale on.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parents[1] / "fp4kit" / "io" / "gguf_scales.json"
#: Members of llama.cpp's layers, and what files call them.
NAMES = {
    "wq": "attn_q", "wk": "attn_k", "wv": "attn_v", "wqkv": "attn_qkv", "wo": "attn_output",
    "wqkv_gate": "attn_gate", "output": "output",
    **{name: name for name in (
        "ffn_up", "ffn_gate", "ffn_down", "ffn_up_exps", "ffn_gate_exps", "ffn_down_exps",
        "ffn_up_shexp", "ffn_gate_shexp", "ffn_down_shexp", "ssm_in", "ssm_out", "ssm_alpha",
        "ssm_beta",
    )},
}  # fmt: skip
CALL = re.compile(r"\b(build_\w+|ggml_\w+)\(")
MEMBER = re.compile(r"(?:model\.)?(?:layers?(?:\[il?\])?\.|layer\.|mtp_layer\.|model\.)(\w+)$")
#: Members whose scales llm_graph_context::build_qkv hands on itself.
BY_BUILD_QKV = {"wq", "wk", "wv", "wqkv"}


def arguments(text: str, at: int) -> list[str]:
    """The arguments of a call whose bracket opens at a position."""
    depth, found = 0, [""]
    for char in text[at:]:
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            break
        if char == "," and depth == 1:
            found.append("")
        elif depth > 1 or char not in "([{":
            found[-1] += char
    return [one.strip() for one in found]


def uses(text: str) -> tuple[set[str], set[str]]:
    """Members that are used with their scale, and those used without."""
    scaled, bare = set(), set()
    for call in CALL.finditer(text):
        if call[1] == "build_qkv":
            scaled |= BY_BUILD_QKV
            continue
        matches = map(MEMBER.search, arguments(text, call.end() - 1))
        members = {match[1] for match in matches if match}
        for member in members & NAMES.keys():
            (scaled if f"{member}_s" in members else bare).add(member)
    return scaled, bare


def classes(source: Path) -> dict[str, str]:
    """The class that llama.cpp makes for each architecture."""
    names = (source / "llama-arch.cpp").read_text()
    known = dict(re.findall(r"\{ (LLM_ARCH_\w+),\s+\"([^\"]+)\"", names))
    found, waiting = {}, []
    for line in (source / "llama-model.cpp").read_text().splitlines():
        if case := re.match(r"\s+case (LLM_ARCH_\w+):", line):
            waiting.append(case[1])
        if made := re.search(r"return new (llama_model_\w+)\(params\)", line):
            found |= {known[name]: made[1] for name in waiting}
        if "return" in line or "break" in line:
            waiting = []
    return found


def graphs(source: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The files that build the graph of each class, and the classes whose graphs it takes."""
    files: dict[str, list[str]] = {}
    for path in sorted((source / "models").glob("*.cpp")):
        text = re.sub(r"//[^\n]*", "", path.read_text())
        for name in set(re.findall(r"(llama_model_\w+)::graph\w*(?:<\w+>)?::\w+\(", text)):
            files.setdefault(name, []).append(text)
    taken = {}
    heads = (source / "models" / "models.h").read_text()
    for name, base, body in re.findall(
        r"struct (llama_model_\w+)[^{]*: public (\w+) \{(.*?)\n\};", heads, re.S
    ):
        taken[name] = re.findall(r"using graph\w*\s*=\s*(llama_model_\w+)::", body)
        if name not in files and base not in ("llama_model", "llama_model_base"):
            taken[name].append(base)
    return files, taken


def scales(source: Path) -> Iterator[tuple[str, list[str]]]:
    """Each architecture with the weights whose scales it applies, by their names in files."""
    files, taken = graphs(source)
    for architecture, name in sorted(classes(source).items()):
        waiting, seen = [name], set()
        scaled, bare = set(), set()
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            waiting += taken.get(one, [])
            for text in files.get(one, []):
                more, without = uses(text)
                scaled, bare = scaled | more, bare | without
        yield architecture, sorted(NAMES[member] for member in scaled - bare)


def table(tree: Path, version: str) -> str:
    """The content of the table."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(' '.join(found))}"
        for name, found in scales(tree / "src")
        if found
    ]
    body = ",\n".join(lines)
    return f'{{\n "llama.cpp": {json.dumps(version)},\n "weights": {{\n{body}\n }}\n}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="llama.cpp's source tree")
    parser.add_argument("--version", default="llama-cpp-python 0.3.36", help="what it is called")
    parser.add_argument("--check", action="store_true", help="show the difference, write nothing")
    given = parser.parse_args()
    text = table(given.tree, given.version)
    if not given.check:
        TABLE.write_text(text)
        return 0
    old = TABLE.read_text()
    sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), text.splitlines(True)))
    return int(old != text)


if __name__ == "__main__":
    sys.exit(main())
