# SPDX-License-Identifier: Apache-2.0
"""Who holds which block: lending, receiving, dropping, and false claims; peers are stand-ins."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator

import msgspec
import pytest

from actorserve.errors import ProtocolError, ResourceExhausted
from actorserve.runtime.exchange import Exchange
from actorserve.shm.segment import Segment
from actorserve.wire.messages import Handle, WireTensor
from tests.unit.runtime.fake_peer import NBYTES, FakePeer


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    """Return an exchange with arena 1."""
    exchange = Exchange(1, first_segment_bytes=1 << 20)
    yield exchange
    exchange.close()


@pytest.fixture
def peer(exchange: Exchange) -> Iterator[FakePeer]:
    """Return a peer with arena 2."""
    peer = FakePeer(exchange, 2)
    yield peer
    peer.own.close()


def tensor(handle: Handle) -> WireTensor:
    """Return a tensor that lies there."""
    return WireTensor("T", 2, (handle.nbytes,), handle)


def lent(exchange: Exchange, peer: FakePeer, fill: int = 7) -> Handle:
    """Fill a block of our own and lend it, keeping no hold."""
    slab = exchange.allocate_now(NBYTES)
    slab.buffer[:] = bytes([fill]) * NBYTES
    handle = slab.take()
    exchange.announce(peer, [handle])
    exchange.lend(peer, [handle])
    exchange.drop(handle)
    return handle


def is_idle(exchange: Exchange) -> bool:
    """Whether nobody holds anything."""
    gc.collect()
    stats = exchange.stats()
    return stats.held_blocks == 0 and stats.live_views == 0 and stats.arena.used_bytes == 0


# --- slabs ---------------------------------------------------------------------------------------


def test_a_slab_is_released_once(exchange):
    """Twice is the same as once, and its memory is used again."""
    slab = exchange.allocate_now(NBYTES)
    assert len(slab.buffer) == NBYTES
    assert exchange.stats().arena.blocks == 1
    slab.release()
    slab.release()
    assert is_idle(exchange)


def test_a_taken_slab_is_the_taker_s(exchange):
    """release() after take() is harmless, a second take() is refused."""
    slab = exchange.allocate_now(NBYTES)
    handle = slab.take()
    slab.release()
    assert exchange.stats().arena.blocks == 1
    with pytest.raises(ProtocolError, match="after it had been released or taken"):
        slab.take()
    exchange.drop(handle)
    assert is_idle(exchange)


def test_memory_that_is_not_there_has_to_grow(exchange):
    """allocate() says None instead of growing; grow() makes the room, off the loop."""
    assert exchange.allocate(NBYTES) is None

    async def main() -> None:
        await exchange.grow(NBYTES)

    asyncio.run(main())
    slab = exchange.allocate(NBYTES)
    assert slab is not None
    slab.release()
    assert is_idle(exchange)


def test_a_burst_grows_once(exchange, peer):
    """Those who wait while another grows look again."""

    async def main() -> None:
        await asyncio.gather(*[exchange.grow(NBYTES) for _ in range(20)])

    asyncio.run(main())
    assert exchange.stats().arena.segment_bytes == 1 << 20
    assert peer.pumps >= 1


def test_growth_that_fails_is_an_error_and_not_the_last_word(exchange, monkeypatch):
    """Whoever asked hears it; those who waited may try themselves."""
    create = Segment.create
    calls = []

    def fail_once(nbytes: int) -> Segment:
        calls.append(nbytes)
        if len(calls) == 1:
            raise ResourceExhausted("no memory")
        return create(nbytes)

    monkeypatch.setattr(Segment, "create", fail_once)

    async def main() -> None:
        first, second = await asyncio.gather(
            exchange.grow(NBYTES), exchange.grow(NBYTES), return_exceptions=True
        )
        assert isinstance(first, ResourceExhausted)
        assert second is None
        await exchange.grow(NBYTES)

    asyncio.run(main())
    slab = exchange.allocate(NBYTES)
    assert slab is not None
    slab.release()


def test_a_cancelled_growth_leaves_no_descriptor(exchange):
    """A client that hangs up while memory is made for it; the leak check looks."""

    async def main() -> None:
        growing = asyncio.ensure_future(exchange.grow(NBYTES))
        await asyncio.wait([growing], timeout=0)
        growing.cancel()
        await asyncio.wait([growing])
        await exchange.grow(NBYTES)

    asyncio.run(main())
    gc.collect()
    assert is_idle(exchange)


def test_drops_come_from_any_thread(exchange):
    """They are applied when the loop's thread settles."""
    handles = [exchange.allocate_now(NBYTES).take() for _ in range(8)]
    threads = [threading.Thread(target=exchange.drop, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_idle(exchange)


# --- lending -------------------------------------------------------------------------------------


def test_a_lent_block_lives_until_it_is_returned(exchange, peer):
    """Though our own hold is gone."""
    handle = lent(exchange, peer)
    assert exchange.stats().held_blocks == 1
    exchange.returned(peer, [(handle.arena, handle.block)])
    assert is_idle(exchange)


def test_a_segment_is_announced_to_each_peer_once(exchange, peer):
    """Before the first handle that names it; never a peer's own."""
    other = FakePeer(exchange, 3)
    for _ in range(3):
        lent(exchange, peer)
    lent(exchange, other)
    assert peer.announced == other.announced == [(1, 0)]
    exchange.announce(peer, [peer.make(1)])
    assert peer.announced == [(1, 0)]
    other.own.close()


def test_a_dead_peer_gives_back_all_it_had(exchange, peer):
    """However often a block was lent to it; others keep theirs."""
    other = FakePeer(exchange, 3)
    handle = lent(exchange, peer)
    exchange.lend(peer, [handle, handle])
    shared = lent(exchange, peer)
    exchange.announce(other, [shared])
    exchange.lend(other, [shared])
    exchange.remove_peer(peer)
    assert exchange.stats().held_blocks == 1
    exchange.remove_peer(peer)
    exchange.remove_peer(other)
    assert is_idle(exchange)
    other.own.close()


@pytest.mark.parametrize("times", [1, 2])
def test_a_release_of_what_was_not_lent_is_refused(exchange, peer, times):
    """A second release, or one of another block, says that the peer is broken."""
    handle = lent(exchange, peer)
    keys = [(handle.arena, handle.block)] * times
    if times == 1:
        keys = [(handle.arena, handle.block + 1)]
    with pytest.raises(ProtocolError, match="gave back block"):
        exchange.returned(peer, keys)


# --- receiving -----------------------------------------------------------------------------------


def test_a_peer_s_block_is_held_by_the_view(exchange, peer):
    """The view is read-only and without a copy; its death returns the block to the peer."""
    handle = peer.make(5)
    view = exchange.receive(peer, handle)
    assert view.readonly
    assert view.tobytes() == b"\x05" * NBYTES
    exchange.settle()
    assert peer.returned == []
    part = view[10:20]
    del view
    exchange.settle()
    assert peer.returned == []
    del part
    assert is_idle(exchange)
    assert peer.returned == [(2, handle.block)]
    assert peer.own.stats().blocks == 0


def test_each_sending_of_a_block_is_released_once(exchange, peer):
    """A model that returns one array twice: two views, two releases, in whatever order."""
    handle = peer.make(5)
    first = exchange.receive(peer, handle)
    second = exchange.receive(peer, peer.send_again(handle))
    del first
    exchange.settle()
    assert second.tobytes() == b"\x05" * NBYTES
    assert peer.own.stats().blocks == 1
    del second
    assert is_idle(exchange)
    assert len(peer.returned) == 2
    assert peer.own.stats().blocks == 0


def test_a_view_outlives_its_peer(exchange, peer):
    """A response that a client reads slowly while the stub dies."""
    view = exchange.receive(peer, peer.make(9))
    exchange.remove_peer(peer)
    peer.own.close()
    assert view.tobytes() == b"\x09" * NBYTES
    del view
    assert is_idle(exchange)
    assert peer.returned == []


def test_an_input_that_is_handed_on_comes_back(exchange, peer):
    """Our own block in a response: held by the view, freed when it and the loan are gone."""
    handle = lent(exchange, peer, 6)
    view = exchange.receive(peer, handle)
    exchange.returned(peer, [(handle.arena, handle.block)])
    exchange.settle()
    assert view.tobytes() == b"\x06" * NBYTES
    del view
    assert is_idle(exchange)


def test_a_third_peer_s_block_may_be_handed_on(exchange, peer):
    """What was lent to a peer it may send, whoever owns it."""
    owner = FakePeer(exchange, 3)
    handle = owner.make(4)
    view = exchange.receive(owner, handle)
    exchange.announce(peer, [handle])
    exchange.lend(peer, [handle])
    assert peer.announced == [(3, 0)]
    again = exchange.receive(peer, handle)
    exchange.returned(peer, [(3, handle.block)])
    del view
    exchange.settle()
    assert again.tobytes() == b"\x04" * NBYTES
    assert owner.returned == []
    del again
    assert is_idle(exchange)
    assert owner.returned == [(3, handle.block)]
    owner.own.close()


def test_a_segment_that_is_still_under_way_is_fetched(exchange, peer):
    """The boot socket is read when a handle names what is not mapped yet."""
    peer.is_quick = False
    view = exchange.receive(peer, peer.make(3))
    assert view.tobytes() == b"\x03" * NBYTES


def test_bodies_that_nobody_waits_for_are_dropped(exchange, peer):
    """Inline ones and handles; the blocks go home."""
    handle = peer.make(1)
    exchange.discard(peer, [WireTensor("A", 2, (1,), b"x"), tensor(handle)])
    assert is_idle(exchange)
    assert peer.returned == [(2, handle.block)]


# --- false handles -------------------------------------------------------------------------------


def _replace(handle: Handle, **fields: int) -> Handle:
    return msgspec.structs.replace(handle, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"block": 99},
        {"arena": 77},
        {"offset": 64},
        {"nbytes": NBYTES + 1_000_000},
        {"segment": 5},
    ],
    ids=str,
)
def test_a_false_handle_of_our_own_block_is_refused(exchange, peer, fields):
    """Whatever field lies; the honest handle works afterwards."""
    handle = lent(exchange, peer)
    with pytest.raises(ProtocolError):
        exchange.receive(peer, _replace(handle, **fields))
    with pytest.raises(ProtocolError):
        exchange.discard(peer, [tensor(_replace(handle, **fields))])
    view = exchange.receive(peer, handle)
    assert len(view) == NBYTES


