# SPDX-License-Identifier: Apache-2.0
"""Collectives: sums, gathers, broadcasts and barriers among processes."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from actorserve.errors import InvalidArgument, ProtocolError
from actorserve.shm.board import GroupDead
from actorserve.shm.collective import _ARRIVED, Collective, CollectiveSpace
from actorserve.shm.segment import Segment
from tests.unit.shm.conftest import Child
from tests.unit.shm.ranks import Rank, Ranks

Fork = Callable[[Callable[[], object]], Child]


def run(fork: Fork, size: int, work: Callable[[Rank], object], **sizes: int) -> None:
    """Have `work` done by `size` processes, of which this one is rank 0."""
    ranks = Ranks(size, **sizes)
    children = [fork(lambda rank=rank: work(ranks.rank(rank))) for rank in range(1, size)]
    try:
        work(ranks.rank(0))
    finally:
        ranks.board.mark_dead()
        ranks.board.parking(ranks.bells).wake_others()
    assert [child.wait() for child in children] == [0] * (size - 1)
    ranks.close()


def given(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return what a rank gives."""
    random_ = np.random.default_rng(rank)
    return (random_.standard_normal(shape) * 100).astype(dtype)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3,), "f4"), ((), "i8"), ((0, 5), "f4"), ((7, 11, 13), "f8"), ((5000,), "f4"), ((9,), "f2")],
)
def test_all_reduce_adds_in_the_order_of_ranks(
    fork: Fork, size: int, shape: tuple[int, ...], dtype: str
):
    """Each rank gets the same bits, also for arrays of several steps, none and a scalar."""
    expected = given(0, shape, dtype).copy()
    for rank in range(1, size):
        expected = np.add(expected, given(rank, shape, dtype), dtype=dtype)

    def work(rank: Rank) -> None:
        for _ in range(3):
            total = rank.world.all_reduce(given(rank.rank, shape, dtype))
            assert total.dtype == np.dtype(dtype)
            assert total.shape == shape
            assert total.tobytes() == expected.tobytes()

    run(fork, size, work)


def test_all_reduce_takes_arrays_that_are_not_contiguous(fork: Fork):
    """A transposed view is summed as what it shows."""

    def work(rank: Rank) -> None:
        array = np.arange(12, dtype=np.float32).reshape(3, 4).T
        assert np.array_equal(rank.world.all_reduce(array), 2 * array)

    run(fork, 2, work)


def test_all_gather_takes_different_shapes(fork: Fork):
    """Every rank gets everybody's array, though one has nothing and one needs several steps."""
    shapes = [((3, 5), "f4"), ((0,), "i8"), ((2500,), "f8")]

    def work(rank: Rank) -> None:
        for _ in range(3):
            shape, dtype = shapes[rank.rank]
            gathered = rank.world.all_gather(given(rank.rank, shape, dtype))
            for peer, array in enumerate(gathered):
                assert array.dtype == np.dtype(shapes[peer][1])
                assert np.array_equal(array, given(peer, *shapes[peer]))

    run(fork, 3, work)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_gives_everybody_the_array_of_the_root(fork: Fork, root: int):
    """A root may run ahead, and nobody reads a slot that it has written anew."""

    def work(rank: Rank) -> None:
        for turn in range(200):
            array = np.full(1500, turn * 10 + rank.rank, np.int64)
            result = rank.world.broadcast(array, root)
            assert (result == turn * 10 + root).all()

    run(fork, 3, work)


def test_barrier_waits_for_the_last(fork: Fork, tmp_path):
    """What was done before it by one rank is there for all after it."""

    def work(rank: Rank) -> None:
        for turn in range(20):
            (tmp_path / f"{turn}-{rank.rank}").touch()
            rank.world.barrier()
            assert len(list(tmp_path.glob(f"{turn}-*"))) == 3

    run(fork, 3, work)


def test_all_kinds_in_a_row(fork: Fork):
    """Calls of all kinds follow each other without getting into each other's slots."""

    def work(rank: Rank) -> None:
        for turn in range(300):
            one = np.array([turn + rank.rank])
            assert rank.world.all_reduce(one)[0] == 2 * turn + 1
            assert [each[0] for each in rank.world.all_gather(one)] == [turn, turn + 1]
            assert rank.world.broadcast(one, turn & 1)[0] == turn + (turn & 1)
            if turn % 7 == 0:
                rank.world.barrier()

    run(fork, 2, work)


def test_ranks_that_diverge_are_told(fork: Fork):
    """Another shape or another call than the others' is an error and no wrong sum."""

    def work(rank: Rank) -> None:
        with pytest.raises(ProtocolError, match="do not do the same"):
            rank.world.all_reduce(np.zeros(3 + rank.rank, np.float32))

    run(fork, 2, work)

    def work_differently(rank: Rank) -> None:
        with pytest.raises(ProtocolError, match="do not do the same"):
            if rank.rank:
                rank.world.barrier()
            else:
                rank.world.all_gather(np.zeros(2))

    run(fork, 2, work_differently)


def test_the_end_of_the_group_ends_a_wait(fork: Fork):
    """A rank that waits for one that is dead is woken by the board."""
    ranks = Ranks(2)

    def wait() -> None:
        with pytest.raises(GroupDead):
            ranks.rank(1).world.barrier()

    def die() -> None:
        os._exit(7)

    dead = fork(die)
    waiting = fork(wait)
    assert dead.wait() >> 8 == 7
    ranks.board.mark_dead()
    ranks.board.parking(ranks.bells).wake_others()
    assert waiting.wait() == 0
    ranks.close()


def test_what_is_no_number_is_refused():
    """Objects and text have no sum."""
    ranks = Ranks(1)
    world = ranks.rank(0).world
    with pytest.raises(InvalidArgument, match="dtype"):
        world.all_reduce(np.array(["a"]))
    with pytest.raises(InvalidArgument, match="root is 5"):
        world.broadcast(np.zeros(1), 5)
    assert world.all_reduce(np.array([1.5])).tolist() == [1.5]
    ranks.close()


def test_a_lying_word_is_refused():
    """A rank cannot be two steps ahead."""
    ranks = Ranks(2)
    ranks.space.words[_ARRIVED + 16] = 5
    with pytest.raises(ProtocolError, match="rank 1 is at step 5"):
        ranks.rank(0).world.barrier()
    ranks.close()


def test_attach_checks_everything():
    """A segment that holds nothing of the kind, or lies about its size, is refused."""
    segment = Segment.create(8192)
    with pytest.raises(ProtocolError, match="first word"):
        CollectiveSpace.attach(segment)
    segment.close()
    space = CollectiveSpace.create(2, 4096)
    again = CollectiveSpace.attach(space.segment)
    assert (again.size, again.slot_bytes) == (2, 4096)
    again.words.release()
    space.words[2] = 1 << 20
    with pytest.raises(ProtocolError, match="cannot lie"):
        CollectiveSpace.attach(space.segment)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Collective(space, 2, wait=lambda is_there: None, wake=lambda: None)
    space.close()
    with pytest.raises(ValueError, match="slots of 100 bytes"):
        CollectiveSpace.create(2, 100)
