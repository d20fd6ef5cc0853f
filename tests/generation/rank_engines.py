# SPDX-License-Identifier: Apache-2.0
"""Engines for the tests of ranks: each option makes one thing happen. Named "module:Class"."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actorserve.actors.generation.engine import (
    EngineInfo,
    GenRequest,
    Output,
    RequestError,
    World,
)

REFUSED = 999_999
"""A token that the engine does not know."""


class Counting:
    """Answer with the numbers after the prompt's last token, one a poll; in lockstep.

    `all_reduce`: sum the tokens of all ranks at each poll, divided by the number of ranks.
    `journal`: a folder in which each rank writes what it is told, in order.
    `fail_load`, `fail_poll`, `fail_prepare`: the rank on which that raises; `fail_at` is the poll.
    `hang_load`, `hang_poll`: the rank that stands still there. `poll_s`: how long a poll takes.
    `logits`: the length of an array that each token comes with.
    """

    mode: Literal["step", "thread"] = "step"
    ranks: Literal["leader", "lockstep"] = "lockstep"

    def __init__(
        self,
        *,
        all_reduce: bool = False,
        journal: str = "",
        fail_load: int = -1,
        fail_poll: int = -1,
        fail_at: int = 3,
        fail_prepare: int = -1,
        fail_commit: int = -1,
        hang_load: int = -1,
        hang_poll: int = -1,
        poll_s: float = 0.0,
        logits: int = 0,
        close_s: float = 0.0,
    ) -> None:
        self._options = dict(locals())
        self._running: dict[int, list[int]] = {}  # id: next token, left
        self._ended: list[Output] = []
        self._polls = 0
        self._rank = 0
        self._world: World | None = None
        self._prepared: list[str] = []

    def start(self, rank: int, world: World | None) -> EngineInfo:
        self._rank, self._world = rank, world
        self._write("start")
        if self._options["hang_load"] == rank:
            threading.Event().wait()
        if self._options["fail_load"] == rank:
            raise RuntimeError(f"no weights on rank {rank}")
        return EngineInfo("counting", vocab_size=1000, extra={"pid": os.getpid()})

    def add(self, request: GenRequest) -> None:
        self._write(f"add {request.id} {request.prompt[-1]} {len(request.prompt)}")
        if request.prompt[-1] == REFUSED:
            raise RequestError(f"no token {request.prompt[-1]}")
        self._running[request.id] = [request.prompt[-1] + 1, request.sampling.max_tokens]

    def abort(self, ids: Sequence[int]) -> None:
        self._write(f"abort {list(ids)}")
        for number in ids:
            if self._running.pop(number, None) is not None:
                self._ended.append(Output(number, finish="cancelled", final=True))

    def poll(self, timeout_s: float) -> Sequence[Output]:
        self._polls += 1
        self._write(f"poll {sorted(self._running)}")
        if self._options["poll_s"]:
            time.sleep(self._options["poll_s"])
        if self._polls == self._options["fail_at"]:
            if self._options["fail_poll"] == self._rank:
                raise RuntimeError(f"rank {self._rank} ran out of luck")
            if self._options["hang_poll"] == self._rank:
                threading.Event().wait()
        outputs, self._ended = self._ended, []
        tokens = np.array([each[0] for each in self._running.values()], np.float64)
        if self._options["all_reduce"] and self._world is not None:
            tokens = self._world.all_reduce(tokens) / self._world.size
        for (number, state), token in zip(list(self._running.items()), tokens):
            state[0] += 1
            state[1] -= 1
            is_last = state[1] == 0
            if is_last:
                del self._running[number]
            arrays = None
            if self._options["logits"]:
                arrays = {"generation_logits": np.full((1, self._options["logits"]), token, "f4")}
            finish = "length" if is_last else None
            outputs.append(Output(number, 0, [int(token)], finish, final=is_last, arrays=arrays))
        return outputs

    def stats(self) -> dict[str, Any]:
        return {"polls": np.int64(self._polls)}

    def prepare(self, method: str, *args: Any) -> None:
        self._write(f"prepare {method}")
        if self._options["fail_prepare"] == self._rank:
            raise ValueError(f"rank {self._rank} cannot {method}")
        self._prepared.append(method)

    def rollback(self, method: str, *args: Any) -> None:
        self._write(f"rollback {method}")

    def call(self, method: str, *args: Any) -> Any:
        self._write(f"call {method}")
        if self._options["fail_commit"] == self._rank:
            raise ValueError(f"rank {self._rank} could not {method} after all")
        if method == "odd":
            return object()
        return {"method": method, "args": list(args), "rank": np.int64(self._rank)}

    def close(self) -> None:
        self._write("close")
        if self._options["close_s"]:
            time.sleep(self._options["close_s"])

    def _write(self, line: str) -> None:
        if self._options["journal"]:
            with Path(self._options["journal"], str(self._rank)).open("a") as file:
                file.write(line + "\n")


class Threaded(Counting):
    """The same, driven by a thread of its own, with a descriptor to wait on."""

    mode = "thread"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._read_fd, self._write_fd = os.pipe()
        self._lock = threading.Lock()
        self._done: list[Output] = []
        self._wake = threading.Event()
        self._is_closed = False

    def start(self, rank: int, world: World | None) -> EngineInfo:
        info = super().start(rank, world)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return info

    def fileno(self) -> int:
        return self._read_fd

    def _run(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            with self._lock:
                self._done += super().poll(0)
                if not self._running:
                    self._wake.clear()
            os.write(self._write_fd, b"x")

    def add(self, request: GenRequest) -> None:
        with self._lock:
            super().add(request)
            self._wake.set()

    def abort(self, ids: Sequence[int]) -> None:
        with self._lock:
            super().abort(ids)
            self._wake.set()

    def poll(self, timeout_s: float) -> Sequence[Output]:
        with self._lock:
            done, self._done = self._done, []
        if done:
            os.read(self._read_fd, 65536)
        return done

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()
        super().close()


class NoStart:
    """Refuse to be made."""

    def __init__(self) -> None:
        sys.exit("this engine exits")


class Once(Counting):
    """Load only as long as there is no file "gone" in the journal's folder."""

    def start(self, rank: int, world: World | None) -> EngineInfo:
        if Path(self._options["journal"], "gone").exists():
            raise RuntimeError("no weights any more")
        return super().start(rank, world)
