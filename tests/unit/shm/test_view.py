# SPDX-License-Identifier: Apache-2.0
"""Views: no copy, one release each when the last of it is gone, handles of what is leased."""

from __future__ import annotations

import array
import gc
import itertools
import os
import random
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import pytest

from actorserve.errors import InternalError, ProtocolError
from actorserve.forking import sever_after_fork
from actorserve.shm.arena import Arena, Block
from actorserve.shm.segment import Segment
from actorserve.shm.view import Views
from actorserve.wire.messages import Handle

KIB = 1 << 10
ARENA = 7
F4 = np.dtype(np.float32)
U1 = np.dtype(np.uint8)
Array = np.ndarray[Any, Any]


class Waitable(Protocol):
    """A child process, see conftest.py."""

    pid: int

    def wait(self) -> int: ...


Fork = Callable[[Callable[[], object]], Waitable]


def buffer_of(view: Any) -> memoryview:
    """Return a memoryview of an array (numpy's stubs do not know that it has a buffer)."""
    return memoryview(view)


class Place:
    """An arena, and views of it in the same process."""

    def __init__(self, number: int = ARENA) -> None:
        self.views = Views()
        self.arena = Arena(number, first_segment_bytes=64 * KIB, on_segment=self.views.add_segment)

    def lend(self, nbytes: int = 4 * KIB) -> tuple[Block, Handle]:
        """Return a new block and its handle."""
        block = self.arena.allocate(nbytes)
        return block, self.arena.handle(block, nbytes)

    def bytes_of(self, handle: Handle, *, writable: bool = True) -> Array:
        """Return a view of all bytes of a handle."""
        return self.views.view(handle, U1, (handle.nbytes,), writable=writable)


@pytest.fixture
def place() -> Iterator[Place]:
    """Yield an arena with views of it; conftest.py sees that no descriptor is left."""
    place = Place()
    yield place
    place.views.forget_arena(ARENA)
    place.arena.close()


# --- views ----------------------------------------------------------------------------------------


def test_view_is_the_blocks_memory(place: Place) -> None:
    """What the owner writes is seen in the view and the other way round: nothing is copied."""
    block, handle = place.lend(24)
    view = place.views.view(handle, F4, (2, 3), writable=True)
    assert type(view) is np.ndarray
    view[:] = [[1, 2, 3], [4, 5, 6]]
    assert np.frombuffer(place.arena.buffer(block, 24), F4).tolist() == [1, 2, 3, 4, 5, 6]
    assert view.ctypes.data % 64 == 0


def test_read_only_view_stays_read_only(place: Place) -> None:
    """A view that is not to be written cannot be made writable, nor can a slice of it."""
    block, handle = place.lend(16)
    view = place.views.view(handle, F4, (4,), writable=False)
    for each in (view, view[1:], view.reshape(2, 2)):
        assert not each.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            each.flags.writeable = True
    place.arena.buffer(block, 16)[:] = bytes(15) + b"\x40"
    assert view[3] == 2.0


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_shapes_without_bytes_or_dimensions(
    place: Place, writable: bool, shape: tuple[int, ...]
) -> None:
    """Empty arrays and scalars are views like any other and are released."""
    nbytes = 4 * int(np.prod(shape))
    _, handle = place.lend(nbytes)
    view = place.views.view(handle, F4, shape, writable=writable)
    assert (view.shape, view.flags.writeable) == (shape, writable)
    del view
    assert place.views.take_released() == [handle]