def test_a_block_that_was_never_lent_is_refused(exchange, peer):
    """Another request's input, guessed."""
    secret = exchange.allocate_now(NBYTES)
    with pytest.raises(ProtocolError, match="which it does not have"):
        exchange.receive(peer, secret.handle)
    with pytest.raises(ProtocolError, match="which it does not have"):
        exchange.discard(peer, [tensor(secret.handle)])
    secret.release()
    assert is_idle(exchange)


def test_a_block_that_was_given_back_is_refused(exchange, peer):
    """Its memory may be another request's by now."""
    handle = lent(exchange, peer)
    exchange.returned(peer, [(handle.arena, handle.block)])
    with pytest.raises(ProtocolError, match="which it does not have"):
        exchange.receive(peer, handle)


def test_another_peer_s_block_is_refused(exchange, peer):
    """Unless it was lent to this one."""
    owner = FakePeer(exchange, 3)
    view = exchange.receive(owner, owner.make(4))
    handle = Handle(3, 1, 0, 0, NBYTES)
    with pytest.raises(ProtocolError, match="which it does not have"):
        exchange.receive(peer, handle)
    del view
    owner.own.close()


@pytest.mark.parametrize("fields", [{"segment": 4}, {"offset": 1 << 30}, {"nbytes": 1 << 40}])
def test_a_handle_outside_the_peer_s_own_memory_is_refused(exchange, peer, fields):
    """A stub may lie about its own arena, too."""
    handle = peer.make(1)
    with pytest.raises(ProtocolError):
        exchange.receive(peer, _replace(handle, **fields))
