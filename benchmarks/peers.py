# SPDX-License-Identifier: Apache-2.0
"""The peers of a lane: what else carries small messages from one Python process to another.

Each function floods a forked partner with `count` messages and returns messages per second, from
the first send to the partner's answer to the last. With `is_object` the payload is a tuple that
the peer has to turn into bytes and back by its own means.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.partner import Partner
from benchmarks.sampling import CannotRun

_fork = multiprocessing.get_context("fork")


def sizes(count: int) -> tuple[int, int]:
    """Return how many messages come before the answer: in the warm-up, and then in earnest."""
    return count // 5, count


class Flood(Protocol):
    """A peer's flood."""

    def __call__(self, payload: Any, count: int, *, is_object: bool) -> float:
        """Return messages per second."""


def queue_flood(payload: Any, count: int, *, is_object: bool) -> float:
    """Use multiprocessing.Queue, which pickles whatever it carries."""
    there: Any = _fork.Queue()
    back: Any = _fork.SimpleQueue()

    def work() -> None:
        for size in sizes(count):
            for _ in range(size):
                there.get()
            back.put(b"done")

    with Partner(work):
        rate = _timed(count, lambda: there.put(payload), back.get)
    there.close()
    there.join_thread()
    back.close()
    return rate


def pipe_flood(payload: Any, count: int, *, is_object: bool) -> float:
    """Use multiprocessing.Pipe: bytes as they are, objects pickled."""
    near, far = _fork.Pipe()

    def work() -> None:
        receive = far.recv if is_object else far.recv_bytes
        for size in sizes(count):
            for _ in range(size):
                receive()
            far.send_bytes(b"done")

    send: Callable[[Any], None] = near.send if is_object else near.send_bytes
    with Partner(work):
        rate = _timed(count, lambda: send(payload), near.recv_bytes)
    near.close()
    far.close()
    return rate


def zmq_flood(payload: Any, count: int, *, is_object: bool) -> float:
    """Use pyzmq PUSH and PULL over ipc://: bytes as they are, objects pickled."""
    try:
        import zmq
    except ModuleNotFoundError:
        raise CannotRun("pyzmq is not installed") from None
    folder = Path(tempfile.mkdtemp(prefix="zmq-"))
    there, back = f"ipc://{folder}/there", f"ipc://{folder}/back"

    def work() -> None:
        with zmq.Context() as context:
            pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            pull.connect(there)
            push.connect(back)
            for size in sizes(count):
                for _ in range(size):
                    data = pull.recv()
                    if is_object:
                        pickle.loads(data)
                push.send(b"done")

    def send() -> None:
        push.send(pickle.dumps(payload, pickle.HIGHEST_PROTOCOL) if is_object else payload)

    with Partner(work), zmq.Context() as context:  # the fork comes before zmq's own threads
        push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        push.bind(there)
        pull.bind(back)
        try:
            return _timed(count, send, pull.recv)
        finally:
            push.close(linger=0)
            pull.close(linger=0)


FLOODS: dict[str, Flood] = {
    "mp.Queue": queue_flood,
    "mp.Pipe": pipe_flood,
    "pyzmq": zmq_flood,
}


def _timed(count: int, send: Callable[[], object], wait: Callable[[], object]) -> float:
    """Return messages per second, after a warm-up that does not count."""
    elapsed_s = 0.0
    for size in sizes(count):
        start_s = time.monotonic()
        for _ in range(size):
            send()
        wait()
        elapsed_s = time.monotonic() - start_s
    return count / elapsed_s
