# SPDX-License-Identifier: Apache-2.0
"""Stubs for the channel tests: each is a process that behaves in one way. Run as a script.

`python peers.py <descriptor of the boot socket> <behaviour>`
"""

from __future__ import annotations

import os
import socket
import sys
import threading

import numpy as np

from actorserve.process.boot import BootSocket, PeerGone
from actorserve.runtime.peer_end import PeerEnd
from actorserve.wire.codec import encode
from actorserve.wire.messages import (
    Attached,
    Execute,
    Executed,
    Finalize,
    Finalized,
    Handle,
    Hello,
    LogRecord,
    ToStub,
    WireResponse,
    WireTensor,
)


class Peer(PeerEnd):
    """The end of a stub that does one thing after the other."""

    def receive(self) -> ToStub:
        """Return the next message of the work lane, waiting for it. Raises PeerGone."""
        while not self._pending:
            frames = self._work.drain()
            if frames:
                self._received += len(frames)
                self._pending.extend([self._decode(data) for _, data in frames])
            elif self._work.park():
                self._sleep(self._main_bell, None)
                self._work.unpark()
                if self._releasing:
                    self.settle()  # the ring of releases has room
        return self._pending.popleft()


def array_of(end: Peer, tensor: WireTensor) -> np.ndarray:
    """Return a tensor's bytes, without a copy where it came by handle."""
    if isinstance(tensor.data, Handle):
        return end.view(tensor.data, writable=True)
    return np.frombuffer(tensor.data, np.uint8)


def answer(end: Peer, message: Execute, arrays: list[np.ndarray]) -> None:
    """Answer the batch's requests, one array each."""
    responses = [
        WireResponse(request.id, [WireTensor("OUT", 2, array.shape, end.place(array))])
        for request, array in zip(message.requests, arrays)
    ]
    end.send(Executed(message.batch, responses))


def echo(end: Peer) -> None:
    """Hand each input on as it lies."""
    while isinstance(message := end.receive(), Execute):
        arrays = [array_of(end, request.inputs[0]) for request in message.requests]
        answer(end, message, arrays)
        del arrays, message
        end.settle()
    end.send(Finalized())


def double(end: Peer) -> None:
    """Answer with arrays of its own, and write into the inputs."""
    while isinstance(message := end.receive(), Execute):
        arrays = []
        for request in message.requests:
            view = array_of(end, request.inputs[0])
            arrays.append(view * 2)
            if view.flags.writeable:
                view[:] = 0
            del view
        answer(end, message, arrays)
        del arrays, message
        end.settle()


def count(end: Peer) -> None:
    """Wait for a line on stdin, then answer each batch with its number."""
    sys.stdin.readline()
    while isinstance(message := end.receive(), Execute):
        end.send(Executed(message.batch, []))


def flood(end: Peer) -> None:
    """Send far more than the ring holds."""
    end.receive()
    for number in range(20_000):
        end.send(LogRecord(0, "x" * 200, number, ""))
    end.receive()


def tries(end: Peer) -> None:
    """Try to send: in the middle of sending, from another thread meanwhile, and as one should."""
    end.receive()
    found: list[bool] = []
    up = end._up
    data = encode(LogRecord(0, "tried", 0, ""))

    class Middle:
        """A ring in whose middle somebody else would like to send."""

        def try_send(self, frame: bytes) -> bool:
            end._up = up
            found.append(end.try_send_encoded(data))
            thread = threading.Thread(target=lambda: found.append(end.try_send_encoded(data)))
            thread.start()
            thread.join()
            return up.try_send(frame)

    end._up = Middle()  # type: ignore[assignment]
    end.send(LogRecord(0, "sent", 1, ""))
    found.append(end.try_send_encoded(data))
    end.send(LogRecord(0, str(found), 2, ""))
    end.receive()


def garbage(end: Peer) -> None:
    """Send a frame that is no message."""
    end.receive()
    end.send_encoded(b"\xc1 this is no msgpack")
    end.receive()


def another_s(end: Peer) -> None:
    """Answer with a block that it was never lent."""
    message = end.receive()
    assert isinstance(message, Execute)
    lent = message.requests[0].inputs[0].data
    assert isinstance(lent, Handle)
    false = Handle(lent.arena, lent.block + 1, lent.segment, lent.offset, lent.nbytes)
    tensor = WireTensor("OUT", 2, (lent.nbytes,), false)
    end.send(Executed(message.batch, [WireResponse(message.requests[0].id, [tensor])]))
    end.receive()


def twice(end: Peer) -> None:
    """Give a block back twice."""
    message = end.receive()
    assert isinstance(message, Execute)
    lent = message.requests[0].inputs[0].data
    assert isinstance(lent, Handle)
    for _ in range(2):
        end._work.try_release(lent.arena, lent.block)
    end._work.flush_releases()
    end.send(Executed(message.batch, []))
    end.receive()


def exits(end: Peer) -> None:
    """Send a last word and die with a lent block."""
    message = end.receive()
    assert isinstance(message, Execute)
    view = array_of(end, message.requests[0].inputs[0])
    end.send(LogRecord(0, "last", int(view[0]), "word"))
    os._exit(0)


def forks(end: Peer) -> None:
    """Fork while it serves: the child says nothing, whatever it tries."""
    message = end.receive()
    assert isinstance(message, Execute)
    view = array_of(end, message.requests[0].inputs[0])
    child = os.fork()
    end.send(LogRecord(0, "child" if child == 0 else "parent", 0, ""))
    if child == 0:
        del view
        end.settle()
        os._exit(0)
    os.waitpid(child, 0)
    answer(end, message, [view])
    del view
    end.settle()
    end.receive()


def stranger(boot: BootSocket) -> None:
    """Answer Hello with another protocol's number."""
    message, _ = boot.recv(10)
    assert isinstance(message, Hello)
    boot.send(Attached(message.protocol + 1, "3.99", os.getpid()))
    boot.recv(10)


def meddler(boot: BootSocket) -> None:
    """Announce a segment of the supervisor's own arena."""
    from actorserve.shm.segment import Segment
    from actorserve.wire.messages import MapSegment

    boot.recv(10)
    segment = Segment.create(4096)
    boot.send(MapSegment(1, 0, segment.nbytes), [segment.fd])
    boot.recv(10)


def main() -> None:
    """Take the socket and behave."""
    boot = BootSocket(socket.socket(fileno=int(sys.argv[1])))
    behaviour = globals()[sys.argv[2]]
    try:
        if behaviour in (stranger, meddler):
            behaviour(boot)
            return
        end = Peer(boot)
        threading.Thread(target=serve_control, args=(end,), daemon=True).start()
        behaviour(end)
    except PeerGone:
        os._exit(7)


def serve_control(end: Peer) -> None:
    """Run the control thread; its end is the main thread's business."""
    try:
        end.serve_control()
    except PeerGone:
        pass


if __name__ == "__main__":
    assert Finalize  # what ends `echo`
    main()
