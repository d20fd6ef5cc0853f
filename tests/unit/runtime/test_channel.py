# SPDX-License-Identifier: Apache-2.0
"""Both ends of a channel in two processes: there and back, backlog, death, and broken wires."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    BootError,
    InternalError,
    ProtocolError,
    ResourceExhausted,
)
from actorserve.process.boot import BootSocket
from actorserve.runtime.exchange import Exchange
from actorserve.runtime.host_end import BACKLOG_MESSAGES, HostEnd
from actorserve.wire.messages import (
    PROTOCOL,
    Attached,
    Execute,
    Executed,
    Finalize,
    Finalized,
    Handle,
    LogRecord,
    Ping,
    Pong,
    ToSupervisor,
    WireRequest,
    WireTensor,
)

PEERS = Path(__file__).with_name("peers.py")
PATIENCE_S = 20.0


class Ear:
    """A listener that keeps all it hears; outputs are received as the supervisor does it."""

    def __init__(self) -> None:
        self.attached: list[Attached] = []
        self.messages: list[ToSupervisor] = []
        self.views: list[memoryview] = []
        self.refused: list[BootError] = []
        self.broken: list[ActorserveError] = []
        self.hung_up = 0
        self.host: Host = None  # type: ignore[assignment]

    def on_attached(self, message: Attached) -> None:
        self.attached.append(message)

    def on_messages(self, messages: list[ToSupervisor]) -> None:
        for message in messages:
            self.messages.append(message)
            if isinstance(message, Executed):
                for response in message.responses:
                    for tensor in response.outputs:
                        assert isinstance(tensor.data, Handle)
                        view = self.host.exchange.receive(self.host.end, tensor.data)
                        self.views.append(view)

    def on_refused(self, error: BootError) -> None:
        self.refused.append(error)

    def on_hung_up(self) -> None:
        self.hung_up += 1

    def on_broken(self, error: ActorserveError) -> None:
        self.broken.append(error)


class Host:
    """The supervisor's side of one channel, and the process at its other end."""

    def __init__(self, behaviour: str) -> None:
        self.exchange = Exchange(1, first_segment_bytes=1 << 20)
        self.ear = Ear()
        self.ear.host = self
        self.end = HostEnd(asyncio.get_running_loop(), self.exchange, 2, self.ear)
        boot, theirs = BootSocket.pair("peer_0")
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, str(PEERS), str(fd), behaviour],
                pass_fds=[fd],
                stdin=subprocess.PIPE,
                cwd=PEERS.parents[3],
            )
        self.end.open(boot, "peer_0")
        self.batches = 0

    async def until(self, condition: Callable[[], object]) -> None:
        """Let the loop turn until the condition holds."""
        deadline_s = monotonic_s() + PATIENCE_S
        while not condition():
            assert monotonic_s() < deadline_s, (self.ear.messages[-5:], self.ear.broken)
            await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.002)

    def send(self, *bodies: bytes, by_handle: bool = True) -> None:
        """Send a batch with one request for each body."""
        tensors = []
        for body in bodies:
            data: bytes | Handle = body
            if by_handle:
                slab = self.exchange.allocate_now(len(body))
                slab.buffer[:] = body
                data = slab.take()
            tensors.append(WireTensor("IN", 2, (len(body),), data))
        self.batches += 1
        requests = [WireRequest(n, "", [tensor], ["OUT"]) for n, tensor in enumerate(tensors)]
        self.end.send(Execute(self.batches, requests), tensors)
        for tensor in tensors:
            if isinstance(tensor.data, Handle):
                self.exchange.drop(tensor.data)

    def executed(self) -> list[int]:
        """Return the numbers of the batches that were answered, in order."""
        return [each.batch for each in self.ear.messages if isinstance(each, Executed)]

    def is_idle(self) -> bool:
        """Whether every block has come back; nobody rings for releases alone."""
        gc.collect()
        self.end.pump()
        stats = self.exchange.stats()
        return stats.held_blocks == 0 and stats.arena.used_bytes == 0

    def close(self) -> None:
        """End both sides."""
        self.ear.views.clear()
        self.end.close()
        self.exchange.close()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(PATIENCE_S)


