# SPDX-License-Identifier: Apache-2.0
"""A supervisor that tests kill: `python supervisor_program.py MODE`, run by test_orphans.py.

Prints one line of JSON when it is where the mode says, and then waits for its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(1, HERE)

from actorserve.process.exit import Exit  # noqa: E402
from actorserve.process.spawn import Spawner, SpawnSpec  # noqa: E402


def tell(**facts: object) -> None:
    """Print what the test waits for."""
    print(json.dumps(facts), flush=True)


async def main(mode: str) -> None:
    """Get to the place that the mode names, tell it, and stay there."""
    preload = ("slow_module",) if mode == "starting" else ()
    spawner = Spawner(preload=preload, log=lambda _level, text: print(text, file=sys.stderr))
    if mode == "subreaper":
        assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER
    start = asyncio.ensure_future(spawner.start())
    if mode == "starting":
        await asyncio.sleep(0)
        tell(zygote=spawner._keeper.link.pid, children=[])
        await start
    await start
    zygote = spawner.stats().zygote_pid
    if mode == "host fork":
        fork = os.fork()
        if fork == 0:
            signal.pause()
        tell(fork=fork)
    ready = asyncio.Event()
    lines: list[str] = []

    def on_output(_stream: str, line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            ready.set()

    def on_exit(exit_: Exit) -> None:
        tell(exit=exit_.describe())

    entries = {
        "importing": ["slow_module:run", "slow_module:run"],
        "grandchildren": ["child_entries:leave_grandchild", "child_entries:echo"],
    }.get(mode, ["child_entries:echo", "child_entries:hold_gil"])
    children = [
        await spawner.spawn(SpawnSpec(entry, "probe_0_0", sys_path=[HERE]), on_exit, on_output)
        for entry in entries
    ]
    if mode == "born":
        tell(zygote=zygote, children=[child.pid for child in children])
    if mode not in ("importing", "born"):
        await ready.wait()
    if mode in ("late host fork", "raw host fork"):
        # A fork by C code runs none of Python's hooks: it keeps every descriptor open.
        fork = os.fork() if mode == "late host fork" else ctypes.PyDLL(None).fork()
        if fork == 0:
            signal.pause()
        tell(fork=fork)
    if mode == "stopped zygote":
        os.kill(zygote, signal.SIGSTOP)
    if mode == "dead zygote":
        spawner._keeper._is_ending = True  # no successor
        os.kill(zygote, signal.SIGKILL)
    if mode == "subreaper":
        os.kill(zygote, signal.SIGKILL)
        while spawner.stats().zygote_pid in (None, zygote):
            await asyncio.sleep(0.01)
        for child in children:
            child.signal(signal.SIGSEGV)
        while spawner.stats().children:
            await asyncio.sleep(0.01)
        zygote = spawner.stats().zygote_pid
    if mode == "stopped child":
        children[0].signal(signal.SIGSTOP)
    tell(zygote=zygote, children=[child.pid for child in children], lines=lines)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
