# SPDX-License-Identifier: Apache-2.0
"""Inside somebody else's application: its signals, children, threads, forks and loops."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings

import pytest

from actorserve.errors import Unavailable
from actorserve.process.boot import PeerGone


def test_hosts_own_children_and_handlers_are_left_alone(kit, run_plain):
    """Row 62: the host's SIGCHLD handler, Popen and asyncio subprocesses work as ever."""
    calls: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda signo, _frame: calls.append(signo))

    async def main() -> None:
        host_child = subprocess.Popen(
            [sys.executable, "-c", "input(); raise SystemExit(5)"], stdin=subprocess.PIPE
        )
        async with kit.Bench() as bench:
            for _ in range(3):
                watched = await bench.spawn()
                watched.child.signal(signal.SIGKILL)
                await watched.end()
            os.kill(bench.zygote, signal.SIGKILL)
            await (await bench.spawn()).ask()
            host_child.communicate(b"\n")
            assert host_child.returncode == 5
        assert calls
        assert signal.getsignal(signal.SIGCHLD) is not before

    try:
        run_plain(main)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_host_that_ignores_sigchld(kit, run_plain):
    """Row 62: a host whose children are reaped by the kernel still gets exits with statuses."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn("leave", env={"FLAVOUR": "3"})
            assert (await watched.end()).code == 3
            zygote = bench.zygote
            os.kill(zygote, signal.SIGKILL)
            await bench.next_zygote(zygote)

    try:
        run_plain(main)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_loop_in_a_thread(kit, run_plain):
    """Row 62: nothing needs the main thread."""
    failures: list[BaseException] = []

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            assert await watched.ask() == 7
            watched.child.signal(signal.SIGKILL)
            assert (await watched.end()).signal == signal.SIGKILL

    def body() -> None:
        try:
            run_plain(main)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert failures == []


def test_thread_that_started_it_may_end(kit, run_plain):
    """Nothing hangs on the thread in which a child was made."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()

            def in_thread() -> None:
                assert watched.child.signal(0)
                assert watched.child.sample().state in "RSD"

            await asyncio.get_running_loop().run_in_executor(None, in_thread)
            await asyncio.get_running_loop().shutdown_default_executor()
            assert await watched.ask() == 7

    run_plain(main)


def test_fork_of_the_host_owns_nothing(kit, run_plain):
    """Row 63: in a fork, everything is inert; its collector and its end change nothing here."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            assert await watched.ask() == 7

            def in_fork() -> None:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    spawner = bench.spawner
                    with pytest.raises(Unavailable, match="belongs to process"):
                        spawner.spawn(None, None, None).send(None)
                    with pytest.raises(StopIteration):
                        spawner.stop().send(None)
                    assert not watched.child.signal(signal.SIGKILL)
                    watched.child.kill_group()
                    with pytest.raises(PeerGone):
                        watched.child.boot.recv_nowait()
                    assert not any("pidfd" in target for target in kit.open_fds())
                    spawner.__del__()
                    gc.collect()

            fork = kit.forked(in_fork)
            assert os.waitpid(fork, 0)[1] == 0
            assert await watched.ask() == 7
            assert await (await bench.spawn()).ask() == 7
            assert watched.exits == []

    run_plain(main)


def test_collected_without_stop(kit):
    """Row 64: a Spawner that nobody stopped ends its processes when it is collected."""
    pids: list[int] = []

    async def main() -> None:
        bench = kit.Bench()
        await bench.spawner.start()
        pids.extend([bench.zygote, (await bench.spawn()).child.pid])

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    loop.close()
    del loop
    gc.collect()
    kit.wait_gone(*pids)


def test_two_hosts_loops_do_not_meet(kit):
    """Row 50: two threads with a loop and a Spawner each."""
    failures: list[BaseException] = []

    async def main() -> None:
        async with kit.Bench() as bench:
            crowd = await asyncio.gather(*(bench.spawn() for _ in range(4)))
            assert [await watched.ask(n) for n, watched in enumerate(crowd)] == [0, 1, 2, 3]

    def body() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
