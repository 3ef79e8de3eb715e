# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Importance matrices of llama.cpp as moments: files as the gguf package writes them, and .dat."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

import fp4kit
from command_line import invoke
from fp4kit.io.moments import PRIOR_ROWS, InputMoments, shrunk, write_moments
from fp4kit.io.write.files import Output
from gguf_models import gguf_name

ROWS = 200.0
EXPERTS = 3
EXPERT_NAMES = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def sums_of(names, widths, seed=3):
    """Sums of squares of each weight's input channels."""
    random = np.random.default_rng(seed)
    return {
        name: ROWS * random.random(width) ** 3 for name, width in zip(names, widths, strict=True)
    }


def write_gguf(path, entries):
    """`NAME.in_sum2` and `NAME.counts` as llama-imatrix has them: a row for each expert."""
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["texts.txt"])
    writer.add_uint32("imatrix.chunk_count", 2)
    writer.add_uint32("imatrix.chunk_size", 100)
    for name, (sums, counts) in entries.items():
        counts = np.atleast_1d(np.asarray(counts, np.float32))
        writer.add_tensor(f"{name}.in_sum2", sums.reshape(len(counts), -1).astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_dat(path, entries, chunks=2):
    """The older form: means, times a number of chunks."""
    data = struct.pack("<i", len(entries))
    for name, (sums, counts) in entries.items():
        counts = np.atleast_1d(np.asarray(counts, np.float64))[:, None]
        values = (sums.reshape(len(counts), -1) / counts * chunks).astype("<f4").reshape(-1)
        data += struct.pack("<i", len(name)) + name.encode()
        data += struct.pack("<ii", chunks, len(values)) + values.tobytes()
    path.write_bytes(data + struct.pack("<ii", chunks, 5) + b"a.txt")
    return path


@pytest.fixture
def moe(checkpoints, tmp_path):
    tensors, config = checkpoints.moe(EXPERTS)
    return checkpoints.save(tmp_path / "in", tensors, config)


def surveyed(source, moments):
    report = fp4kit.survey(source, ["nvfp4", "fp8"], moments=moments)
    return report, {t.name: t.errors["nvfp4"].output_noise for t in report.tensors}


def sums_by_weight(source):
    report = fp4kit.survey(source, ["nvfp4"])
    return sums_of([t.name for t in report.tensors], [t.shape[-1] for t in report.tensors])


def ours(path, sums, rows):
    second = {name.removesuffix(".weight"): each / ROWS for name, each in sums.items()}
    counts = dict.fromkeys(second, ROWS) if rows else {}
    write_moments(Output(path), InputMoments(path, second, {}, counts), {})
    return path


@pytest.mark.parametrize("write", [write_gguf, write_dat])
def test_it_is_what_our_own_moments_are(write, dense_model, tmp_path):
    sums = sums_by_weight(dense_model)
    file = write(
        tmp_path / f"imatrix.{write.__name__.removeprefix('write_')}",
        {gguf_name(name): (each, ROWS) for name, each in sums.items()}
        | {"output.weight": (np.ones(64), ROWS)},
    )
    report, found = surveyed(dense_model, file)
    assert report.warnings == []
    # A .dat file does not say how many rows were seen.
    _, expected = surveyed(dense_model, ours(tmp_path / "m.safetensors", sums, write is write_gguf))
    assert found.keys() == expected.keys()
    for name, noise in found.items():
        assert noise == pytest.approx(expected[name], rel=1e-6)
    assert len(set(found.values())) == len(found)


def stacked(sums, counts):
    """The entries of a model with experts."""
    entries = {}
    for name, each in sums.items():
        if ".experts." not in name:
            continue
        kind = EXPERT_NAMES[name.split(".")[-2]]
        entries.setdefault(f"blk.0.{kind}.weight", []).append(each)
    found = {
        name: (np.stack(rows) * (np.array(counts) / ROWS)[:, None], counts)
        for name, rows in entries.items()
    }
    attention = [name for name in sums if "self_attn" in name]
    return found | {gguf_name(name): (sums[name], ROWS) for name in attention}


@pytest.mark.parametrize("write", [write_gguf, write_dat])
def test_experts_are_taken_apart(write, moe, tmp_path):
    sums = sums_by_weight(moe)
    more = {"blk.0.ffn_gate_inp.weight": (np.ones(64), ROWS)}
    suffix = write.__name__.removeprefix("write_")
    file = write(tmp_path / f"i.{suffix}", stacked(sums, [ROWS] * EXPERTS) | more)
    report, found = surveyed(moe, file)
    assert "left out, as not known: 'blk.0.ffn_gate_inp.weight'" in report.warnings[0]
    assert "no moments for 3 of" in report.warnings[1]  # the shared expert has no name
    _, expected = surveyed(moe, ours(tmp_path / "m.safetensors", sums, write is write_gguf))
    for name in (name for name in sums if "shared_expert" not in name):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    assert found["model.layers.0.mlp.shared_expert.up_proj.weight"] is None


def test_experts_that_no_token_reached(moe, tmp_path):
    sums = sums_by_weight(moe)
    report, found = surveyed(moe, write_gguf(tmp_path / "i.gguf", stacked(sums, [ROWS, 0, ROWS])))
    assert "no moments for 6 of" in report.warnings[0]
    assert found["model.layers.0.mlp.experts.1.up_proj.weight"] is None
    assert found["model.layers.0.mlp.experts.2.up_proj.weight"] is not None


def test_few_rows_count_less():
    seen = np.array([0.0, 1.0, 5.0])
    np.testing.assert_array_equal(shrunk(seen, PRIOR_ROWS), (seen + 2.0) / 2)
    np.testing.assert_array_equal(shrunk(seen, 0.0), [2.0, 2.0, 2.0])
    np.testing.assert_allclose(shrunk(seen, 1e9), seen, atol=1e-6)


def fails(source, moments, tmp_path):
    """One line, and nothing written."""
    before = sorted(tmp_path.rglob("*"))
    report = tmp_path / "report.json"
    result = invoke("survey", str(source), "--moments", str(moments), "--report", str(report))
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    return result.stderr


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"blk.7.ffn_up.weight": (np.ones(64), 4)}, "moments of another model"),
        ({"blk.0.ffn_up.weight": (np.ones(32), 4)}, "has 32 input channels there, 64 here"),
        ({"blk.0.what.weight": (np.ones(64), 4)}, "names are not known here"),
        ({"blk.0.ffn_up.weight": (np.full(64, np.nan), 4)}, "not finite"),
        ({"blk.0.ffn_up.weight": (np.ones(64), -1)}, "not finite and at least 0"),
    ],
)
def test_another_model(entries, message, dense_model, tmp_path):
    assert message in fails(dense_model, write_gguf(tmp_path / "i.gguf", entries), tmp_path)


def test_what_is_none(dense_model, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("output.weight", np.ones((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "is no importance matrix" in fails(dense_model, tmp_path / "model.gguf", tmp_path)
    whole = write_dat(tmp_path / "i.dat", {"blk.0.ffn_up.weight": (np.ones(64), 4)}).read_bytes()
    for cut in (2, 10, 100):
        (tmp_path / "cut.dat").write_bytes(whole[:cut])
        assert "beyond the end" in fails(dense_model, tmp_path / "cut.dat", tmp_path)
    (tmp_path / "long.dat").write_bytes(struct.pack("<ii", 1, 1 << 30))
    assert "a name of 1073741824 bytes" in fails(dense_model, tmp_path / "long.dat", tmp_path)


def test_it_holds_no_amaxes(dense_model, tmp_path):
    file = write_gguf(tmp_path / "i.gguf", {"blk.0.ffn_up.weight": (np.ones(64), 4)})
    result = invoke(
        "quantize", str(dense_model), "-o", str(tmp_path / "o"), "--activations", str(file)
    )
    assert result.exit_code == 1
    assert "not their largest magnitudes" in result.stderr
    assert not (tmp_path / "o").exists()
