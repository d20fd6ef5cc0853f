# SPDX-License-Identifier: Apache-2.0
"""Calls to other models from processes that a model has forked, such as a multiprocessing.Pool's.

    forked child                                  stub
    call ─► memfd with the request ─ a socket ──► relay thread ─► Infer, like any other call
         ◄─ memfd with the response ─ its pair ◄─ whoever reads the answer

A forked child owns no end of the stub's channel. What it inherits is one end of a socket pair,
made before the fork; with each call it sends the descriptor of the request's bytes, and of a
socket of its own for the answer, which says end of file when the stub dies. Only calls with one
response go this way, as in the real server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Callable

from actorserve.errors import ProtocolError
from actorserve.triton.error import TritonModelException
from actorserve.wire.codec import Decoder, encode
from actorserve.wire.messages import CallResponded, Infer

_decode_infer: Decoder[Infer] = Decoder(Infer, "of a forked child")
_decode_answer: Decoder[CallResponded] = Decoder(CallResponded, "to a forked child")

Respond = Callable[[CallResponded], None]


class ForkRelay:
    """Both ends: the stub serves, a forked child calls. One for a stub."""

    def __init__(self, serve: Callable[[Infer, Respond], None]) -> None:
        """`serve` makes a call for a child; its answer goes to `Respond`, once, in any thread."""
        self._serve = serve
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._lock = threading.Lock()
        os.register_at_fork(before=self._before, after_in_child=self._in_child)

    def _before(self) -> None:
        """Make the socket pair and its reader before the first fork."""
        with self._lock:
            if self._pair is None:
                self._pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                threading.Thread(
                    target=self._run, args=(self._pair[0],), name="actorserve-relay", daemon=True
                ).start()

    def _in_child(self) -> None:
        """Keep the sending end only; the receiving one is the stub's, and tells of its death."""
        self._lock = threading.Lock()
        if self._pair is not None:
            self._pair[0].close()

    # --- the stub --------------------------------------------------------------------------------

    def _run(self, incoming: socket.socket) -> None:
        while True:
            _, fds, _, _ = socket.recv_fds(incoming, 1, 2)
            try:
                self._take(fds)
            except (OSError, ProtocolError):
                traceback.print_exc()  # that child gets an end of file

    def _take(self, fds: list[int]) -> None:
        if len(fds) != 2:
            for fd in fds:
                os.close(fd)
            raise ProtocolError(f"a forked child sent {len(fds)} descriptors, expected 2")
        answer = socket.socket(fileno=fds[0])
        try:
            message = _decode_infer(_read(fds[1]))
        except BaseException:
            answer.close()
            raise

        def respond(responded: CallResponded) -> None:
            # A child that is gone needs none.
            with contextlib.suppress(OSError), answer:
                _send(answer, encode(responded))

        self._serve(message, respond)

    # --- a forked child --------------------------------------------------------------------------

    def call(self, message: Infer) -> CallResponded:
        """Make a call and wait for its answer. Raises TritonModelException without a stub."""
        if self._pair is None:
            raise TritonModelException("BLS is not possible in this process.")
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with mine:
            try:
                with theirs:
                    _send(self._pair[1], encode(message), theirs.fileno())
                _, fds, _, _ = socket.recv_fds(mine, 1, 1)
            except OSError:
                fds = []
            if not fds:
                raise TritonModelException(
                    "An error occurred while performing BLS request: the model's process is gone."
                )
            return _decode_answer(_read(fds[0]))


def _send(through: socket.socket, data: bytes, *fds: int) -> None:
    """Send bytes of any length: by the descriptor of an unnamed file."""
    body = os.memfd_create("actorserve-relay", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(body), "wb") as file:
            file.write(data)
        socket.send_fds(through, [b"\0"], [*fds, body])
    finally:
        os.close(body)


def _read(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()
