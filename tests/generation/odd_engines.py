# SPDX-License-Identifier: Apache-2.0
"""Engines that refuse to load, hang, or end requests by halves. Named "module:Class"."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from actorserve.actors.generation import EngineInfo, Output, World
from actorserve.errors import InvalidArgument, Unsupported
from tests.generation.rank_engines import Counting


class Refusing(Counting):
    """Refuse to load: `how` says by which error, `where` in which of its methods."""

    def __init__(self, how: str = "invalid", where: str = "start") -> None:
        super().__init__()
        self._how, self._where = how, where
        if where == "init":
            self._refuse()

    def start(self, rank: int, world: World | None) -> EngineInfo:
        self._refuse()
        return super().start(rank, world)

    def _refuse(self) -> None:
        if self._how == "invalid":
            raise InvalidArgument("option 'slots' is 0, expected 1 or more")
        raise Unsupported("this processor has no AVX2")


class Hanging(Counting):
    """Stand still in the first iteration until the test lets it go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in = threading.Event()
        self.released = threading.Event()

    def poll(self, timeout_s: float) -> Sequence[Output]:
        self.is_in.set()
        self.released.wait()
        return super().poll(timeout_s)


class SlowToClose(Counting):
    """Take its time for closing, as one that has files to write."""

    def __init__(self, close_s: float) -> None:
        super().__init__()
        self._close_s = close_s
        self.is_closed = False

    def close(self) -> None:
        time.sleep(self._close_s)
        self.is_closed = True


class One(Counting):
    """Ignore `n`: one sequence, whatever was asked for."""


class Mute(Counting):
    """End requests without saying why."""

    def poll(self, timeout_s: float) -> Sequence[Output]:
        outputs = super().poll(timeout_s)
        for output in outputs:
            output.finish = None
        return outputs


class Split(Counting):
    """Say the end of a sequence and that of the request in two outputs."""

    def poll(self, timeout_s: float) -> Sequence[Output]:
        outputs: list[Output] = []
        for output in super().poll(timeout_s):
            was_final, output.final = output.final, False
            outputs.append(output)
            if was_final:
                outputs.append(Output(output.id, final=True))
        return outputs