def run(behaviour: str, test: Callable[[Host], Awaitable[None]]) -> Host:
    """Run a test against a peer that behaves so."""

    async def main() -> Host:
        host = Host(behaviour)
        try:
            await test(host)
        finally:
            host.close()
        return host

    return asyncio.run(main())


# --- there and back ------------------------------------------------------------------------------


def test_the_handshake_says_who_is_there():
    """Protocol, Python and pid of the child; the health mutex is its own for life."""

    async def test(host: Host) -> None:
        await host.until(lambda: host.ear.attached)
        attached = host.ear.attached[0]
        assert (attached.protocol, attached.pid) == (PROTOCOL, host.process.pid)
        assert attached.python == sys.version.split()[0]
        assert host.end.lock.holder() == host.process.pid
        await host.until(lambda: host.end.page.stats().beats > 0)

    run("echo", test)


@pytest.mark.parametrize("nbytes", [1, 100, 5000, 3_000_000])
def test_inputs_are_handed_on(nbytes):
    """The block that was sent is the block that comes back; afterwards nothing is held."""

    async def test(host: Host) -> None:
        for _ in range(3):
            bodies = [bytes([n]) * nbytes for n in (1, 2, 3)]
            host.send(*bodies)
            await host.until(lambda: len(host.ear.views) == 3)
            assert [view.tobytes() for view in host.ear.views] == bodies
            host.ear.views.clear()
            await host.until(host.is_idle)

    run("echo", test)


def test_outputs_come_from_the_peer_s_own_memory():
    """Its views are ours until they die; then the block is the peer's again."""

    async def test(host: Host) -> None:
        for number in range(5):
            host.send(bytes([number]) * 50_000)
        await host.until(lambda: len(host.ear.views) == 5)
        assert all(view.readonly for view in host.ear.views)
        bodies = [bytes([2 * number]) * 50_000 for number in range(5)]
        assert [view.tobytes() for view in host.ear.views] == bodies
        host.ear.views.clear()
        await host.until(host.is_idle)
        host.send(b"x" * 50_000)
        await host.until(lambda: len(host.ear.views) == 1)
        host.end.send_control(Ping(1))
        await host.until(lambda: any(isinstance(each, Pong) for each in host.ear.messages))
        pong = next(each for each in host.ear.messages if isinstance(each, Pong))
        assert 50_000 <= pong.arena_used_bytes < 100_000

    run("double", test)


def test_small_bodies_travel_inside_the_message():
    """No block is used for them."""

    async def test(host: Host) -> None:
        host.send(b"\x01\x02", by_handle=False)
        await host.until(lambda: host.ear.views)
        assert host.ear.views[0].tobytes() == b"\x02\x04"
        assert host.exchange.stats().arena.allocations == 0

    run("double", test)


def test_finalize_is_the_last_message():
    """The peer answers it and ends; its end is heard."""

    async def test(host: Host) -> None:
        host.end.send(Finalize())
        await host.until(lambda: host.ear.hung_up)
        assert isinstance(host.ear.messages[-1], Finalized)
        assert host.process.wait(PATIENCE_S) == 0

    run("echo", test)


# --- full rings ----------------------------------------------------------------------------------


def test_what_the_ring_cannot_hold_waits_and_keeps_its_order():
    """The supervisor never blocks on a peer that does not read; then all of it arrives."""
    body = b"x" * 2000

    async def test(host: Host) -> None:
        while host.end.stats().backlog < 200:
            host.send(body, by_handle=False)
        sent = host.batches
        assert sent > 400
        assert host.process.stdin is not None
        host.process.stdin.write(b"go\n")
        host.process.stdin.flush()
        await host.until(lambda: len(host.executed()) == sent)
        assert host.executed() == list(range(1, sent + 1))
        assert host.end.stats().backlog == 0

    run("count", test)


def test_the_backlog_is_bounded():
    """One more message than that is refused, and nothing of it is lent."""
    body = b"x" * 2000

    async def test(host: Host) -> None:
        while host.end.stats().backlog < BACKLOG_MESSAGES:
            host.send(body, by_handle=False)
        with pytest.raises(ResourceExhausted, match="wait for a stub that does not read"):
            host.send(body)
        await host.until(lambda: host.exchange.stats().arena.blocks == 1)
        blocks = host.exchange.stats()
        assert blocks.held_blocks == 1  # the test's own, which `send` had no chance to drop

    run("count", test)