KEEPERS: dict[str, Callable[[Array], object]] = {
    "slice": lambda view: view[3:9],
    "slice of a slice": lambda view: view[3:][2:][1:],
    "element view": lambda view: view[5:6].reshape(()),
    "transposed": lambda view: view.reshape(2, -1).T,
    "other dtype": lambda view: view.view(np.float32),
    "memoryview": buffer_of,
    "slice of a memoryview": lambda view: buffer_of(view)[2:4],
    "frombuffer": lambda view: np.frombuffer(view, np.uint16),
    "frombuffer of a memoryview": lambda view: np.frombuffer(buffer_of(view)[8:], np.uint8)[1:],
    "asarray of a subclass": lambda view: np.asarray(view.view(np.recarray)),
    "iterator": iter,
    "broadcast": lambda view: np.broadcast_to(view, (3, view.size)),
}


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_release_waits_for_the_last_descendant(place: Place, keeper: str, writable: bool) -> None:
    """Whatever is made from a view's memory keeps the lease, and only that."""
    _, handle = place.lend()
    view = place.bytes_of(handle, writable=writable)
    kept = KEEPERS[keeper](view)
    del view
    assert place.views.take_released() == []
    del kept
    assert place.views.take_released() == [handle]
    assert place.views.take_released() == []


def test_dlpack_keeps_the_lease(place: Place) -> None:
    """An array that another library took over by DLPack is a descendant too."""
    _, handle = place.lend()
    taken = np.from_dlpack(place.bytes_of(handle))
    assert place.views.take_released() == []
    del taken
    assert place.views.take_released() == [handle]


def test_each_view_is_a_lease_of_its_own(place: Place) -> None:
    """A block that was delivered three times is released three times, in any order."""
    _, handle = place.lend()
    first, second, third = (place.bytes_of(handle) for _ in range(3))
    for name in ("second", "first", "third"):
        assert place.views.take_released() == []
        if name == "second":
            del second
        elif name == "first":
            del first
        else:
            del third
        assert place.views.take_released() == [handle]
    assert place.views.stats().leases == 0


def test_views_need_no_order(place: Place) -> None:
    """Releases come in the order of the deaths, whatever the order of the births."""
    handles = [place.lend()[1] for _ in range(8)]
    views = {index: place.bytes_of(handle) for index, handle in enumerate(handles)}
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    for index in order:
        del views[index]
    assert place.views.take_released() == [handles[index] for index in order]


# --- bad handles ----------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "arena": ARENA,
    "block": 1,
    "segment": 0,
    "offset": 0,
    "nbytes": 4 * KIB,
    "shared": False,
}


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize(
    ("field", "lie"),
    [
        ("arena", 8),
        ("arena", -1),
        ("segment", 1),
        ("segment", -1),
        ("offset", -64),
        ("offset", 8),
        ("offset", 64 * KIB + 64),
        ("offset", 1 << 70),
        ("nbytes", 4 * KIB - 1),
        ("nbytes", 4 * KIB + 1),
        ("nbytes", -4 * KIB),
        ("nbytes", 1 << 70),
    ],
)
def test_lying_handle_is_refused_by_field(
    place: Place, field: str, lie: int, writable: bool
) -> None:
    """Row 80: nothing outside the segment is ever read, and the error names the field."""
    place.lend()
    with pytest.raises(ProtocolError, match=f"field {field} is {lie}"):
        place.views.view(Handle(**{**GOOD, field: lie}), F4, (KIB,), writable=writable)
    assert place.views.stats().leases == 0


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize(
    "shape", [(-1,), (-1, 4), (1 << 62, 1 << 4), (1 << 70,), (1,) * 70, (KIB + 1,), (0,), ()]
)
def test_shape_that_the_handle_does_not_hold_is_refused(
    place: Place, shape: tuple[int, ...], writable: bool
) -> None:
    """Negative, overflowing, too many and simply wrong dimensions are refused alike."""
    _, handle = place.lend()
    with pytest.raises(ProtocolError, match="field nbytes"):
        place.views.view(handle, F4, shape, writable=writable)
    whole = Handle(ARENA, 1, 0, 0, 64 * KIB)
    with pytest.raises(ProtocolError, match="field nbytes"):
        place.views.view(whole, U1, (-1,), writable=writable)


