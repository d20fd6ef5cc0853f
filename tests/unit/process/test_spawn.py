# SPDX-License-Identifier: Apache-2.0
"""The Spawner from its owner's side: spawning, talking, deaths, wrong orders."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from actorserve.errors import (
    BootError,
    InvalidArgument,
)
from actorserve.process.boot import PeerGone
from actorserve.process.spawn import SpawnSpec


def test_child_lives_talks_and_ends(kit, run):
    """Spawn, talk over the boot socket, close it, and get exit code 0, once, in any loop."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            assert watched.child.exit is None
            assert await watched.ask(3) == 3
            assert bench.spawner.stats().children == 1
            watched.child.boot.close()
            assert (await watched.end()).code == 0
            assert watched.child.exit == watched.exits[0]
            stats = bench.spawner.stats()
            assert (stats.spawned, stats.exited, stats.children, stats.orders) == (1, 1, 0, 0)
            assert stats.unknown_statuses == 0
        assert bench.log == []
        assert len(watched.exits) == 1

    run(main)


def test_death_is_noticed_with_its_signal(kit, run_plain):
    """Row 1: SIGKILL is reported with its signal, and the boot socket is closed after that."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            await watched.line("ready")
            start_s = time.perf_counter()
            os.kill(watched.child.pid, signal.SIGKILL)
            assert (await watched.end()).signal == signal.SIGKILL
            assert watched.exited_at_s - start_s < 1
            with pytest.raises(PeerGone):
                watched.child.boot.recv_nowait()

    run_plain(main)


def test_many_children_start_and_die_together(kit, warm):
    """Row 32: eight at once, killed at once: eight exits, each once."""

    async def main(bench) -> None:
        crowd = await asyncio.gather(*(bench.spawn(name=f"m_0_{n}") for n in range(8)))
        assert len({watched.child.pid for watched in crowd}) == 8
        for watched in crowd:
            watched.child.signal(signal.SIGKILL)
        for watched in crowd:
            assert (await watched.end()).signal == signal.SIGKILL
        assert [len(watched.exits) for watched in crowd] == [1] * 8

    warm(main)


def test_nothing_leaks_over_fifty_lives(kit, warm):
    """Fifty spawns and kills leave no descriptor here and none in the zygote."""

    async def main(bench) -> None:
        counts = []
        for _ in range(50):
            watched = await bench.spawn()
            watched.child.signal(signal.SIGKILL)
            await watched.end()
            counts.append((len(kit.open_fds()), len(kit.fds_of(bench.zygote))))
        assert len(set(counts[1:])) == 1

    warm(main)


def test_signals_after_the_death_are_harmless(warm):
    """Row 35: neither a signal nor a group kill nor a sample can hit a stranger later."""

    async def main(bench) -> None:
        watched = await bench.spawn()
        child = watched.child
        assert child.signal(0)
        child.signal(signal.SIGKILL)
        await watched.end()
        assert not child.signal(signal.SIGKILL)
        child.kill_group()
        assert child.sample().state == "X"
        assert child.stats().is_alive is False

    warm(main)


def test_samples_show_state_and_progress(kit, warm):
    """Row 23: sleeping, stopped and running are told apart; a stop and a continue harm nobody."""

    async def main(bench) -> None:
        watched = await bench.spawn()
        await watched.line("ready")
        child = watched.child
        await kit.until(lambda: child.sample().state == "S")
        child.signal(signal.SIGSTOP)
        await kit.until(lambda: child.sample().state == "T")
        child.signal(signal.SIGCONT)
        assert await watched.ask() == 7
        assert child.sample().cpu_s >= 0

    warm(main)


def test_group_ends_with_its_leader(kit, warm):
    """Row 37: what a child started dies with it; what left the group keeps no exit waiting."""

    async def main(bench) -> None:
        watched = await bench.spawn("leave_grandchild")
        kept, escaped = (int(pid) for pid in (await watched.line("grandchildren ")).split())
        start_s = time.perf_counter()
        watched.child.signal(signal.SIGKILL)
        await watched.end()
        assert watched.exited_at_s - start_s < 1
        kit.wait_gone(kept)
        assert not kit.is_gone(escaped)
        os.kill(escaped, signal.SIGKILL)

    warm(main)


def test_kill_group_ends_the_leader_too(kit, warm):
    """The group can be ended while its leader lives."""

    async def main(bench) -> None:
        watched = await bench.spawn("leave_grandchild")
        kept, escaped = (int(pid) for pid in (await watched.line("grandchildren ")).split())
        watched.child.kill_group()
        assert (await watched.end()).signal == signal.SIGKILL
        kit.wait_gone(kept)
        os.kill(escaped, signal.SIGKILL)

    warm(main)


def test_large_environment_reaches_the_child(warm):
    """A spawn message that no packet holds travels another way."""

    async def main(bench) -> None:
        big = {f"VARIABLE_{number}": "x" * 10_000 for number in range(100)}
        watched = await bench.spawn("describe", env={**big, "BIG": "y" * 90_000})
        await watched.end()
        assert watched.text.count("y") >= 90_000

    warm(main)


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (SpawnSpec("no_colon", "n"), InvalidArgument),
        (SpawnSpec(":f", "n"), InvalidArgument),
        (SpawnSpec("m:", "n"), InvalidArgument),
        (SpawnSpec("m:f", ""), InvalidArgument),
        (SpawnSpec("m:f", "n", env={"A=B": ""}), InvalidArgument),
        (SpawnSpec("m:f", "n", env={"A": "\0"}), InvalidArgument),
        (SpawnSpec("m:f", "\udcff"), InvalidArgument),
        (SpawnSpec("m:f", "n", env={"A": "\ud800"}), InvalidArgument),
        (SpawnSpec("m:f", "n", sys_path=["\ud800"]), InvalidArgument),
        (SpawnSpec("m:f", "n", python="python3"), BootError),
        (SpawnSpec("m:f", "n", python="/nowhere/python"), BootError),
        (SpawnSpec("m:f", "n", python="/tmp"), BootError),
    ],
)
def test_impossible_spec_is_refused_at_once(warm, spec, error):
    """What can never work is the caller's error, and costs nothing."""

    async def main(bench) -> None:
        with pytest.raises(error):
            await bench.spawner.spawn(spec, lambda _exit: None, lambda _stream, _line: None)
        assert bench.spawner.stats().orders == 0

    warm(main)


