# SPDX-License-Identifier: Apache-2.0
"""How long a server takes to serve: one model, 43 of them, and the whole command.

A load here is `Supervisor.start()` from nothing: the zygote, the stubs, and every model answers
ready. The command's time has the interpreter's start and all imports in it as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from actorserve import Supervisor
from benchmarks import repository, server
from benchmarks.sampling import OURS, CannotRun, Contender, Effort, Figures, Findings, take_turns

MANY_MODELS = 43


def load(effort: Effort) -> Findings:
    """Measure all three; the large one fewer times."""
    findings = Findings()
    one, many = repository.of_models(1), repository.of_models(MANY_MODELS)
    contenders = [
        _contender("load-1", partial(_load_s, one)),
        _contender("start-1", partial(_command_s, one)),
    ]
    take_turns(findings, contenders, effort, effort.pick(3, 7))
    contenders = [_contender("load-43", partial(_load_s, many))]
    take_turns(findings, contenders, effort, effort.pick(1, 3))
    return findings


def _contender(row: str, measure: Callable[[], float]) -> Contender:
    def turn() -> Figures:
        return {row: measure()}

    return Contender(OURS, (row,), turn)


def _load_s(models: Path) -> float:
    async def run() -> float:
        supervisor = Supervisor(models)
        start_s = time.monotonic()
        await supervisor.start()
        elapsed_s = time.monotonic() - start_s
        is_ready, failures = supervisor.is_ready(), supervisor.failures
        await supervisor.stop()
        if not is_ready:
            raise CannotRun(f"not every model loaded: {failures}")
        return elapsed_s

    return asyncio.run(run())


def _command_s(models: Path) -> float:
    with server.actorserve(models) as served:
        return served.ready_s