@pytest.mark.parametrize("writable", [True, False])
def test_block_that_crosses_the_segments_end_is_refused(place: Place, writable: bool) -> None:
    """The last bytes of a segment can be viewed, and none behind them."""
    place.lend()
    last = Handle(ARENA, 1, 0, 64 * KIB - 64, 64)
    assert place.bytes_of(last, writable=writable).size == 64
    over = Handle(ARENA, 1, 0, 64 * KIB - 64, 65)
    with pytest.raises(ProtocolError, match="the segment ends 64 bytes further on"):
        place.bytes_of(over, writable=writable)


def test_objects_never_come_out_of_shared_memory(place: Place) -> None:
    """A dtype of object references would make pointers of a peer's bytes: refused."""
    _, handle = place.lend(64)
    for dtype in (np.dtype(object), np.dtype([("number", "i8"), ("object", object)])):
        for writable in (True, False):
            with pytest.raises(ProtocolError, match="field dtype"):
                place.views.view(handle, dtype, (64 // dtype.itemsize,), writable=writable)


def test_random_handles_yield_errors_or_memory_inside_the_segment(place: Place) -> None:
    """Whatever the numbers, there is a ProtocolError or an array within the mapping."""
    rng = random.Random(5)
    place.lend()
    numbers = [0, 1, -1, 3, 64, 4096, 64 * KIB, 64 * KIB - 64, 1 << 31, 1 << 63, -(1 << 63), -64]
    made = 0
    for _ in range(4000):
        handle = Handle(
            ARENA, 1, rng.choice((0, 0, 0, 1)), rng.choice(numbers), rng.choice(numbers)
        )
        shape = tuple(rng.choices(numbers, k=rng.randrange(3)))
        dtype = rng.choice((U1, F4, np.dtype("S0"), np.dtype(np.complex128)))
        try:
            view = place.views.view(handle, dtype, shape, writable=rng.random() < 0.5)
        except ProtocolError:
            continue
        made += 1
        assert 0 <= handle.offset <= handle.offset + view.nbytes <= 64 * KIB
        assert view.nbytes == handle.nbytes
        assert view.shape == shape
    assert made


# --- handles of arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize("writable", [True, False])
def test_handle_of_a_leased_array(place: Place, writable: bool) -> None:
    """An array that begins at a leased block and fits is handed on by handle, whatever its form."""
    place.lend()
    _, handle = place.lend()
    view = place.bytes_of(handle, writable=writable)
    short = Handle(handle.arena, handle.block, handle.segment, handle.offset, 1000)
    assert place.views.handle_of(view) == handle
    assert place.views.handle_of(view.view(F4).reshape(32, 32)) == handle
    assert place.views.handle_of(np.frombuffer(buffer_of(view), np.int16)) == handle
    assert place.views.handle_of(view[:1000]) == short
    assert place.views.handle_of(view[:1000][:500][None, :]) is not None


@pytest.mark.parametrize("writable", [True, False])
def test_handle_of_anything_else_is_none(place: Place, writable: bool) -> None:
    """Other offsets, gaps, no bytes and memory from elsewhere have no handle."""
    place.lend()
    _, handle = place.lend()
    view = place.bytes_of(handle, writable=writable)
    for stranger in (
        view[1:],
        view[64:],
        view[::2],
        view.reshape(64, 64).T,
        view.reshape(64, 64)[:, :32],
        view[::-1],
        view[:0],
        view.copy(),
        np.zeros(4 * KIB, np.uint8),
        np.frombuffer(b"elsewhere", np.uint8),
        np.frombuffer(array.array("d", [1.0]), np.uint8),
    ):
        assert place.views.handle_of(stranger) is None


def test_handle_ends_with_the_last_lease(
    place: Place,
) -> None:
    """A stale address matches nothing, even though the memory is still mapped."""
    _, handle = place.lend()
    first, second = place.bytes_of(handle), place.bytes_of(handle, writable=False)
    segment = place.views._mappings[ARENA, 0].segment
    alias = np.frombuffer(segment.buffer, np.uint8)[handle.offset :][: handle.nbytes]
    assert place.views.handle_of(alias) == handle
    del first
    assert place.views.handle_of(alias) == handle
    place.views.take_released()
    assert place.views.handle_of(second) == handle
    del second
    assert place.views.handle_of(alias) is None
    place.views.take_released()
    assert place.views.handle_of(alias) is None


def test_handle_of_never_exceeds_what_was_lent(place: Place) -> None:
    """With leases of different lengths on one block, the array must fit into a live one."""
    block, long = place.lend(4 * KIB)
    short = place.arena.handle(block, 1 * KIB)
    short_view, long_view = place.bytes_of(short), place.bytes_of(long)
    segment = place.views._mappings[ARENA, 0].segment
    alias = np.frombuffer(segment.buffer, np.uint8)[long.offset :]
    assert place.views.handle_of(alias[: 4 * KIB]) == long
    assert place.views.handle_of(alias[: 4 * KIB + 1]) is None
    del long_view
    assert place.views.handle_of(alias[: 4 * KIB]) is None
    assert place.views.handle_of(short_view) == short


def test_handle_of_finds_the_right_segment(place: Place) -> None:
    """Blocks at the same offset of many mappings are told apart by address."""
    other = Place(8)
    leased = []
    for each in (place, other, place, other, place):
        each.arena.adopt(Segment.create(64 * KIB))
    for each in (place, other):
        while (block := each.arena.try_allocate(64 * KIB)) is not None:
            handle = each.arena.handle(block, 64 * KIB)
            for viewer in (place, other):
                if viewer.views.has_segment(handle.arena, handle.segment):
                    leased.append((viewer.views, handle, viewer.bytes_of(handle)))
    assert len(leased) == 5
    for views, handle, view in leased:
        assert views.handle_of(view) == handle
    del view, leased
    other.views.forget_arena(8)


def test_kept_own_block_is_not_given_to_another_request(place: Place) -> None:
    """A model that keeps an array of its own arena and returns it twice delivers its own data.

    Without the owner's own hold, the first delivery's release would free the block, and the
    second would carry the bytes of whoever got it then.
    """
    arena, views = place.arena, place.views

    def settle() -> None:
        for handle in views.take_released():
            arena.drop_number(handle.block)

    block, handle = place.lend()  # this hold is what the supervisor has
    kept = place.bytes_of(handle)
    arena.hold(block)  # and this one the view's
    kept[:] = 1
    assert arena.drop_number(handle.block)  # the first delivery was read and released
    settle()
    _, other = place.lend()
    place.bytes_of(other)[:] = 102
    settle()
    again = views.handle_of(kept)
    assert again is not None
    arena.hold(arena.block_of(again))  # the second delivery
    assert (kept == 1).all()
    assert (np.frombuffer(arena.buffer(block, 4 * KIB), np.uint8) == 1).all()
    arena.drop_number(again.block)
    del kept
    settle()
    assert arena.drop_number(handle.block) is False
    with pytest.raises(ProtocolError, match="field block"):
        arena.block_of(again)


# --- where releases come from ---------------------------------------------------------------------


def test_garbage_collection_releases_cycles(place: Place) -> None:
    """A view in a reference cycle is released when the collector finds it."""
    _, handle = place.lend()
    holder: list[object] = [place.bytes_of(handle)]
    holder.append(holder)
    del holder
    gc.collect()
    assert place.views.take_released() == [handle]


class Nosy:
    """Garbage that uses the views while it is collected, as a model's finalizer may."""

    def __init__(self, place: Place, handle: Handle) -> None:
        self.place = place
        self.view = place.bytes_of(handle)
        self.me = self

    def __del__(self) -> None:
        self.place.views.handle_of(self.view)
        self.seen = self.place.views.take_released()
        RELEASED.extend(self.seen)


RELEASED: list[Handle] = []


def test_collection_in_the_middle_of_any_call(place: Place) -> None:
    """Views that die in a collection that starts inside our own calls are released once each."""
    RELEASED.clear()
    handles = [place.lend(64)[1] for _ in range(50)]
    threshold = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for handle in handles * 8:
            Nosy(place, handle)
            RELEASED.extend(place.views.take_released())
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    RELEASED.extend(place.views.take_released())
    assert sorted(h.block for h in RELEASED) == sorted(h.block for h in handles * 8)
    assert place.views.stats().leases == 0


def test_views_may_be_made_and_die_in_any_thread(place: Place) -> None:
    """With threads that make, match, drop and take at once, each view is released once."""
    handles = [place.lend(64)[1] for _ in range(20)]
    released: list[list[Handle]] = [[] for _ in range(4)]
    start = threading.Barrier(4)
    problems: list[BaseException] = []

    def work(mine: list[Handle], seed: int) -> None:
        rng = random.Random(seed)
        kept: list[Array] = []
        start.wait(30)
        try:
            for _ in range(1500):
                handle = rng.choice(handles)
                view = place.bytes_of(handle, writable=rng.random() < 0.5)
                found = place.views.handle_of(view)
                assert found is None or found == handle
                kept.append(view)
                del view
                if len(kept) > 5:
                    del kept[rng.randrange(5)]
                mine.extend(place.views.take_released())
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(released[n], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    rest = place.views.take_released()
    assert len(rest) + sum(map(len, released)) == 4 * 1500
    assert place.views.stats().leases == 0


def test_releases_from_another_thread(place: Place) -> None:
    """A view may die in a thread that knows nothing of us."""
    _, handle = place.lend()
    views = [place.bytes_of(handle)]
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join(30)
    assert place.views.take_released() == [handle]


# --- segments and arenas --------------------------------------------------------------------------


def test_forgotten_arena_leaves_live_views_alone(place: Place) -> None:
    """Views outlive their arena's segments, have no handle any more, and are still reported."""
    other = Place(8)
    _, handle = other.lend()
    place.views.add_segment(8, 0, Segment.attach(os.dup(other.views._mappings[8, 0].segment.fd)))
    view, gone = place.bytes_of(handle), place.bytes_of(handle)
    view[:] = 9
    del gone
    place.views.forget_arena(8)
    assert not place.views.has_segment(8, 0)
    assert place.views.take_released() == [handle]
    assert place.views.handle_of(view) is None
    with pytest.raises(ProtocolError, match="field arena is 8"):
        place.bytes_of(handle)
    other.views.forget_arena(8)
    other.arena.close()
    gc.collect()
    assert (view == 9).all()
    assert place.views.stats().leases == 1
    del view
    assert place.views.take_released() == [handle]
    assert place.views._retired == {}
    place.views.forget_arena(8)


def test_forgotten_memory_is_unmapped_after_its_last_view(place: Place) -> None:
    """Nothing of ours keeps a mapping alive that nobody looks at."""
    segment = Segment.create(4 * KIB)
    mapping = weakref.ref(segment.mapping)
    place.views.add_segment(8, 0, segment)
    del segment
    view = place.bytes_of(Handle(8, 1, 0, 0, 64), writable=False)
    place.views.forget_arena(8)
    assert mapping() is not None
    del view
    place.views.take_released()
    assert mapping() is None


def test_segment_is_mapped_once(place: Place) -> None:
    """A second segment under a known number is a peer's mistake."""
    place.lend()
    second = Segment.create(4 * KIB)
    with pytest.raises(ProtocolError, match="field segment is 0"):
        place.views.add_segment(ARENA, 0, second)
    second.close()


def test_killed_owner_takes_nobody_with_it(place: Place, fork: Fork) -> None:
    """Row 10: an owner killed in the middle of its work leaves views readable, others untouched.

    There is no lock to be left locked: an allocator's state is its process's own.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def owner() -> None:
        def announce(_arena: int, _index: int, segment: Segment) -> None:
            socket.send_fds(theirs, [b"segment"], [segment.fd])

        arena = Arena(8, first_segment_bytes=64 * KIB, on_segment=announce)
        block = arena.allocate(KIB)
        arena.buffer(block, KIB)[:] = b"k" * KIB
        theirs.send(b"written")
        for size in itertools.cycle((64, 4 * KIB, 16 * KIB)):
            arena.drop(arena.allocate(size))

    with ours, theirs:
        ours.settimeout(60)
        child = fork(owner)
        _, fds, _, _ = socket.recv_fds(ours, 16, 1)
        assert ours.recv(16) == b"written"
        place.views.add_segment(8, 0, Segment.attach(fds[0], 64 * KIB))
        view = place.bytes_of(Handle(8, 1, 0, 0, KIB), writable=False)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert bytes(view) == b"k" * KIB
    place.views.forget_arena(8)
    assert bytes(view) == b"k" * KIB
    _, handle = place.lend()
    assert place.bytes_of(handle).size == 4 * KIB


# --- forks ----------------------------------------------------------------------------------------


def test_forked_child_releases_nothing(place: Place, fork: Fork) -> None:
    """A child's copies of views may die: neither it nor its parent hears of it."""
    _, handle = place.lend()
    view = [place.bytes_of(handle)]
    view[0][:] = 5

    def child() -> None:
        place.arena.close()
        assert (view[0] == 5).all()
        assert place.views.handle_of(view[0]) is None
        view.clear()
        gc.collect()
        assert place.views.take_released() == []
        assert place.views.stats().leases == 0
        with pytest.raises(InternalError, match="forked child"):
            place.bytes_of(handle)
        segment = Segment.create(4 * KIB)
        with pytest.raises(InternalError, match="forked child"):
            place.views.add_segment(9, 0, segment)

    assert fork(child).wait() == 0
    assert place.views.take_released() == []
    assert place.views.handle_of(view[0]) == handle
    view.clear()
    assert place.views.take_released() == [handle]


def test_dead_views_that_were_not_taken_belong_to_the_parent(place: Place, fork: Fork) -> None:
    """What died before the fork is released by the parent alone."""
    _, handle = place.lend()
    place.bytes_of(handle)

    def child() -> None:
        assert place.views.take_released() == []

    assert fork(child).wait() == 0
    assert place.views.take_released() == [handle]


def test_child_builds_its_own_views_and_its_children_are_severed_too(
    place: Place, fork: Fork
) -> None:
    """What a zygote's child builds for itself works, and is cut off in that child's children."""
    place.lend()

    def grandchild(mine: Place, handle: Handle) -> None:
        assert mine.views.take_released() == []
        assert mine.arena.try_allocate(64) is None
        with pytest.raises(InternalError, match="forked child"):
            mine.bytes_of(handle)

    def child() -> None:
        mine = Place(9)
        _, handle = mine.lend()
        view = mine.bytes_of(handle)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                grandchild(mine, handle)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert mine.views.handle_of(view) == handle
        del view
        assert mine.views.take_released() == [handle]

    assert fork(child).wait() == 0


def test_only_living_things_are_severed(fork: Fork) -> None:
    """Being severed after a fork keeps nothing alive."""

    class Thing:
        severed = 0

        def sever(self) -> None:
            self.severed += 1

    kept, dropped = Thing(), Thing()
    sever_after_fork(kept)
    sever_after_fork(dropped)
    gone = weakref.ref(dropped)
    del dropped
    assert gone() is None

    def child() -> None:
        assert kept.severed == 1

    assert fork(child).wait() == 0
    assert kept.severed == 0


def test_stats_count_leases_and_releases(place: Place) -> None:
    """The figures follow each view from birth to release."""
    _, handle = place.lend()
    view = place.bytes_of(handle)
    stats = place.views.stats()
    assert (stats.segments, stats.mapped_bytes, stats.leases) == (1, 64 * KIB, 1)
    del view
    assert (place.views.stats().waiting, place.views.stats().released) == (1, 0)
    place.views.take_released()
    stats = place.views.stats()
    assert (stats.leases, stats.waiting, stats.released) == (0, 0, 1)
