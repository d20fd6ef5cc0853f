# SPDX-License-Identifier: Apache-2.0
"""Stopping a Spawner: in every state, twice, cancelled, and without its loop."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from actorserve.errors import (
    Unavailable,
)
from actorserve.process.spawn import Spawner, SpawnSpec


def test_stop_kills_all_and_tells_all(kit, run):
    """Row 64: stop ends children, groups and zygote, reports each exit, and may be called twice."""

    async def main() -> None:
        bench = kit.Bench()
        await bench.spawner.start()
        zygote = bench.zygote
        crowd = [await bench.spawn(), await bench.spawn("hold_gil")]
        with_group = await bench.spawn("leave_grandchild")
        kept, escaped = (int(pid) for pid in (await with_group.line("grandchildren ")).split())
        os.kill(crowd[0].child.pid, signal.SIGSTOP)
        await asyncio.gather(bench.spawner.stop(), bench.spawner.stop())
        assert kit.is_gone(zygote)
        kit.wait_gone(kept)
        os.kill(escaped, signal.SIGKILL)
        for watched in (*crowd, with_group):
            assert [exit_.signal for exit_ in watched.exits] == [signal.SIGKILL]
        await bench.spawner.stop()
        with pytest.raises(Unavailable, match="stopped"):
            await bench.spawn()
        with pytest.raises(Unavailable, match="stopped"):
            await bench.spawner.start()

    run(main)


def test_stop_before_start_is_harmless(run_plain):
    """Row 64: a Spawner that was never started can be stopped, and not be used."""

    async def main() -> None:
        spawner = Spawner(log=lambda _level, _text: None)
        with pytest.raises(Unavailable, match="not started"):
            await spawner.spawn(
                SpawnSpec("m:f", "n"), lambda _exit: None, lambda _stream, _line: None
            )
        await spawner.stop()
        await spawner.stop()

    run_plain(main)


def test_stop_during_the_start_ends_both(kit, run_plain):
    """Row 46: stopping a Spawner that is coming up leaves nothing, and fails whoever waits."""

    async def main() -> None:
        bench = kit.Bench()
        start = asyncio.ensure_future(bench.spawner.start())
        await asyncio.sleep(0)
        spawn = asyncio.ensure_future(bench.spawn())
        await asyncio.sleep(0.01)
        await bench.spawner.stop()
        for task in (start, spawn):
            with pytest.raises(Unavailable, match="stopped"):
                await task

    run_plain(main)


def test_stop_with_a_stopped_zygote_is_bounded(kit, run_plain):
    """Row 40b: a zygote in state T does not keep stop waiting for long."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            zygote = bench.zygote
            os.kill(zygote, signal.SIGSTOP)
            start_s = time.monotonic()
            await bench.spawner.stop()
            assert time.monotonic() - start_s < 5
            assert kit.is_gone(zygote)
            assert len(watched.exits) == 1

    run_plain(main)


def test_cancelled_stop_still_stops(kit, run_plain):
    """Row 64: a stop that is cancelled, as at the end of asyncio.run, goes on to its end."""
    pids: list[int] = []

    async def main() -> None:
        bench = kit.Bench()
        await bench.spawner.start()
        pids.extend([bench.zygote, (await bench.spawn()).child.pid])
        stop = asyncio.ensure_future(bench.spawner.stop())
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_coro().__qualname__.startswith("Spawner"):
                task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stop

    run_plain(main)
    kit.wait_gone(*pids)


def test_loop_that_closed_without_stop(kit, run_plain):
    """Row 64: after its loop is gone, stop, or the collector, still ends everything."""
    benches = []
    pids: list[int] = []

    async def main() -> None:
        bench = kit.Bench()
        await bench.spawner.start()
        pids.extend([bench.zygote, (await bench.spawn()).child.pid])
        benches.append(bench)

    run_plain(main)
    bench = benches.pop()
    other = asyncio.new_event_loop()
    other.run_until_complete(bench.spawner.stop())
    other.close()
    kit.wait_gone(*pids)
