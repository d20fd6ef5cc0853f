#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a server everything for a long time, and see that nothing is lost and nothing grows.

    soak.py [--minutes N] [--seed N]

Two servers are under load at once, one embedded here and one started as a command and asked over
HTTP: calls between models, streams, many streams of one request, cancelled tasks, deadlines,
errors, connections that close in the middle. It begins with more at once than comes later; after
that and a first part of the load every request has to end once, and memory, descriptors, threads,
arena and tables have to stay as they were. A line every 10 s says how it stands. The exit code is
0 if all is well, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from actorserve.config import Settings  # noqa: E402
from benchmarks import footprint, server  # noqa: E402
from benchmarks.calls import MODELS  # noqa: E402
from benchmarks.footprint import Footprint, Limits  # noqa: E402
from benchmarks.history import History  # noqa: E402
from benchmarks.soak_clients import Door, Http, WatchedSupervisor  # noqa: E402

REPOSITORIES = [*MODELS, ROOT / "examples" / "pipeline_repository"]
NAMES = (
    *("identity", "caller", "caller_async", "count", "fan"),
    *("clean", "embed", "pipeline", "patient", "leaf", "orchestrator"),
)
EMBEDDED_CLIENTS = 12
HTTP_CLIENTS = 12
WARM_UP_SHARE = 0.15
LOOK_S = 10.0
REST_S = 30.0
PEAKS = 3


class Soak:
    """One run; `problems` after it are what the verdict is made of."""

    def __init__(self, seconds: float, seed: int, look_s: float = LOOK_S) -> None:
        self.history = History()
        self.problems: list[str] = []
        self._seconds = seconds
        self._look_s = look_s
        self._chance = random.Random(seed)
        self._start_s = time.monotonic()
        self._looks: list[Callable[[], Footprint]] = []
        self._samples: list[list[Footprint]] = []

    async def run(self) -> None:
        """Start both servers, put them under load, and judge."""
        flags = ["--model-control-mode", "explicit"]
        for name in NAMES:
            flags += ["--load-model", name]
        for path in REPOSITORIES[1:]:
            flags += ["--model-repository", str(path)]
        embedded = WatchedSupervisor(
            REPOSITORIES, Settings(model_control_mode="explicit", load_model=NAMES)
        )
        embedded.history = self.history
        with server.actorserve(REPOSITORIES[0], *flags) as remote:
            async with embedded:
                if embedded.failures:
                    raise SystemExit(f"a model did not load: {embedded.failures}")
                self._looks = [
                    lambda: footprint.look(
                        os.getpid(), json.loads(msgspec.json.encode(embedded.stats())), remote.pid
                    ),
                    lambda: footprint.look(remote.pid, _status_of(remote.port)),
                ]
                await self._soak(embedded, remote.port)

    async def _soak(self, embedded: WatchedSupervisor, port: int) -> None:
        await self._peak(embedded, port)
        await self._load(embedded, port, self._seconds * WARM_UP_SHARE, is_counted=False)
        before = await self._rest()
        self._samples = [[] for _ in self._looks]
        await self._load(embedded, port, self._seconds * (1 - WARM_UP_SHARE), is_counted=True)
        after = await self._rest()
        self.problems += self.history.verdict()
        limits = Limits()
        for name, first, last, samples in zip(_SERVERS, before, after, self._samples):
            found = [*footprint.growth(samples, limits), *footprint.leftovers(first, last, limits)]
            self.problems += [f"{name}: {each}" for each in found]

    async def _peak(self, embedded: WatchedSupervisor, port: int) -> None:
        """Ask more at once than will be asked later, so that no table grows by chance later."""
        door = Door(embedded, self._chance)
        callers = [Http(port, self.history, self._chance) for _ in range(2 * HTTP_CLIENTS)]
        for _ in range(PEAKS):
            await asyncio.gather(
                door.peak(2 * EMBEDDED_CLIENTS), *[each.peak() for each in callers]
            )
        await asyncio.gather(*[each.close() for each in callers])

    async def _load(
        self, embedded: WatchedSupervisor, port: int, seconds: float, *, is_counted: bool
    ) -> None:
        """Keep every client busy for this time; each ends what it has begun."""
        end_s = time.monotonic() + seconds
        door = Door(embedded, self._chance)
        callers = [Http(port, self.history, self._chance) for _ in range(HTTP_CLIENTS)]
        acts = [door.act] * EMBEDDED_CLIENTS + [each.act for each in callers]
        watch = asyncio.ensure_future(self._watch(is_counted=is_counted))
        await asyncio.gather(*[_repeat(act, end_s) for act in acts])
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await asyncio.gather(*[each.close() for each in callers])

    async def _watch(self, *, is_counted: bool) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            found = await asyncio.gather(*[asyncio.to_thread(look) for look in self._looks[1:]])
            found = [self._looks[0](), *found]
            if is_counted:
                for samples, each in zip(self._samples, found):
                    samples.append(each)
            self._tell(found)

    async def _rest(self) -> list[Footprint]:
        """Wait until nothing is in flight, and look."""
        deadline_s = time.monotonic() + REST_S
        while True:
            gc.collect()
            found = [self._looks[0](), *[await asyncio.to_thread(each) for each in self._looks[1:]]]
            if time.monotonic() > deadline_s or not any(
                each.in_flight or each.held_blocks for each in found
            ):
                return found
            await asyncio.sleep(0.2)

    def _tell(self, found: Sequence[Footprint]) -> None:
        seconds = time.monotonic() - self._start_s
        problems = len(self.history.problems)
        parts = [f"{name} {each.line()}" for name, each in zip(_SERVERS, found)]
        print(
            f"{seconds:6.0f} s  {self.history.count:8} requests  {problems} problems  "
            + "  |  ".join(parts),
            flush=True,
        )

    def verdict(self) -> str:
        """Return the run in words."""
        lines = [f"  {end:44}{count:9}" for end, count in sorted(self.history.ends.items())]
        lines.append("")
        if not self.problems:
            lines.append(f"PASS: {self.history.count} requests, each ended once; all is flat")
        else:
            lines += [f"  {each}" for each in self.problems[:40]]
            lines.append(f"FAIL: {len(self.problems)} problems in {self.history.count} requests")
        return "\n".join(lines)


_SERVERS = ("embedded", "HTTP")


async def _repeat(act: Callable[[], Awaitable[None]], end_s: float) -> None:
    while time.monotonic() < end_s:
        await act()


def _status_of(port: int) -> dict:  # type: ignore[type-arg]  # of JSON
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/actorserve/status") as reply:
        return dict(json.loads(reply.read()))


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="of the dice")
    chosen = parser.parse_args(arguments)
    logging.getLogger("actorserve").setLevel(logging.WARNING)
    print(f"soak: {chosen.minutes:g} minutes, --seed {chosen.seed}", flush=True)
    soak = Soak(chosen.minutes * 60, chosen.seed, min(LOOK_S, chosen.minutes * 6))
    asyncio.run(soak.run())
    print(soak.verdict())
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
