# SPDX-License-Identifier: Apache-2.0
"""The road to a process, at the moments at which it changes its ways."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from actorserve.runtime.outbox import COPY_ON_LOOP_BYTES, Outbox
from actorserve.runtime.payload import Packed
from actorserve.wire.actors import Deliver, Parcel
from actorserve.wire.messages import Handle

LARGE = Packed("", b"", [np.zeros(COPY_ON_LOOP_BYTES + 1, np.uint8)])


class Fake:
    """A channel, the memory and whatever else an outbox needs."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.exchange = self
        self.executor = executor
        self.loop = asyncio.get_running_loop()
        self.max_frame_bytes = 1 << 20
        self.sent = 0

    def hand_on(self, _array: Any) -> None:
        return None

    def allocate(self, nbytes: int) -> Any:
        return Slab(nbytes)

    def send_with_handles(self, *_args: Any, **_kwargs: Any) -> None:
        self.sent += 1


class Slab:
    """Memory of the fake."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = memoryview(bytearray(nbytes))
        self.handle = Handle(1, 0, 0, 0, nbytes)

    def release(self) -> None:
        pass


def test_a_letter_that_comes_when_the_line_has_just_been_worked_off_is_sent():
    """After the last step of the task that sends, and before anybody knows that it has ended."""

    async def main(executor: ThreadPoolExecutor) -> None:
        fake = Fake(executor)
        outbox = Outbox(fake, fake)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()

        def build(parcel: Parcel) -> Deliver:
            if not fake.sent:
                loop.call_soon(send)  # runs right after this step
            return Deliver(1, 0, parcel)

        def send() -> None:
            outbox.send(LARGE, build, lambda error: None)

        send()
        for _ in range(2000):
            if fake.sent == 2:
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"{outbox.stats().waiting} of the letters wait for ever")

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(main(executor))
