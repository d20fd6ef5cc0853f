# SPDX-License-Identifier: Apache-2.0
"""Blocks: where they lie, who holds them, how an arena grows and shrinks."""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from actorserve.errors import InternalError, ProtocolError, ResourceExhausted
from actorserve.shm.arena import Arena, Block
from actorserve.shm.segment import PAGE_BYTES, Segment
from actorserve.shm.space import Ranges
from actorserve.wire.messages import Handle


class Waitable(Protocol):
    """A child process, see conftest.py."""

    def wait(self) -> int: ...


Fork = Callable[[Callable[[], object]], Waitable]

KIB = 1 << 10
MIB = 1 << 20
ARENA = 7


@pytest.fixture
def segments() -> list[Segment]:
    """Return the list into which `arena` announces its segments."""
    return []


@pytest.fixture
def arena(segments: list[Segment]) -> Iterator[Arena]:
    """Yield an arena of small steps; conftest.py sees that it leaves no descriptor behind."""
    arena = Arena(
        ARENA,
        first_segment_bytes=256 * KIB,
        max_segment_bytes=MIB,
        on_segment=lambda _arena, _index, segment: segments.append(segment),
    )
    yield arena
    arena.close()


def backed_bytes(segment: Segment) -> int:
    """Return how much memory the system has given to a segment."""
    return os.fstat(segment.fd).st_blocks * 512


