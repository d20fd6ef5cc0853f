# SPDX-License-Identifier: Apache-2.0
"""A tensor on an (emulated) device that one model hands to another, beside one on the host.

    handoff ─ receiver: by reference               64 MiB
    handoff ─ receiver: through the host's arena   64 MiB, copied once
    a reference's own cost: stub, supervisor, stub and its release all the way back, in one process

The device is host memory: these figures say what the way of a reference costs, and nothing of a
GPU. The receiver tells the size of what came, so that a tensor that is lost is an error.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.device.buffer import DeviceBuffer
from actorserve.device.emulated import EmulatedDriver
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.runtime.device_desk import DeviceDesk
from actorserve.wire.device import DeviceReleased, SlabOffer, SlabRetired
from actorserve.wire.messages import WireTensor
from benchmarks.sampling import OURS, CannotRun, Contender, Effort, Figures, Findings, take_turns

MODELS = Path(__file__).with_name("device_models")
HOST_ARENA = "host arena"
HANDOFF = "device-64m"
COST = "device-ref-cpu"
NBYTES = 64 << 20

Measure = Callable[[Supervisor, Effort], Coroutine[Any, Any, Figures]]


def handoff(effort: Effort) -> Findings:
    """Measure handing 64 MiB over by reference and by a copy, and what a reference costs."""
    findings = Findings()
    contenders = [
        Contender(OURS, (HANDOFF, COST), partial(_serve, _by_reference, effort)),
        Contender(HOST_ARENA, (HANDOFF,), partial(_serve, _by_copy, effort)),
    ]
    take_turns(findings, contenders, effort)
    return findings


def _serve(measure: Measure, effort: Effort) -> Figures:
    """Serve the models on a new loop, and measure."""

    async def serve() -> Figures:
        settings = Settings(device_driver="emulated", device_slab_bytes=NBYTES)
        async with Supervisor(MODELS, settings) as server:
            if server.failures:
                raise CannotRun(f"a model did not load: {server.failures}")
            return await measure(server, effort)

    return asyncio.run(serve())


async def _by_reference(server: Supervisor, effort: Effort) -> Figures:
    count = effort.pick(300, 2000)
    await _hand_over(server, count // 10, NBYTES, on_device=True)
    seconds_s = await _hand_over(server, count, NBYTES, on_device=True)
    return {HANDOFF: seconds_s / count * 1e6, COST: _hop_us(effort)}


async def _by_copy(server: Supervisor, effort: Effort) -> Figures:
    count = effort.pick(5, 30)
    await _hand_over(server, 2, NBYTES, on_device=False)
    seconds_s = await _hand_over(server, count, NBYTES, on_device=False)
    return {HANDOFF: seconds_s / count * 1e6}


async def _hand_over(server: Supervisor, count: int, nbytes: int, *, on_device: bool) -> float:
    """Hand a tensor over so often; return the seconds that took, without its making."""
    inputs = {
        "N": np.array([count], np.int32),
        "NBYTES": np.array([nbytes], np.int32),
        "ON_DEVICE": np.array([on_device]),
    }
    outputs = await server.infer("handoff", inputs)
    return float(outputs["SECONDS"][0])


# --- what a reference costs ----------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True):
    """What carries a tensor from one process to the next."""

    tensors: list[WireTensor]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode
_decode_released = msgspec.msgpack.Decoder(DeviceReleased).decode


class _Stub:
    """A stub's pool, and its channel as the supervisor's desk sees it."""

    def __init__(self, desk: DeviceDesk, epoch: int) -> None:
        self.arena = epoch
        self.device: tuple[str, str] | None = ("emulated", "emulated-0")
        self.told: list[bytes] = []
        self.pool = SlabPool(
            EmulatedDriver(devices=1),
            epoch=epoch,
            settings=DeviceSettings(slab_bytes=1 << 20),
            on_slab=lambda offer, fd: desk.offered(self, offer, fd),
        )
        desk.join(self)

    def offer_slab(self, offer: SlabOffer, fd: int) -> None:
        """Map it."""
        accepted = self.pool.accept(offer, os.dup(fd))
        if accepted.error:
            raise CannotRun(accepted.error)

    def tell_of_device(self, message: DeviceReleased | SlabRetired) -> None:
        """Keep it as it would travel."""
        self.told.append(_encode(message))

    def receive_segments(self) -> None:
        """Nothing waits here."""


def _hop_us(effort: Effort) -> float:
    """Return the CPU time of all that is done for one reference, from stub to stub and back."""
    loop = asyncio.new_event_loop()
    desk = DeviceDesk(loop, quarantine_s=0.1)
    stubs = [_Stub(desk, 1), _Stub(desk, 2)]
    try:
        buffer = stubs[0].pool.allocate(4096)
        assert buffer is not None
        count = effort.pick(1000, 5000)
        for _ in range(count // 5):
            _hop(desk, *stubs, buffer)
        begin_s = time.process_time()
        for _ in range(count):
            _hop(desk, *stubs, buffer)
        taken_s = time.process_time() - begin_s
        buffer.release()
    finally:
        desk.close()
        for stub in stubs:
            stub.pool.close()
            stub.pool.driver.shutdown()
        loop.close()
    return taken_s / count * 1e6


def _hop(desk: DeviceDesk, tenant: _Stub, borrower: _Stub, buffer: DeviceBuffer) -> None:
    sent = _encode(_Message([WireTensor("X", 11, (1024,), b"", tenant.pool.lend(buffer))]))
    (tensor,) = _decode(sent).tensors
    assert tensor.device is not None
    ref = desk.receive(tenant, tensor.device).take()
    if not desk.can_take(borrower, ref):
        raise CannotRun("the borrower cannot use the device")
    desk.lend(borrower, [ref])
    (tensor,) = _decode(_encode(_Message([tensor]))).tensors
    assert tensor.device is not None
    borrower.pool.borrow(tensor.device).release()
    released = borrower.pool.take_releases()
    assert released is not None
    desk.released(borrower, _decode_released(_encode(released)))
    desk.drop(ref)
    desk.settle()
    (told,) = tenant.told
    tenant.told.clear()
    if tenant.pool.returned(_decode_released(told)):
        raise CannotRun("a release fitted nothing")
