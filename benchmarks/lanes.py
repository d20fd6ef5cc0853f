# SPDX-License-Identifier: Apache-2.0
"""The transport by itself: a parked round trip, small messages one way, arrays one way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from actorserve.shm.arena import Arena, Block
from actorserve.shm.segment import Segment
from actorserve.shm.view import Views
from actorserve.wire.codec import Decoder, encode
from actorserve.wire.messages import Handle, Message
from benchmarks import floor, peers
from benchmarks.link import Link, echo, round_trips_us
from benchmarks.partner import Partner, pinned, two_cores
from benchmarks.sampling import (
    OURS,
    CannotRun,
    Contender,
    Effort,
    Figures,
    Findings,
    reason_of,
    take_turns,
)

PAYLOAD = bytes(64)
ARRAY_BYTES = 16 << 20
ARRAYS_IN_FLIGHT = 3
ROUND_TRIP, RAW, TYPED, ARRAYS = "round-trip", "one-way-raw", "one-way-typed", "arrays"


class Note(Message, frozen=True, tag=200):
    """A message of about 64 bytes on the wire."""

    number: int
    text: str
    body: bytes


decode: Decoder[Note] = Decoder(Note, "of the benchmark")
NOTE = Note(1, "a note", bytes(48))


# --- round trip ----------------------------------------------------------------------------------


def round_trip(effort: Effort) -> Findings:
    """Measure a round trip between two sleeping processes, beside the bare wake-ups."""
    findings = Findings()
    rows = (ROUND_TRIP,)
    seconds = effort.seconds
    contenders = [
        Contender(OURS, rows, lambda: {ROUND_TRIP: lane_round_trip_us(seconds)}),
        Contender("Python eventfd", rows, lambda: {ROUND_TRIP: floor.python_eventfd_us(seconds)}),
    ]
    try:
        program = floor.compile_c()
    except CannotRun as error:
        findings.lack(rows, "C eventfd", reason_of(error))
    else:
        in_c = Contender(
            "C eventfd", rows, lambda: {ROUND_TRIP: floor.c_eventfd_us(program, seconds)}
        )
        contenders.insert(1, in_c)
    take_turns(findings, contenders, effort)
    return findings


def lane_round_trip_us(seconds: float) -> float:
    """Return the median round trip over two lanes, both ends parked, on two cores."""
    link = Link()
    near_core, far_core = two_cores()
    try:
        with Partner(partial(echo, link), far_core), pinned(near_core):
            end = link.near()
            round_trips_us(end, PAYLOAD, seconds / 5)
            return statistics.median(round_trips_us(end, PAYLOAD, seconds))
    finally:
        link.close()


# --- small messages ------------------------------------------------------------------------------


def one_way(effort: Effort) -> Findings:
    """Flood another process with small messages, raw and typed."""
    findings = Findings()
    count = effort.pick(50_000, 200_000)
    rows = (RAW, TYPED)
    contenders = [Contender(OURS, rows, lambda: _flood_both(count))]
    for label, flood in peers.FLOODS.items():
        contenders.append(Contender(label, rows, partial(_peer_turn, flood, count // 2)))
    take_turns(findings, contenders, effort)
    return findings


def _peer_turn(flood: peers.Flood, count: int) -> Figures:
    """Let a peer carry bytes, and then whatever it has for objects."""
    plain = (NOTE.number, NOTE.text, NOTE.body)
    return {
        RAW: flood(PAYLOAD, count, is_object=False),
        TYPED: flood(plain, count, is_object=True),
    }


def _flood_both(count: int) -> Figures:
    return {
        RAW: _flood(count, lambda: PAYLOAD, lambda data: None),
        TYPED: _flood(count, lambda: encode(NOTE), decode),
    }


def _flood(count: int, make: Callable[[], bytes], take: Callable[[bytes], object]) -> float:
    """Return frames per second, from the first send to the answer to the last."""
    link = Link()

    def work() -> None:
        end = link.far()
        for size in peers.sizes(count):
            left = size
            while left:
                frames = end.receive()
                for _, data in frames:
                    take(data)
                left -= len(frames)
            end.send(b"done")

    try:
        with Partner(work):
            end = link.near()
            elapsed_s = 0.0
            for size in peers.sizes(count):
                start_s = time.monotonic()
                for _ in range(size):
                    end.send(make())
                end.receive()
                elapsed_s = time.monotonic() - start_s
            return count / elapsed_s
    finally:
        link.close()


# --- arrays --------------------------------------------------------------------------------------


def arrays(effort: Effort) -> Findings:
    """Send arrays of 16 MiB through an arena, beside a bare copy of the same bytes."""
    findings = Findings()
    seconds = effort.seconds
    contenders = [
        Contender(OURS, (ARRAYS,), lambda: {ARRAYS: _array_gb_per_s(seconds)}),
        Contender("memcpy", (ARRAYS,), lambda: {ARRAYS: _memcpy_gb_per_s(seconds)}),
    ]
    take_turns(findings, contenders, effort)
    return findings


def _warm_arena() -> tuple[Arena, list[Segment]]:
    """Return an arena whose blocks for the arrays have been written once."""
    segments: list[Segment] = []
    arena = Arena(1, on_segment=lambda arena_id, index, segment: segments.append(segment))
    arena.adopt(arena.prepare(ARRAY_BYTES * (ARRAYS_IN_FLIGHT + 1)))
    blocks = [arena.allocate(ARRAY_BYTES) for _ in range(ARRAYS_IN_FLIGHT)]
    for block in blocks:
        np.frombuffer(arena.buffer(block, ARRAY_BYTES), np.uint8).fill(1)
        arena.drop(block)
    return arena, segments


def _memcpy_gb_per_s(seconds: float) -> float:
    """Return the speed of copying into the same kind of blocks, as many of them."""
    arena, segments = _warm_arena()
    blocks = [arena.allocate(ARRAY_BYTES) for _ in range(ARRAYS_IN_FLIGHT)]
    source = np.ones(ARRAY_BYTES, np.uint8)
    targets = [segments[block.segment].address + block.offset for block in blocks]
    try:
        return floor.memcpy_gb_per_s(source.ctypes.data, targets, ARRAY_BYTES, seconds)
    finally:
        arena.close()


def _array_gb_per_s(seconds: float) -> float:
    """Return how fast arrays reach another process that looks at their ends and drops them."""
    arena, segments = _warm_arena()
    link = Link()

    def work() -> None:
        end = link.far()
        views = Views()
        for index, segment in enumerate(segments):
            views.add_segment(1, index, segment)
        while True:
            for _, data in end.receive():
                _look(views, decode_handle(data).handle)
            for handle in views.take_released():
                end.consumer.try_release(handle.arena, handle.block)
            end.consumer.flush_releases()

    try:
        with Partner(work):
            return ArraySender(arena, link).flood(seconds)
    finally:
        link.close()
        arena.close()


class Carry(Message, frozen=True, tag=201):
    """Hand an array over."""

    handle: Handle


decode_handle: Decoder[Carry] = Decoder(Carry, "of the benchmark")


def _look(views: Views, handle: Handle) -> None:
    array = views.view(handle, np.dtype(np.float32), (ARRAY_BYTES // 4,), writable=False)
    if array[0] + array[-1] != 2.0:
        raise ValueError("an array arrived with other numbers than were sent")


class ArraySender:
    """Copy one array after the other into the arena and hand it over."""

    def __init__(self, arena: Arena, link: Link) -> None:
        self._arena = arena
        self._end = link.near()
        self._source = np.ones(ARRAY_BYTES // 4, np.float32)
        self._in_flight = 0

    def flood(self, seconds: float) -> float:
        """Return GB/s until the last array has come back."""
        self._send_for(seconds / 5)
        start_s = time.monotonic()
        sent = self._send_for(seconds)
        return sent * ARRAY_BYTES / (time.monotonic() - start_s) / 1e9

    def _send_for(self, seconds: float) -> int:
        sent = 0
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._take_back(ARRAYS_IN_FLIGHT - 1)
            self._send(self._arena.allocate(ARRAY_BYTES))
            sent += 1
        self._take_back(0)
        return sent

    def _send(self, block: Block) -> None:
        target = np.frombuffer(self._arena.buffer(block, ARRAY_BYTES), np.float32)
        np.copyto(target, self._source)
        self._end.send(encode(Carry(self._arena.handle(block, ARRAY_BYTES))))
        self._in_flight += 1

    def _take_back(self, most: int) -> None:
        """Wait until at most so many arrays are out."""
        while True:
            for _, block in self._end.producer.take_releases():
                self._arena.drop_number(block)
                self._in_flight -= 1
            if self._in_flight <= most:
                return
            self._end.wait_for_room()
