# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""Seeded, structure-aware damage to files, and what must hold whatever comes of it.

A fuzzer runs a fixed number of cases, each from a seed of its own that a failure names: set
FP4KIT_FUZZ_CASES for more of them, FP4KIT_FUZZ_SEED for others.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fp4kit.errors import Fp4kitError

#: Processor time of a case under tracing, and memory beyond what its input takes.
SECONDS, MEMORY = 5.0, 8 << 20
#: Every this many cases, memory is measured.
MEASURED = 8

#: Values of every type of JSON, and those that code trips over.
VALUES = (
    None, True, False, 0, -1, 1, 2, 4, 8, 16, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64,
    -(2**63), 10**30, 10**400, 0.0, -0.0, 1.5, 1e308, "", "x", "0", "-0000001", "\0", "\n",
    "é", "\U0001f600", "\\", '"', "../x", "float32", "U8", "F32", "F4", "nvfp4", "mxfp8", "te",
    "x" * 3000, [], [[]], [0], [1, 2], [2**63], ["x"], [None], [[[[[]]]]], {}, {"": 0},
    {"dtype": "U8"}, {"a": {"b": []}},
)  # fmt: skip


def containers(value: Any) -> list[Any]:
    """Every list and object within a value that is not empty."""
    found, waiting = [], [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (dict, list)) and one:
            found.append(one)
            waiting.extend(one.values() if isinstance(one, dict) else one)
    return found


def damage_values(rng: random.Random, value: Any, count: int) -> Any:
    """Replaces, removes, renames, adds or exchanges members of a JSON value."""
    value = json.loads(json.dumps(value))
    for _ in range(count):
        places = containers(value)
        if not places:
            return rng.choice(VALUES)
        place = rng.choice(places)
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        key, other = rng.choice(keys), rng.choice(keys)
        action = rng.randrange(6)
        if action <= 2:
            place[key] = rng.choice(VALUES)
        elif action == 3:
            del place[key]
        elif action == 4:
            place[key], place[other] = place[other], place[key]
        elif isinstance(place, dict):
            place[rng.choice([str(key) + "x", "", "dtype", "shape"])] = place[key]
        else:
            place.append(rng.choice([place[key], *VALUES[:12]]))
        value = json.loads(json.dumps(value))
    return value


def as_text(rng: random.Random, value: Any) -> bytes:
    """A JSON value as text, sometimes escaped, spaced or with a key twice."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, None, 1]))
    if rng.random() < 0.05 and '"' in text:
        text = text.replace("}", ',"shape":[1]}', 1)
    if rng.random() < 0.05:
        text = text.replace("0", rng.choice(["-0", "00", "0.0", "0e0", "NaN", "\u0660"]), 1)
    return text.encode("utf-8", "surrogatepass")


def damage_bytes(rng: random.Random, data: bytes, count: int) -> bytes:
    """Flips, replaces, inserts, removes or repeats bytes, or cuts the end off."""
    content = bytearray(data)
    for _ in range(count):
        if not content:
            break
        at, size = rng.randrange(len(content)), rng.choice([1, 1, 1, 2, 4, 8, 30])
        action = rng.randrange(6)
        if action == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            content[at : at + size] = rng.randbytes(len(content[at : at + size]))
        elif action == 2:
            content[at:at] = rng.choice(
                [b"\0", b"\xff", b'"', b"{", b"[", b",", rng.randbytes(size)]
            )
        elif action == 3:
            del content[at : at + size]
        elif action == 4:
            content[at:at] = content[at : at + size]
        elif rng.random() < 0.3:
            del content[at:]
    return bytes(content)


@contextlib.contextmanager
def held(measured: bool) -> Iterator[None]:
    """What must hold of a case: nothing but errors of ours, in one line, in bounded time."""
    if measured:
        tracemalloc.start()
    started = time.process_time()
    try:
        yield
    except Fp4kitError as error:
        text = str(error)
        assert text, "an error says something"
        assert "\n" not in text, text
        assert len(text) <= 4000, text
    finally:
        took = time.process_time() - started
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
        if measured:
            tracemalloc.stop()
    assert took < SECONDS
    assert peak < MEMORY, f"{peak} bytes"


def fuzz(kind: str, count: int, case: Callable[[random.Random], None]) -> None:
    """Runs a fuzzer; a case that fails names its seed."""
    base = os.environ.get("FP4KIT_FUZZ_SEED", "0")
    for number in range(int(os.environ.get("FP4KIT_FUZZ_CASES", count))):
        seed = f"{kind} {base} {number}"
        try:
            with held(number % MEASURED == 0):
                case(random.Random(seed))
        except BaseException:
            print(f"the case of random.Random({seed!r}) failed")
            raise


class NeverUnpickled:
    """Its pickle fails the test when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)
