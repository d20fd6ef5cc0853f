# SPDX-License-Identifier: Apache-2.0
"""The zygote dies, stops or cannot start, at every moment: its children serve on."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from psutil import Process, pid_exists

from actorserve.errors import Unavailable
from actorserve.process import pidfd
from actorserve.process.spawn import Spawner

FAULT = "ACTORSERVE_FAULT"


def test_killed_zygote_is_replaced_while_children_serve(kit, run):
    """Row 40b: children answer on, the next zygote comes by itself, and nothing is unusual then."""

    async def main() -> None:
        async with kit.Bench() as bench:
            first = await bench.spawn()
            zygote = bench.zygote
            os.kill(zygote, signal.SIGKILL)
            for number in range(20):
                assert await first.ask(number) == number
            second = await bench.spawn()  # waits for the next zygote
            assert bench.zygote != zygote
            assert await second.ask() == await first.ask() == 7
            assert any("SIGKILL" in text and "serve on" in text for _, text in bench.log)
            first.child.signal(signal.SIGTERM)  # means nothing to it
            second.child.signal(signal.SIGSEGV)
            assert (await second.end()).signal == signal.SIGSEGV
            assert bench.spawner.stats().zygotes_started == 2
            assert first.exits == []

    run(main)


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_child_of_a_dead_zygote_is_noticed(kit, run_plain, monkeypatch, kernel):
    """Row 40b: its death is seen at once; the status is the kernel's word, or unknown."""
    if kernel == "old":
        monkeypatch.setattr(pidfd, "_GET_INFO", 0)

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn("leave_grandchild")
            kept, escaped = (int(pid) for pid in (await watched.line("grandchildren ")).split())
            zygote = bench.zygote
            os.kill(zygote, signal.SIGKILL)
            await bench.next_zygote(zygote)
            start_s = time.perf_counter()
            watched.child.signal(signal.SIGKILL)
            exit_ = await watched.end()
            assert watched.exited_at_s - start_s < 1
            assert exit_.status in (signal.SIGKILL, None)
            if kernel == "old":
                assert exit_.describe() == "exit status unknown"
                assert bench.spawner.stats().unknown_statuses == 1
            kit.wait_gone(kept)
            os.kill(escaped, signal.SIGKILL)

    run_plain(main)


def test_zygote_and_child_killed_at_once(kit, run_plain):
    """Row 40b: the exit arrives, and a spawn right behind it gets a child of the next zygote."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            os.kill(bench.zygote, signal.SIGKILL)
            watched.child.signal(signal.SIGKILL)
            await watched.end()
            assert await (await bench.spawn()).ask() == 7

    run_plain(main)


def test_stopped_zygote_hides_no_death_and_is_replaced(kit, run_plain):
    """Row 40b: SIGSTOP delays no exit report, and a new zygote serves the next spawn."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched, other = await bench.spawn(), await bench.spawn()
            zygote = bench.zygote
            os.kill(zygote, signal.SIGSTOP)
            start_s = time.perf_counter()
            watched.child.signal(signal.SIGKILL)
            await watched.end()
            assert watched.exited_at_s - start_s < 1
            assert await (await bench.spawn()).ask() == 7
            assert bench.zygote != zygote
            assert await other.ask() == 7
            assert any("is stopped; replacing it" in text for _, text in bench.log)

    run_plain(main)


def test_spawn_with_a_stopped_zygote_gets_another(kit, run_plain):
    """Row 40b: a spawn that meets a stopped zygote is made by its successor, large ones too."""

    async def main() -> None:
        async with kit.Bench() as bench:
            os.kill(bench.zygote, signal.SIGSTOP)
            big = {f"V{number}": "x" * 10_000 for number in range(20)}
            crowd = await asyncio.gather(*(bench.spawn(env=big) for _ in range(3)))
            for watched in crowd:
                assert await watched.ask() == 7

    run_plain(main)


@pytest.mark.parametrize("fault", ["forked:kill", "forked:stop", "reported:exit0"])
def test_zygote_dying_over_a_spawn_is_tried_again(kit, run_plain, monkeypatch, fault):
    """Row 40b: an order that a zygote took with it is made by the next, and lives once."""
    earlier = kit.started_processes()  # not all of them are ours

    async def main() -> None:
        monkeypatch.setenv(FAULT, f"zygote.{fault}")
        async with kit.Bench() as bench:
            monkeypatch.delenv(FAULT)
            zygote = bench.zygote
            # It would live on if it came to its entry, which does not look at the boot socket.
            watched = await bench.spawn("hold_gil")
            await watched.line("holding")
            await bench.next_zygote(zygote)
            kit.wait_gone(zygote)
            assert await (await bench.spawn()).ask() == 7
            probes = {watched.child.pid, bench.born[-1].child.pid}
            others = {os.getpid(), bench.zygote} | earlier
            await kit.until(lambda: _living(kit.started_processes() - others) == probes)
            assert watched.exits == []

    run_plain(main)


def _living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if pid_exists(pid) and Process(pid).status() != "zombie"}


def test_order_that_kills_two_zygotes_fails(kit, run_plain, monkeypatch):
    """A spawn is tried on two zygotes, no more; the third serves the others."""

    async def main() -> None:
        monkeypatch.setenv(FAULT, "zygote.forked:kill")
        async with kit.Bench() as bench:
            with pytest.raises(Unavailable, match="SIGKILL"):
                await bench.spawn()
            monkeypatch.delenv(FAULT)
            os.kill(await bench.next_zygote(0), signal.SIGKILL)
            assert await (await bench.spawn()).ask() == 7
            assert bench.spawner.stats().orders == 0

    run_plain(main)