def test_a_flood_from_the_peer_arrives_whole_and_in_order():
    """Four times what its ring holds: it waits for room as often as it takes."""

    async def test(host: Host) -> None:
        host.send(b"go", by_handle=False)
        await host.until(lambda: len(host.ear.messages) == 20_000)
        lines = [each.line for each in host.ear.messages if isinstance(each, LogRecord)]
        assert lines == list(range(20_000))

    run("flood", test)


def test_a_finalizer_that_sends_while_its_thread_is_sending_is_refused():
    """It would wait for itself; another thread waits a moment, and is refused then."""

    async def test(host: Host) -> None:
        host.send(b"go", by_handle=False)
        await host.until(lambda: len(host.ear.messages) == 3)
        files = [each.file for each in host.ear.messages if isinstance(each, LogRecord)]
        assert files == ["sent", "tried", "[False, False, True]"]

    run("tries", test)


# --- ends ----------------------------------------------------------------------------------------


def test_the_last_words_of_a_dead_peer_are_read():
    """What it had published counts, and its loans come back."""

    async def test(host: Host) -> None:
        host.send(b"\x07" * 10_000)
        await host.until(lambda: host.ear.hung_up)
        host.end.close()
        assert host.ear.messages == [LogRecord(0, "last", 7, "word")]
        assert host.is_idle()
        host.end.send(Finalize())  # to nobody: nothing happens
        host.end.close()

    run("exits", test)


def test_a_peer_ends_with_the_supervisor():
    """PeerGone in its main thread, whatever it waits for."""

    async def test(host: Host) -> None:
        await host.until(lambda: host.ear.attached)

    assert run("echo", test).process.returncode == 7


def test_a_fork_of_the_peer_says_and_returns_nothing():
    """Its messages and releases would be its parent's."""

    async def test(host: Host) -> None:
        host.send(b"\x05" * 10_000)
        await host.until(lambda: len(host.ear.views) == 1)
        assert [each.file for each in host.ear.messages if isinstance(each, LogRecord)] == [
            "parent"
        ]
        assert host.ear.views[0].tobytes() == b"\x05" * 10_000
        host.ear.views.clear()
        await host.until(host.is_idle)
        assert host.ear.broken == []

    run("forks", test)


# --- broken wires --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("garbage", ""),
        ("another_s", "which it does not have"),
        ("twice", "gave back block"),
    ],
)
def test_a_peer_that_breaks_the_wire_is_told_apart(behaviour, text):
    """One on_broken, no exception in the loop, and everything can still be closed."""

    async def test(host: Host) -> None:
        host.send(b"x" * 10_000)
        await host.until(lambda: host.ear.broken)
        assert isinstance(host.ear.broken[0], ProtocolError)
        assert text in host.ear.broken[0].message
        host.end.close()
        assert host.is_idle()

    run(behaviour, test)


def test_a_peer_of_another_protocol_is_refused():
    """With the likely cause."""

    async def test(host: Host) -> None:
        await host.until(lambda: host.ear.refused)
        assert "is another version of actorserve installed" in host.ear.refused[0].message
        assert host.ear.attached == []

    run("stranger", test)


def test_a_peer_that_announces_another_s_memory_breaks_the_wire():
    """Only its own arena is its to announce."""

    async def test(host: Host) -> None:
        await host.until(lambda: host.ear.broken)
        assert "announced a segment of arena 1" in host.ear.broken[0].message

    run("meddler", test)


def test_a_fault_of_our_own_in_a_message_ends_that_peer_only(caplog):
    """The loop goes on, the log has the stack, the owner hears of it."""

    async def test(host: Host) -> None:
        def fail(messages: list[ToSupervisor]) -> None:
            del host.ear.on_messages
            raise RuntimeError("a fault of ours")

        host.ear.on_messages = fail  # type: ignore[method-assign]
        host.send(b"x", by_handle=False)
        await host.until(lambda: host.ear.broken)
        assert isinstance(host.ear.broken[0], InternalError)
        assert "a fault of ours" in host.ear.broken[0].message

    run("double", test)
    assert "a fault of ours" in caplog.text
