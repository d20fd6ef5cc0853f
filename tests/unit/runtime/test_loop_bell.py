# SPDX-License-Identifier: Apache-2.0
"""A loop is woken from other threads, which keep the interpreter lock meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from actorserve.runtime.loop_bell import LoopBell


def test_rings_of_other_threads_are_heard():
    """Each ring is followed by a call, in the loop's thread; several may share one."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        where: set[int] = set()

        def on_ring() -> None:
            where.add(threading.get_ident())
            heard.set()

        bell = LoopBell(loop, on_ring)
        for _ in range(50):
            heard.clear()
            threads = [threading.Thread(target=bell.ring) for _ in range(3)]
            for thread in threads:
                thread.start()
            await asyncio.wait_for(heard.wait(), 20)
            for thread in threads:
                thread.join()
        bell.close()
        assert where == {threading.get_ident()}

    asyncio.run(main())


def test_a_closed_bell_is_silent_and_its_descriptor_lives_as_long_as_it():
    """Whoever rings just then writes to nobody else's descriptor of that number."""

    async def main() -> None:
        heard: list[int] = []
        bell = LoopBell(asyncio.get_running_loop(), lambda: heard.append(1))
        number = bell._bell.fileno()
        bell.close()
        bell.close()
        bell.ring()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not heard
        os.fstat(number)
        del bell
        with pytest.raises(OSError):
            os.fstat(number)

    asyncio.run(main())