def fill(arena: Arena, block: Block) -> None:
    """Write the block's number all over it."""
    pattern = block.number.to_bytes(8, "little")
    arena.buffer(block, block.nbytes)[:] = pattern * (block.nbytes // 8)


def is_whole(arena: Arena, block: Block) -> bool:
    """Tell whether the block still holds what `fill` wrote."""
    pattern = block.number.to_bytes(8, "little")
    return bytes(arena.buffer(block, block.nbytes)) == pattern * (block.nbytes // 8)


# --- growing --------------------------------------------------------------------------------------


def test_idle_arena_owns_nothing(arena: Arena, segments: list[Segment]) -> None:
    """No segment exists before the first allocation, and `try_allocate` never makes one."""
    assert arena.try_allocate(64) is None
    assert arena.stats().segment_bytes == 0
    assert segments == []


def test_segments_double_up_to_the_limit(arena: Arena, segments: list[Segment]) -> None:
    """Each new segment is twice the one before, but never above the limit."""
    for _ in range(14):
        arena.allocate(256 * KIB)
    assert [segment.nbytes for segment in segments] == [256 * KIB, 512 * KIB, MIB, MIB, MIB]


def test_large_request_gets_a_segment_of_its_own(arena: Arena, segments: list[Segment]) -> None:
    """A request beyond the limit gets what it needs in whole pages; the steps stay as they were."""
    arena.allocate(64)
    block = arena.allocate(3 * MIB + 1)
    assert segments[1].nbytes == 3 * MIB + PAGE_BYTES == block.nbytes
    arena.allocate(300 * KIB)
    assert segments[2].nbytes == 512 * KIB


def test_growth_comes_in_steps_of_growth_bytes(segments: list[Segment]) -> None:
    """With `growth_bytes` every later segment is the smallest multiple that the request needs."""
    arena = Arena(
        1,
        first_segment_bytes=64 * KIB,
        growth_bytes=128 * KIB,
        on_segment=lambda _arena, _index, segment: segments.append(segment),
    )
    for nbytes in (64 * KIB, 64 * KIB, 96 * KIB, 256 * KIB):
        arena.allocate(nbytes)
    assert [s.nbytes for s in segments] == [64 * KIB, 128 * KIB, 128 * KIB, 256 * KIB]
    arena.close()


def test_prepare_in_another_thread_then_adopt(arena: Arena, segments: list[Segment]) -> None:
    """The slow half runs elsewhere and changes nothing; after the quick half there is room."""
    prepared: list[Segment] = []
    thread = threading.Thread(target=lambda: prepared.append(arena.prepare(100 * KIB)))
    thread.start()
    thread.join(30)
    assert arena.try_allocate(100 * KIB) is None
    arena.adopt(prepared[0])
    assert arena.try_allocate(100 * KIB) is not None
    assert segments == prepared


def test_every_prepared_segment_holds_its_request(arena: Arena) -> None:
    """Whatever the size, one growth is enough for it."""
    for nbytes in (0, 1, 64, 257, 4097, 255 * KIB, 257 * KIB, MIB - 1, MIB, MIB + 1, 5 * MIB + 3):
        block = arena.allocate(nbytes)
        assert block.nbytes >= nbytes


def test_failed_growth_fails_that_request_only(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 53: no memory is ResourceExhausted for the one who asked; what is there works on."""
    block = arena.allocate(200 * KIB)

    def full(nbytes: int) -> Segment:
        raise ResourceExhausted(f"no room for {nbytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "create", full)
        with pytest.raises(ResourceExhausted):
            arena.allocate(200 * KIB)
        before = arena.stats()
        arena.drop(block)
        again = arena.allocate(200 * KIB)
        assert arena.stats().used_bytes == before.used_bytes
    arena.allocate(400 * KIB)
    arena.drop(again)


def test_bad_sizes_are_refused() -> None:
    """Sizes that make no sense are the caller's mistake."""
    with pytest.raises(ValueError, match="first_segment_bytes"):
        Arena(1, first_segment_bytes=0)
    with pytest.raises(ValueError, match="growth_bytes"):
        Arena(1, growth_bytes=-1)
    with pytest.raises(ValueError, match="-1 bytes"):
        Arena(1).try_allocate(-1)
    with pytest.raises(ValueError, match="keep_bytes"):
        Arena(1).trim(-1)


# --- places ---------------------------------------------------------------------------------------


def test_sizes_are_four_classes_per_octave(arena: Arena) -> None:
    """A block is aligned and large enough, and wastes less than a quarter or 63 bytes."""
    classes = set()
    for nbytes in [*range(0, 9000, 61), *range(9000, MIB, 9973)]:
        block = arena.allocate(nbytes)
        assert block.offset % 64 == 0 == block.nbytes % 64
        assert nbytes <= block.nbytes < max(nbytes * 1.25, nbytes + 65)
        classes.add(block.nbytes)
        arena.drop(block)
    assert len([size for size in classes if 4 * KIB < size <= 8 * KIB]) == 4


def test_freed_block_is_reused_while_warm(arena: Arena) -> None:
    """The block freed last is the next one out, under a new number."""
    first, second = arena.allocate(10 * KIB), arena.allocate(10 * KIB)
    arena.drop(first)
    arena.drop(second)
    third, fourth = arena.allocate(10 * KIB), arena.allocate(10 * KIB)
    assert (third.segment, third.offset) == (second.segment, second.offset)
    assert (fourth.segment, fourth.offset) == (first.segment, first.offset)
    assert len({first.number, second.number, third.number, fourth.number}) == 4


def test_warm_blocks_coalesce_when_a_larger_one_is_needed(
    arena: Arena, segments: list[Segment]
) -> None:
    """Many small free blocks become one large one before the arena grows."""
    blocks = [arena.allocate(KIB) for _ in range(256)]
    assert arena.try_allocate(KIB) is None
    random.Random(1).shuffle(blocks)
    for block in blocks:
        arena.drop(block)
    assert arena.allocate(256 * KIB).nbytes == segments[0].nbytes
    assert len(segments) == 1


def test_buffer_is_the_blocks_memory(arena: Arena, segments: list[Segment]) -> None:
    """What is written into a block's buffer lies in the segment at the block's offset."""
    arena.allocate(100)
    block = arena.allocate(100)
    arena.buffer(block, 100)[:] = b"x" * 100
    assert bytes(segments[0].buffer[block.offset : block.offset + 100]) == b"x" * 100
    with pytest.raises(ValueError, match="do not fit"):
        arena.buffer(block, block.nbytes + 1)


# --- holds and handles ----------------------------------------------------------------------------


def test_last_drop_frees(arena: Arena) -> None:
    """A block lives as long as one hold does."""
    block = arena.allocate(KIB)
    arena.hold(block)
    arena.drop(block)
    assert arena.stats().blocks == 1
    assert arena.drop_number(block.number) is True
    assert arena.stats().blocks == 0
    assert arena.stats().used_bytes == 0


def test_double_free_is_refused(arena: Arena) -> None:
    """A block that is free can be neither dropped nor held nor looked at, even if reused since."""
    block = arena.allocate(KIB)
    arena.drop(block)
    reused = arena.allocate(KIB)
    assert (reused.segment, reused.offset) == (block.segment, block.offset)
    for use in (
        arena.drop,
        arena.hold,
        lambda block: arena.buffer(block, 1),
        lambda block: arena.handle(block, 1),
    ):
        with pytest.raises(ProtocolError, match="field block"):
            use(block)
    assert arena.drop_number(block.number) is False
    assert reused.holds == 1


def test_foreign_block_is_refused(arena: Arena) -> None:
    """A block of another arena with the same number is not taken for one's own."""
    other = Arena(8, first_segment_bytes=4 * KIB)
    mine, foreign = arena.allocate(KIB), other.allocate(KIB)
    assert mine.number == foreign.number
    with pytest.raises(ProtocolError, match="field block"):
        arena.drop(foreign)
    other.close()


def test_block_of_returns_the_block_of_an_honest_handle(arena: Arena) -> None:
    """A handle leads back to its block."""
    block = arena.allocate(KIB)
    assert arena.block_of(arena.handle(block, 900)) is block
    assert arena.handle(block, 900, shared=True) == Handle(
        ARENA, block.number, block.segment, block.offset, 900, True
    )
    with pytest.raises(ValueError, match="do not fit"):
        arena.handle(block, KIB + 1)


@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("arena", ARENA + 1),
        ("block", 999),
        ("block", -1),
        ("segment", 1),
        ("segment", -1),
        ("offset", 64),
        ("offset", -64),
        ("nbytes", KIB + 1),
        ("nbytes", -1),
        ("nbytes", 1 << 70),
    ],
)
def test_lying_handle_is_refused_by_field(arena: Arena, field: str, lie: int) -> None:
    """Row 80: each field is checked, and the error names it."""
    handle = arena.handle(arena.allocate(KIB), KIB)
    fields = {name: getattr(handle, name) for name in Handle.__struct_fields__}
    with pytest.raises(ProtocolError, match=f"field {field} is {lie}"):
        arena.block_of(Handle(**{**fields, field: lie}))


def test_stale_handle_is_refused(arena: Arena) -> None:
    """A handle dies with its block, even when another block lies in its place."""
    block = arena.allocate(KIB)
    handle = arena.handle(block, KIB)
    arena.drop(block)
    arena.allocate(KIB)
    with pytest.raises(ProtocolError, match="field block"):
        arena.block_of(handle)


# --- idle memory ----------------------------------------------------------------------------------


def test_trim_gives_free_pages_back(arena: Arena, segments: list[Segment]) -> None:
    """Free pages beyond what is kept go back; blocks in use keep every byte."""
    blocks = [arena.allocate(16 * KIB) for _ in range(16)]
    for block in blocks:
        fill(arena, block)
    kept = blocks[5]
    for block in blocks:
        if block is not kept:
            arena.drop(block)
    assert arena.trim(240 * KIB) == 0
    assert arena.trim(64 * KIB) == (240 - 64) * KIB
    assert backed_bytes(segments[0]) == (64 + 16) * KIB
    assert arena.stats().punched_bytes == 176 * KIB
    assert arena.trim(64 * KIB) == 0
    assert arena.trim(0) == 64 * KIB
    assert is_whole(arena, kept)
    assert backed_bytes(segments[0]) == 16 * KIB


def test_trimmed_memory_is_refilled_before_reuse(arena: Arena, segments: list[Segment]) -> None:
    """A block that is cut out of trimmed memory has its pages again, all of them."""
    arena.drop(arena.allocate(256 * KIB))
    arena.trim(0)
    assert backed_bytes(segments[0]) == 0
    blocks = [arena.allocate(10_000) for _ in range(20)]
    needed = sum(block.nbytes for block in blocks)
    assert needed <= backed_bytes(segments[0]) < needed + 2 * PAGE_BYTES
    for block in blocks:
        fill(arena, block)
    assert all(is_whole(arena, block) for block in blocks)
    assert backed_bytes(segments[0]) < needed + 2 * PAGE_BYTES
    for block in blocks:
        arena.drop(block)
    arena.allocate(256 * KIB)
    assert arena.stats().punched_bytes == 0
    assert backed_bytes(segments[0]) == 256 * KIB


def test_failed_refill_fails_that_allocation_only(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for the refill nothing has changed, and a later try may work."""
    block = arena.allocate(KIB)
    arena.trim(0)
    before = arena.stats()

    def full(_segment: Segment, _offset: int, _nbytes: int) -> None:
        raise ResourceExhausted("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "refill", full)
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match="no room"):
                arena.try_allocate(100 * KIB)
        assert arena.stats() == before
        # What lies on the page of the live block has its memory.
        arena.drop(arena.allocate(KIB))
    assert arena.allocate(100 * KIB).nbytes >= 100 * KIB
    arena.drop(block)


def test_trim_passes_over_segments_without_a_descriptor(
    arena: Arena, segments: list[Segment]
) -> None:
    """What could not be refilled is not given back."""
    arena.drop(arena.allocate(100 * KIB))
    segments[0].close_fd()
    assert arena.trim(0) == 0
    fill(arena, arena.allocate(256 * KIB))


# --- the end --------------------------------------------------------------------------------------


def test_close_is_idempotent_and_late_drops_are_harmless(arena: Arena) -> None:
    """After `close` users may still let go and memory still be read, but nothing new begins."""
    block = arena.allocate(KIB)
    buffer = arena.buffer(block, 4)
    buffer[:] = b"last"
    arena.close()
    arena.close()
    arena.drop(block)
    assert arena.drop_number(block.number) is False
    assert bytes(buffer) == b"last"
    assert arena.try_allocate(64) is None
    with pytest.raises(InternalError, match="closed"):
        arena.allocate(64)


def test_forked_child_cannot_touch_its_parents_arena(arena: Arena, fork: Fork) -> None:
    """In a forked child the arena is severed; the parent's blocks and pages stay whole."""
    block = arena.allocate(KIB)
    fill(arena, block)
    arena.drop(arena.allocate(200 * KIB))

    def child() -> None:
        assert arena.try_allocate(64) is None
        assert arena.trim(0) == 0
        arena.drop(block)
        with pytest.raises(InternalError, match="forked child"):
            arena.allocate(64)
        own = Arena(9, first_segment_bytes=4 * KIB)
        fill(own, own.allocate(4 * KIB))
        own.close()
        arena.close()

    assert fork(child).wait() == 0
    assert is_whole(arena, block)
    assert arena.stats().punched_bytes == 0
    arena.drop(block)
    assert arena.stats().used_bytes == 0


def test_stats_add_up(arena: Arena) -> None:
    """Used and free bytes are all there is; the peak stays."""
    blocks = [arena.allocate(10 * KIB) for _ in range(5)]
    for block in blocks[1:]:
        arena.drop(block)
    stats = arena.stats()
    assert (stats.arena, stats.blocks, stats.allocations, stats.segments) == (ARENA, 1, 5, 1)
    assert stats.used_bytes == 10 * KIB
    assert stats.free_bytes == stats.segment_bytes - stats.used_bytes
    assert stats.binned_bytes == 40 * KIB
    assert stats.peak_used_bytes == 50 * KIB


# --- against brute force --------------------------------------------------------------------------


class Model:
    """The same arena, byte by byte: a map of 64-byte granules per segment."""

    def __init__(self) -> None:
        self.maps: list[bytearray] = []
        self.live: dict[Block, int] = {}

    def add_segment(self, _arena: int, index: int, segment: Segment) -> None:
        """Note a segment; they come in order."""
        assert index == len(self.maps)
        self.maps.append(bytearray(segment.nbytes // 64))

    def mark(self, block: Block, used: int) -> None:
        """Set a block's granules, none of which may be so already."""
        first, last = block.offset // 64, (block.offset + block.nbytes) // 64
        granules = self.maps[block.segment]
        assert last <= len(granules)
        assert granules[first:last] == bytes([1 - used]) * (last - first)
        granules[first:last] = bytes([used]) * (last - first)

    def used_bytes(self) -> int:
        """Count all granules in use."""
        return 64 * sum(granules.count(1) for granules in self.maps)


@pytest.mark.parametrize("seed", range(6))
def test_arena_agrees_with_a_byte_map(seed: int) -> None:
    """Random use never makes blocks overlap, lose bytes, or go missing, trimmed or not."""
    rng = random.Random(seed)
    model = Model()
    arena = Arena(
        seed,
        first_segment_bytes=64 * KIB,
        max_segment_bytes=256 * KIB,
        on_segment=model.add_segment,
    )
    for _ in range(1500):
        action = rng.random()
        if action < 0.5 and len(model.live) < 150:
            block = arena.allocate(int(2 ** rng.uniform(0, 15)) if rng.random() < 0.97 else 300_000)
            model.mark(block, 1)
            model.live[block] = 1
            fill(arena, block)
        elif action < 0.6 and model.live:
            block = rng.choice(list(model.live))
            arena.hold(block)
            model.live[block] += 1
        elif action < 0.97 and model.live:
            block = rng.choice(list(model.live))
            assert arena.block_of(arena.handle(block, block.nbytes)) is block
            assert is_whole(arena, block)
            assert arena.drop_number(block.number)
            model.live[block] -= 1
            if not model.live[block]:
                del model.live[block]
                model.mark(block, 0)
        elif action >= 0.97:
            arena.trim(rng.choice((0, 10_000, 100_000)))
        stats = arena.stats()
        assert stats.blocks == len(model.live)
        assert stats.used_bytes == model.used_bytes()
        assert 0 <= stats.punched_bytes <= stats.free_bytes
    for block in model.live:
        assert is_whole(arena, block)
        for _ in range(block.holds):
            arena.drop(block)
    assert arena.trim(0) >= 0
    assert arena.stats().punched_bytes == arena.stats().segment_bytes
    arena.close()


@pytest.mark.parametrize("seed", range(4))
def test_ranges_agree_with_a_set(seed: int) -> None:
    """Adding, taking and removing ranges gives what a set of numbers gives."""
    rng = random.Random(seed)
    ranges = Ranges()
    numbers: set[int] = set()
    for _ in range(600):
        start = rng.randrange(200)
        span = set(range(start, start + rng.randrange(1, 12)))
        if not span & numbers:
            ranges.add(start, start + len(span))
            numbers |= span
        elif span <= numbers:
            ranges.remove(start, start + len(span))
            numbers -= span
        else:
            parts = ranges.overlap(start, start + len(span))
            assert {n for low, high in parts for n in range(low, high)} == numbers & span
        size = rng.randrange(1, 30)
        fits = [low for low, high in ranges if high - low >= size]
        taken = ranges.take(size)
        assert taken == (fits[0] if fits else None)
        if taken is not None:
            numbers -= set(range(taken, taken + size))
        pairs = list(ranges)
        assert {n for low, high in pairs for n in range(low, high)} == numbers
        assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))
        assert ranges.total() == len(numbers)
        assert bool(ranges) == bool(numbers)
