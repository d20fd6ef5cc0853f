# SPDX-License-Identifier: Apache-2.0
"""How long a model is away when its stub is killed.

Noticed: the supervisor logs the death and fails what the stub had. Answers again: a request that
is sent at that moment has its answer, so the new stub has been started, loaded and asked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from pathlib import Path

import numpy as np

from actorserve import Supervisor
from actorserve.config import Settings
from benchmarks.sampling import OURS, CannotRun, Effort, Findings

MODELS = Path(__file__).with_name("models")
NOTICE_S = 10.0
CALM_S = 0.1


class _Ear(logging.Handler):
    """Hear of the next death of a stub, at the moment when the supervisor speaks of it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: asyncio.Future[float] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Note the time of the first warning."""
        if self.heard is not None and not self.heard.done():
            self.heard.set_result(time.monotonic())


def after_kill(effort: Effort) -> Findings:
    """Kill the stub of a numpy model again and again; no back-off before the new one."""
    return asyncio.run(_after_kill(effort.pick(6, 30)))


async def _after_kill(count: int) -> Findings:
    findings = Findings()
    ear = _Ear()
    logger = logging.getLogger("actorserve")
    logger.addHandler(ear)
    logger.propagate = False
    try:
        async with Supervisor(MODELS, Settings(restart_backoff_s=(0.0, 0.0))) as server:
            for _ in range(count):
                noticed_ms, ready_ms = await _kill_once(server, ear)
                findings.add("restart-noticed", OURS, noticed_ms)
                findings.add("restart-ready", OURS, ready_ms)
    finally:
        logger.removeHandler(ear)
    return findings


async def _kill_once(server: Supervisor, ear: _Ear) -> tuple[float, float]:
    """Return the milliseconds from a kill to its notice, and to an answer of the next stub."""
    inputs = {"INPUT0": np.ones(1, np.float32)}
    await server.infer("identity", inputs)
    await asyncio.sleep(CALM_S)
    pid = server.stats().models[0].versions[0].instances[0].pid
    ear.heard = asyncio.get_running_loop().create_future()
    start_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    try:
        noticed_s = await asyncio.wait_for(ear.heard, NOTICE_S)
    except asyncio.TimeoutError:
        raise CannotRun(f"a death was not noticed within {NOTICE_S:g} s") from None
    await server.infer("identity", inputs, timeout_s=NOTICE_S)
    ready_s = time.monotonic()
    return (noticed_s - start_s) * 1e3, (ready_s - start_s) * 1e3
