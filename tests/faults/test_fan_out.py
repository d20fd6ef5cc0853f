# SPDX-License-Identifier: Apache-2.0
"""Many concurrent streams of one request, again and again: complete, in order, nothing kept.

A round is one request, whose model opens N streams of another at once, reads most of them to
their ends and lets the others go half-way. `-m chaos` runs the long versions: 1000 rounds of
N = 8, 100 of 64 and 10 of 512.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from actorserve.actors.call_desk import CallDesk
from actorserve.actors.response_factory import ResponseFactory
from tests.faults.harness import Harness
from tests.server.calling_models import write

LENGTH = 6
CLIENTS = 8
MIB = 1 << 20
GROWTH_BYTES = 4 * MIB
"""What a process may grow by after the warm-up, in private memory: a leak of 1 KB for each of the
long run's streams would be five times that."""

LEAF = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        for number in range(int(read(request)[0])):
            if sender.is_cancelled():
                break
            sender.send(answer(np.full(2000 if number % 3 == 2 else 1, number)))
        sender.send(flags=FINAL)
"""
"""Numbers, of which every third travels by handle."""

FAN = """
def initialize(self, args):
    self.chance = random.Random(7)

async def execute(self, requests):
    return await asyncio.gather(*[self.fan_out(request) for request in requests])

async def fan_out(self, request):
    streams, length = (int(each) for each in read(request))
    opened = list(await asyncio.gather(
        *[OPEN for _ in range(streams)]
    ))
    wrong = dropped = 0
    while opened:
        iterator = opened.pop(self.chance.randrange(len(opened)))
        most = length // 2 if self.chance.random() < 0.25 else length
        numbers = take(iterator, most)
        wrong += numbers != list(range(most))
        if most == length:
            rest = [each for each in iterator if each.output_tensors() or each.has_error()]
            wrong += bool(rest)
        else:
            dropped += 1
        del iterator
    return answer([wrong, dropped])
# module level
import random

def take(iterator, most):
    numbers = []
    while len(numbers) < most:
        response = next(iterator, None)
        if response is None or response.has_error() or not response.output_tensors():
            return None
        array = response.output_tensors()[0].as_numpy()
        assert array[0] == array[-1]
        numbers.append(int(array[0]))
    return numbers
"""

OPENINGS = {
    "async_exec": 'call("leaf", [length]).async_exec(decoupled=True)',
    "to_thread": 'asyncio.to_thread(call("leaf", [length]).exec, decoupled=True)',
}
DECOUPLED_FAN = FAN.replace(
    "    return await asyncio.gather(*[self.fan_out(request) for request in requests])",
    "    for request in requests:\n"
    "        asyncio.ensure_future(self.answer(request))\n"
    "\n"
    "async def answer(self, request):\n"
    "    request.get_response_sender().send(await self.fan_out(request), flags=FINAL)",
)
LONG = [pytest.mark.chaos, pytest.mark.slow]
ROUNDS = {8: 1000, 64: 100, 512: 10}


class Numbers:
    """How often each number was used; of one size, so that it does not look like a leak."""

    def __init__(self) -> None:
        self._used = bytearray(1 << 20)

    def note(self, number: int) -> None:
        """Count one use. Numbers are given one after the other: their last bits tell them apart."""
        self._used[number & (1 << 20) - 1] += 1

    @property
    def most(self) -> int:
        """How often the number that was used most was used."""
        return max(self._used)


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> tuple[Numbers, Numbers]:
    """Note the id of each request that goes to a stub, and the number of each call."""
    ids, calls = Numbers(), Numbers()
    dispatch, infer = ResponseFactory.dispatch, CallDesk.infer

    def noting_dispatch(self, place, cancel_slot):
        wire = dispatch(self, place, cancel_slot)
        if wire is not None:
            ids.note(wire.id)
        return wire

    def noting_infer(self, message):
        calls.note(message.call)
        infer(self, message)

    monkeypatch.setattr(ResponseFactory, "dispatch", noting_dispatch)
    monkeypatch.setattr(CallDesk, "infer", noting_infer)
    return ids, calls


class Footprint:
    """What the supervisor and the stubs use: private memory, mapped segments, descriptors."""

    def __init__(self, harness: Harness) -> None:
        pids = {"supervisor": psutil.Process().pid}
        pids |= {name: harness.instance(name).pid for name in ("fan", "leaf")}
        self.private = {name: _private_bytes(pid) for name, pid in pids.items()}
        self.mapped = {name: _mapped_bytes(pid) for name, pid in pids.items()}
        self.fds = {name: psutil.Process(pid).num_fds() for name, pid in pids.items()}
        self.threads = {name: psutil.Process(pid).num_threads() for name, pid in pids.items()}

    def check(self, before: Footprint) -> None:
        """Fail where something has grown since."""
        print(f"private bytes {before.private} → {self.private}, mapped {self.mapped}")
        for name, used in self.private.items():
            assert used - before.private[name] < GROWTH_BYTES, name
        assert self.mapped == before.mapped
        assert self.fds == before.fds
        assert self.threads == before.threads


def _private_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)


def _mapped_bytes(pid: int) -> int:
    """Return how much of segments a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "actorserve" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


async def rounds_of(harness: Harness, streams: int, count: int) -> Counter[str]:
    """Run rounds from several clients; returns how the streams ended."""
    ends: Counter[str] = Counter()
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            inputs = {"INPUT0": np.array([streams, LENGTH], np.float32)}
            stream = harness.server.stream("fan", inputs, timeout_s=100)
            ((wrong, dropped),) = [each["OUTPUT0"] async for each in stream]
            ends["wrong"] += int(wrong)
            ends["dropped"] += int(dropped)
            ends["all"] += streams

    await asyncio.gather(*[client() for _ in range(min(CLIENTS, count))])
    return ends


@pytest.mark.parametrize("form", [*OPENINGS, "decoupled"])
@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=LONG)], ids=["short", "long"])
def test_streams_of_a_fan_out_are_complete_and_leave_nothing(
    serve, repository, numbers, form, share
):
    """8, 64 and 512 streams at once; whatever was dropped, later rounds and memory see nothing."""
    is_decoupled = form == "decoupled"
    fan = DECOUPLED_FAN if is_decoupled else FAN
    opening = OPENINGS["async_exec" if is_decoupled else form]
    write(repository, "fan", fan.replace("OPEN", opening), decoupled=is_decoupled)
    write(repository, "leaf", LEAF, decoupled=True)
    kinds = list(ROUNDS)
    random.Random(form).shuffle(kinds)

    async def test(harness: Harness) -> None:
        for streams in kinds:  # the most at a time that there will be, and so the most memory
            await rounds_of(harness, streams, CLIENTS if streams < 512 else 2)
        await settled(harness)
        before = Footprint(harness)
        for streams in kinds:
            count = max(1, round(ROUNDS[streams] * share))
            ends = await rounds_of(harness, streams, count)
            print(f"N = {streams}: {count} rounds, {dict(ends)}")
            assert ends["all"] == streams * count
            assert ends["wrong"] == 0
            assert ends["dropped"] > 0
        await settled(harness)
        Footprint(harness).check(before)
        assert harness.instance("fan").restarts == harness.instance("leaf").restarts == 0
        assert [each.most for each in numbers] == [1, 1]

    serve(test)


async def settled(harness: Harness) -> None:
    """Wait until nothing is in flight and no block is held."""
    await harness.until(lambda: harness.scheduler("leaf").in_flight == 0, 20)
    await harness.until(lambda: harness.server.stats().exchange.held_blocks == 0, 20)