def test_failing_callbacks_harm_nobody(kit, warm):
    """An exception in on_exit or on_output is logged, and everything goes on."""

    async def main(bench) -> None:
        def on_output(_stream: str, _line: str) -> None:
            raise ValueError("of a line")

        def on_exit(_exit) -> None:
            raise ValueError("of an exit")

        spec = SpawnSpec("child_entries:fail", "probe_0_0", sys_path=[kit.HERE])
        child = await bench.spawner.spawn(spec, on_exit, on_output)
        await kit.until(lambda: child.exit is not None)
        texts = [text for level, text in bench.log if level == 2]
        assert "on_output of probe_0_0 raised ValueError: of a line" in texts
        assert texts[-1] == "on_exit of probe_0_0 raised ValueError: of an exit"
        assert await (await bench.spawn()).ask() == 7

    warm(main)


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.01, 0.1])
def test_cancelled_spawn_leaves_no_child(kit, warm, delay_s):
    """Whenever a spawn is cancelled, its child is dead soon, and nobody is called."""

    async def main(bench) -> None:
        watched = kit.Watched()
        spec = SpawnSpec("child_entries:echo", "probe_0_0", sys_path=[kit.HERE])
        before = bench.spawner.stats()
        task = asyncio.ensure_future(bench.spawner.spawn(spec, watched.on_exit, watched.on_output))
        await asyncio.sleep(delay_s)
        if task.done():
            watched.child = task.result()
            bench.born.append(watched)
            return
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await (await bench.spawn()).ask() == 7  # answered behind the cancelled one
        await kit.until(lambda: bench.spawner.stats().children == 1)
        await kit.until(lambda: not kit.has_more_children(bench.zygote, 1))
        assert watched.exits == watched.lines == []
        assert bench.spawner.stats().orders == before.orders == 0

    warm(main)