def test_zygote_that_never_comes_up_fails_the_start(kit, run_plain, monkeypatch):
    """Start gives up after two zygotes, with the reason, and leaves nothing."""

    async def main() -> None:
        monkeypatch.setenv(FAULT, "zygote.imported:kill")
        bench = kit.Bench()
        with pytest.raises(Unavailable, match=r"killed by SIGKILL .* before it was up"):
            await bench.spawner.start()
        assert bench.spawner.stats().zygote_pid is None
        with pytest.raises(Unavailable, match="stopped"):
            await bench.spawner.start()

    run_plain(main)


def test_zygote_that_fails_later_comes_back_when_it_can(kit, run_plain, monkeypatch):
    """Row 58: failed restarts are repeated with growing pauses until one works."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            monkeypatch.setenv(FAULT, "zygote.imported:kill")
            os.kill(bench.zygote, signal.SIGKILL)
            await kit.until(lambda: sum("trying again" in text for _, text in bench.log) >= 2)
            monkeypatch.delenv(FAULT)
            assert await watched.ask() == 7
            await bench.next_zygote(0)
            assert await (await bench.spawn()).ask() == 7
            pauses = [text.split()[-2] for _, text in bench.log if "trying again" in text]
            assert pauses[:2] == ["0.1", "0.2"]

    run_plain(main)


def test_stopped_zygote_cannot_hold_up_the_start(kit, run_plain, monkeypatch):
    """A zygote that is stopped before it is up is replaced as well."""

    async def main() -> None:
        monkeypatch.setenv(FAULT, "zygote.imported:stop")
        bench = kit.Bench()
        start = asyncio.ensure_future(bench.spawner.start())
        await asyncio.sleep(0)
        monkeypatch.delenv(FAULT)
        await start
        assert bench.spawner.stats().zygotes_started == 2
        await bench.spawner.stop()

    run_plain(main)


def test_preload_that_fails_is_told_and_ignored(kit, run_plain, monkeypatch, tmp_path):
    """A module that cannot be imported costs a warning; what others print is logged."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "chatty.py").write_text("print('hello from the import', flush=True)\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")

    async def main() -> None:
        async with kit.Bench(("chatty", "broken", "no_such_module")) as bench:
            assert await (await bench.spawn()).ask() == 7
            texts = [text for _, text in bench.log]
            assert any(text.endswith(": hello from the import") for text in texts)
            assert any("broken: ZeroDivisionError" in text for text in texts)
            assert any("no_such_module: ModuleNotFoundError" in text for text in texts)

    run_plain(main)


def test_start_does_not_block_the_loop(kit, run_plain, monkeypatch, tmp_path):
    """While a zygote imports for long, the loop turns."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow_import.py").write_text("import select; select.select([], [], [], 0.5)\n")

    async def main() -> None:
        bench = kit.Bench(("slow_import",))
        start = asyncio.ensure_future(bench.spawner.start())
        turns = 0
        while not start.done():
            turns += 1
            await asyncio.sleep(0.01)
        assert turns > 10
        await bench.spawner.stop()

    run_plain(main)


def test_python_without_pidfd_and_memfd(kit, run_plain, monkeypatch, tmp_path):
    """Interpreters built against old headers (conda's) make the same system calls by number."""
    monkeypatch.syspath_prepend(str(tmp_path))
    missing = [(os, "pidfd_open"), (os, "memfd_create"), (signal, "pidfd_send_signal")]
    lines = [f"del {module.__name__}.{name}\n" for module, name in missing]
    (tmp_path / "old_headers.py").write_text("".join(["import os, signal\n", *lines]))
    for module, name in missing:
        monkeypatch.delattr(module, name)

    async def main() -> None:
        async with kit.Bench(("old_headers",)) as bench:
            watched = await bench.spawn(env={"BIG": "x" * 100_000})
            assert await watched.ask() == 7
            watched.child.signal(signal.SIGKILL)
            assert (await watched.end()).signal == signal.SIGKILL
            assert [text for _, text in bench.log] == []

    run_plain(main)


def test_zygote_with_one_python_thread_in_its_own_session(kit, warm):
    """The zygote leads a session, shows its name, and its children are no children of ours."""

    async def main(bench) -> None:
        zygote = bench.zygote
        watched = await bench.spawn()
        await watched.line("ready")
        assert os.getsid(zygote) == zygote
        assert Process(zygote).name() == "actor-zygote"
        assert Process(zygote).num_threads() == 1
        assert Process(watched.child.pid).ppid() == zygote
        assert Process(watched.child.pid).name() == "probe_0_0"

    warm(main)


def test_no_resource_is_taken_twice_by_two_spawners(kit, run_plain):
    """Row 50: several Spawners in one process do not know of each other."""

    async def main() -> None:
        async with kit.Bench() as one, kit.Bench() as two:
            first, second = await one.spawn(), await two.spawn()
            assert one.zygote != two.zygote
            await one.spawner.stop()
            assert len(first.exits) == 1
            assert await second.ask() == 7
            assert await (await two.spawn()).ask() == 7

    run_plain(main)


def test_spawner_says_what_it_is_told_in_plain_types():
    """Stats of a Spawner that never ran are zeros."""
    stats = Spawner(log=lambda _level, _text: None).stats()
    assert stats.zygote_pid is None
    assert stats.spawned == stats.children == stats.zygotes_started == 0
