# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of variants, run on the CPU: every case works, and its bytes are counted right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fp4kit
from fp4kit import bench
from fp4kit.errors import BackendUnavailableError

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """The scripts import each other from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield


@pytest.fixture(scope="module")
def gpu_variants(on_path):
    import gpu_variants

    return gpu_variants


@pytest.fixture(scope="module")
def cases(on_path):
    import variant_cases

    return variant_cases


@pytest.fixture(scope="module")
def inputs(cases):
    machine = bench.open_machine("cpu")
    return cases.Inputs(machine, machine.random(*bench.shape_of(16), "bfloat16"))


def test_arguments(gpu_variants, capsys):
    options = gpu_variants.parse([])
    assert options.log2_elements == 28
    assert bench.shape_of(options.log2_elements) == (32768, 8192)
    assert options.only.search("anything")
    options = gpu_variants.parse(["--log2-elements", "26", "--only", "sweep|rows$", "--json"])
    assert bench.shape_of(options.log2_elements) == (8192, 8192)
    assert options.json
    assert options.only.search("quantize rows")
    assert not options.only.search("quantize rows, swizzled")
    for wrong in (["--log2-elements", "3"], ["--only", "("]):
        with pytest.raises(SystemExit) as caught:
            gpu_variants.parse(wrong)
        assert caught.value.code == 2
        assert wrong[0] in capsys.readouterr().err


def test_bytes_by_hand(cases):
    """256 bfloat16: 512 bytes, 128 of codes, and a scale for every 16."""
    assert cases.encoded_bytes(256) == 128 + 16
    assert cases.encoded_bytes(256, "mxfp4") == 128 + 8
    assert cases.encoded_bytes(256, "mxfp8") == 256 + 8
    assert cases.quantize_bytes(256) == 512 + 144
    assert cases.quantize_bytes(256, reads=2, results=2) == 1024 + 288
    assert cases.quantize_bytes(256, shrinks=2) == 512 + 72
    assert cases.residual_bytes(2, 128, 32) == 512 + 160 + 20
    assert [cases.residual_channels(n) for n in (8192, 4096, 256)] == [1024, 1024, 64]


def test_members_are_unequal_and_fill_the_buffer(cases):
    rows = cases.member_rows(32768)
    assert len(rows) == 64
    assert sum(rows) == 32768
    assert len(set(rows)) > 40
    assert all(size >= 0 and size % 16 == 0 for size in rows)
    assert rows == cases.member_rows(32768)
    assert sum(cases.member_rows(256)) == 256
    whole = cases.member_rows(32768, multiple=cases.WHOLE_TILES)
    assert sum(whole) == 32768
    assert len(set(whole)) > 10
    assert all(size >= 0 and size % 128 == 0 for size in whole)


def test_counted_bytes_are_those_of_the_arrays(cases, inputs):
    """Inputs once, and whatever arrays come out."""
    written = {}
    for name, build in cases.builders(inputs):
        case = build()
        assert case.name == name
        result = case.call()
        parts = result if isinstance(result, fp4kit.DirectionPair) else (result,)
        if isinstance(result, (np.ndarray, type(None))):
            continue
        written[name] = sum(part.packed.nbytes + part.block_scale.nbytes for part in parts)
        reads = 1 + ("amax measured" in name) + ("dgelu" in name or "dsilu" in name)
        rows_of_sums = cases.MEMBERS if "members" in name else 1
        sums = 4 * inputs.x.shape[1] * rows_of_sums if "sums" in name else 0
        # The padding of each member's swizzled scales is not work that must be done.
        padding = case.nbytes - inputs.x.nbytes * reads - written[name] - sums
        padded = name.endswith(("members, rows, swizzled", "members, rows, swizzled, silu"))
        assert padding < 0 if padded else padding == 0, name
    assert len(written) > 30


def test_amaxes_that_are_given_give_the_measured_bytes(cases, inputs):
    results = {name: build().call() for name, build in cases.builders(inputs) if "rotated" in name}
    for name in ("rotated columns", "rows and rotated columns"):
        pair = results[f"quantize {name}"], results[f"quantize {name}, amax measured"]
        one, other = (each if isinstance(each, tuple) else (each,) for each in pair)
        for given, measured in zip(one, other, strict=True):
            np.testing.assert_array_equal(given.packed, measured.packed)
            np.testing.assert_array_equal(given.block_scale, measured.block_scale)


def test_per_token_alone_gives_its_bytes(cases, inputs):
    q = fp4kit.quantize(inputs.x, second_level="per_token")
    case = cases.per_token_case(inputs, "alone")
    (job,) = case.call.args
    packed, block_scale = job.packed, job.block_scale
    packed[...] = block_scale[...] = 0
    case.call()
    np.testing.assert_array_equal(packed, q.packed)
    np.testing.assert_array_equal(block_scale, q.block_scale)


def test_a_whole_run(gpu_variants, cases, inputs, capsys, tmp_path):
    arguments = ["--log2-elements", "16", "--repeat", "1", "--no-peers"]
    file = tmp_path / "times.json"
    options = gpu_variants.parse([*arguments, "--json-file", str(file)])
    gpu_variants.run(inputs.machine, options)
    table = capsys.readouterr().out
    document = json.loads(file.read_text())
    names = [timing["name"] for timing in document["timings"]]
    assert names[:2] == ["copy (numpy)", "copy (all threads)"]
    assert names[2:] == [name for name, _ in cases.builders(inputs)]
    assert not document["skipped"]
    assert document["shape"] == [256, 256]
    for timing in document["timings"]:
        assert f"  {timing['name']} " in table
        assert timing["elements_per_second"] > 0
        assert timing["share_of_copy"] > 0
    assert max(timing["share_of_copy"] for timing in document["timings"][:2]) == 1


def test_what_a_backend_refuses_is_listed(gpu_variants, inputs, monkeypatch, capsys):
    def refuse(*args, **options):
        raise BackendUnavailableError("quantize_residual", {"cuda": "has no such kernel"})

    monkeypatch.setattr(fp4kit, "quantize_residual", refuse)
    arguments = ["--log2-elements", "16", "--repeat", "1", "--no-peers", "--only", "residual|dgelu"]
    document = gpu_variants.run(inputs.machine, gpu_variants.parse(arguments))
    assert len(document["skipped"]) == 3
    assert all("has no such kernel" in reason for reason in document["skipped"].values())
    assert [timing["name"] for timing in document["timings"]][2:] == ["quantize dgelu"]
    assert "Not measured: quantize residual channels, ordered: " in capsys.readouterr().out


def test_ratios(gpu_variants):
    def timing(name, microseconds):
        return bench.Timing(name, "bfloat16", 1 << 20, microseconds, 1.0, 1.0)

    found = gpu_variants.ratios(
        [
            timing("quantize rows", 10),
            timing("quantize columns", 20),
            timing("quantize 64 members, rows", 15),
            timing("torch eager: quantize columns", 200),
            timing("torchao compiled quantize", 80),
            timing("quantize sweep", 1048.576 / 6.6),
        ]
    )
    assert found == pytest.approx(
        {
            "quantize 64 members, rows / quantize rows": 1.5,
            "torch eager: quantize columns / fp4kit quantize columns": 10,
            "torchao compiled quantize / fp4kit quantize rows": 8,
            "ModelOpt sweep (6.6e9 elements/s on an H200) / fp4kit quantize sweep": 1,
        }
    )


def test_the_table_of_errors_is_what_is_measured(on_path):
    import accuracy

    page = (BENCHMARKS.parent / "docs" / "choosing.md").read_text("utf-8")
    rows = accuracy.table(accuracy.random_tensors())[2:]
    shown = [line for line in page.splitlines() if line.startswith(("| nvfp4", "| mxfp", "| fp8"))]
    # The page has a column more, for a real model.
    assert [line.rsplit("|", 2)[0].rstrip() for line in shown] == [row.rstrip(" |") for row in rows]


def test_recipes_have_the_same_error(on_path):
    import accuracy

    (x,) = accuracy.random_tensors()["normal"]
    errors = [accuracy.measure([x], "nvfp4", {"recipe": name}).sqnr for name in fp4kit.ALL_RECIPES]
    assert max(errors) - min(errors) < 0.01


def test_scaling_of_shared_conversions(on_path, tmp_path, monkeypatch):
    import fleet

    monkeypatch.setattr(fleet, "HIDDEN", 256)
    monkeypatch.setattr(fleet, "INTERMEDIATE", 896)
    monkeypatch.setattr(fleet, "EXPERT_LAYERS", 1)
    words = ["--gigabytes", "0.01", "--shard", "1MB", "--repeat", "1", "--workers"]
    found = fleet.measure(fleet.parse([*words, "1", "2", "--copy"]), tmp_path / "a")
    assert [row["workers"] for row in found["workers"]] == [1, 2]
    assert all(row["seconds"] > 0 and row["copy_seconds"] > 0 for row in found["workers"])
    assert 0.25 < found["steps"]["result_bytes_per_source_byte"] < 0.35
    parts = fleet.measure(fleet.parse([*words, "2", "--how", "parts"]), tmp_path / "b")
    assert fp4kit.verify(tmp_path / "b" / "out").ok
    assert parts["workers"][0]["efficiency"] == 1


def test_simulation_of_many_workers(on_path):
    import fleet_simulation as simulation

    def minutes(workers, shard=1e9, store=float("inf")):
        case = simulation.Case(workers, shard, store, 1.5e12, 90_000)
        return simulation.simulate(case, simulation.MEASURED)

    outcomes = [minutes(workers) for workers in (1, 8, 64, 512)]
    times = [outcome.seconds for outcome in outcomes]
    assert times == sorted(times, reverse=True)
    assert 6 < times[0] / times[1] <= 8
    assert outcomes[-1].bound == "shards"
    assert outcomes[-1].tasks == 422
    slow = minutes(64, store=2e9)
    assert slow.bound == "store"
    assert slow.seconds > 1.5e12 / 2e9
    assert minutes(8).seconds == minutes(8).seconds
