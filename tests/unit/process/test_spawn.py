# SPDX-License-Identifier: Apache-2.0
"""The Spawner from its owner's side: spawning, ends, limits, stopping."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import time
from pathlib import Path

import pytest

from actorserve.errors import (
    BootError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from actorserve.process.boot import PeerGone
from actorserve.process.spawn import Spawner, SpawnSpec


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
            counts.append((len(kit.open_fds()), len(_fds_of(bench.zygote))))
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
        await kit.until(lambda: not _children_beyond(bench, 1))
        assert watched.exits == watched.lines == []
        assert bench.spawner.stats().orders == before.orders == 0

    warm(main)


def _children_beyond(bench, count: int) -> bool:
    import psutil

    living = [
        child
        for child in psutil.Process(bench.zygote).children()
        if child.status() != psutil.STATUS_ZOMBIE
    ]
    return len(living) > count


def test_no_descriptors_left_is_an_error_and_heals(kit, warm):
    """Row 56: at the limit of open files a spawn says so; with room again the next one works."""

    async def main(bench) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for room in range(8):
            with _only_free_descriptors(room):
                if room < 7:  # six for the order, one for the pidfd
                    with pytest.raises(ResourceExhausted, match="open files"):
                        await bench.spawn()
                else:
                    assert await (await bench.spawn()).ask() == 7
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
        await kit.until(lambda: not _children_beyond(bench, 1))
        assert await (await bench.spawn()).ask() == 7

    warm(main)


def _fds_of(pid: int) -> list[int]:
    return [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()]


class _only_free_descriptors:
    """Leave this process exactly so many unused descriptors."""

    def __init__(self, room: int) -> None:
        self._room = room

    def __enter__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(_fds_of(os.getpid()))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, self._limits[1]))
        self._taken: list[int] = []
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                self._taken.append(os.dup(0))
        for fd in self._taken[: self._room]:
            os.close(fd)
        del self._taken[: self._room]

    def __exit__(self, *_: object) -> None:
        for fd in self._taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)


def test_zygote_without_descriptors_is_an_error_and_heals(kit, warm):
    """Row 56: a zygote at its limit fails the spawn, not itself."""

    async def main(bench) -> None:
        zygote = bench.zygote
        used = _fds_of(zygote)
        limits = resource.prlimit(zygote, resource.RLIMIT_NOFILE)
        # 3 descriptors come with the order, 1 is the pidfd
        for room in range(4):
            limit = next(n for n in range(10_000) if n - sum(fd < n for fd in used) == room)
            resource.prlimit(zygote, resource.RLIMIT_NOFILE, (limit, limits[1]))
            with pytest.raises(ResourceExhausted, match="zygote has no room"):
                await bench.spawn()
        resource.prlimit(zygote, resource.RLIMIT_NOFILE, limits)
        assert await (await bench.spawn()).ask() == 7
        assert bench.zygote == zygote
        assert len(_fds_of(zygote)) == len(used) + 1
        assert not _children_beyond(bench, 1)

    warm(main)


def test_zygote_that_dies_at_the_limit_comes_back_with_room(kit, run_plain):
    """Row 56: without descriptors for the next zygote, it is tried again until there are some."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            with _only_free_descriptors(0):
                os.kill(bench.zygote, signal.SIGKILL)
                await kit.until(lambda: any("trying again" in text for _, text in bench.log))
                assert await watched.ask() == 7
            await bench.next_zygote(0)
            assert await (await bench.spawn()).ask() == 7

    run_plain(main)


def test_log_that_fails_stops_nothing(kit, run_plain):
    """Row 57: nobody needs a log to serve."""

    async def main() -> None:
        bench = kit.Bench()

        def log(_level: int, _text: str) -> None:
            raise OSError("the disk is full")

        bench.spawner = Spawner(log=log)
        async with bench:
            zygote = bench.zygote
            os.kill(zygote, signal.SIGKILL)
            await bench.next_zygote(zygote)
            assert await (await bench.spawn()).ask() == 7

    run_plain(main)


def test_host_without_a_folder(kit, warm, tmp_path):
    """A host whose working directory was removed starts children in the root folder."""

    async def main(bench) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        before = Path.cwd()
        os.chdir(gone)
        gone.rmdir()
        try:
            watched = await bench.spawn("describe")
        finally:
            os.chdir(before)
        assert '"cwd": "/"' in await watched.line("facts ")

    warm(main)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
def test_fork_that_fails_is_unavailable_and_heals(kit, run_plain, monkeypatch, tmp_path, code):
    """Row 58: no process to be had is Unavailable; the next try may succeed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_fork.py").write_text(
        "import os\n"
        "real = os.fork\n"
        "def fork():\n"
        "    os.fork = real\n"
        f"    raise OSError({code}, os.strerror({code}))\n"
        "os.fork = fork\n"
    )

    async def main() -> None:
        async with kit.Bench(("failing_fork",)) as bench:
            with pytest.raises(Unavailable, match=os.strerror(code)):
                await bench.spawn()
            assert await (await bench.spawn()).ask() == 7
            assert bench.spawner.stats().failed == 1

    run_plain(main)


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
