# SPDX-License-Identifier: Apache-2.0
"""What only the emulated device has; all else that it keeps is in test_driver.py."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.device.driver import DeviceError
from actorserve.device.emulated import FENCES

Make = Callable[..., Any]

pytestmark = pytest.mark.parametrize("driver_kind", ["emulated"], indirect=True)


def _fork(function: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def test_more_fences_than_there_are_words(make_driver: Make) -> None:
    """Words are used again once their fence is reached."""
    driver = make_driver(delay_s=math.inf)
    memory = driver.create(0, 4096)
    for _ in range(FENCES + 5):
        last = driver.record(memory, 1)
    driver.wait(memory, last, 0)
    driver.wait(memory, 1, 0)
    assert driver.counters().fences_recorded == FENCES + 5


def test_a_fence_of_a_dead_tenant_is_an_error_and_no_hang(make_driver: Make) -> None:
    """Also who did not make the slab records; its work was never done."""
    driver = make_driver()
    memory = driver.create(0, 4096)
    fd, _ = driver.export(memory)
    told, tell = os.pipe()

    def die_before_the_work() -> None:
        maker = type(driver)(delay_s=math.inf)
        theirs = maker.import_("emulated-0", os.dup(fd), memory.nbytes, b"")
        os.write(tell, bytes([maker.record(theirs, 1)]))
        os.kill(os.getpid(), signal.SIGKILL)

    pid = _fork(die_before_the_work)
    fence = os.read(told, 1)[0]
    os.waitpid(pid, 0)
    with pytest.raises(DeviceError, match="died"):
        driver.wait(memory, fence, 0)
    for each in (fd, told, tell):
        os.close(each)
