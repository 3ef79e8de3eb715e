# SPDX-FileCopyrightText: 2026 the fp4kit authors
# SPDX-License-Identifier: Apache-2.0
"""What calls do on a stream that is captured, with a driver of the test's own."""

import sys
from types import SimpleNamespace

import pytest

from fp4kit import arrays
from fp4kit.arrays import capture

GLOBAL = 0


class Driver:
    """As CUDA's: the mode of a thread."""

    def __init__(self, status=0):
        self.mode, self.status = GLOBAL, status

    def cuThreadExchangeStreamCaptureMode(self, reference):  # noqa: N802 - the driver's name
        given = reference._obj
        self.mode, given.value = given.value, self.mode
        return self.status


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(capture, "driver", lambda: driver)
    return driver


def test_allocations_are_allowed_meanwhile(driver):
    with capture.allocations_allowed():
        assert driver.mode == capture.RELAXED
        with capture.allocations_allowed():
            assert driver.mode == capture.RELAXED
        assert driver.mode == capture.RELAXED
    assert driver.mode == GLOBAL


def test_the_mode_is_restored_after_an_error(driver):
    with pytest.raises(ZeroDivisionError), capture.allocations_allowed():
        raise ZeroDivisionError
    assert driver.mode == GLOBAL


def test_a_driver_that_refuses(driver):
    driver.status = 201
    with pytest.raises(RuntimeError, match="CUDA status 201"), capture.allocations_allowed():
        pass


@pytest.mark.parametrize("capturing", [True, False])
def test_calls_on_a_stream_that_is_captured(capturing, driver, monkeypatch):
    """Of a torch tensor, whose stream is the caller's."""

    class Stream:
        ptr = 7

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def is_capturing(self):
            return capturing

    class Device(Stream):
        def __init__(self, number):
            assert number == 0

    runtime = SimpleNamespace(getDevice=lambda: 0)
    cuda = SimpleNamespace(get_current_stream=Stream, Device=Device, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(arrays, "known_stream", lambda *_: Stream())
    with arrays.device_scope(arrays.Origin("torch", "cuda:0", stream=7)):
        assert driver.mode == (capture.RELAXED if capturing else GLOBAL)
    assert driver.mode == GLOBAL
