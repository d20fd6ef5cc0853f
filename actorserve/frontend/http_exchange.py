# SPDX-License-Identifier: Apache-2.0
"""One request and its reply on a connection, where uvicorn's protocol would have an ASGI cycle.

An exchange is parsed as its bytes arrive but runs only when it is its turn: `start()` is called
once, when every earlier request of the connection has been answered. It then replies exactly
once, unless the peer is gone (`abandon()`), and says nothing after that.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from actorserve.errors import ActorserveError, InternalError
from actorserve.frontend.http_front import HttpFront, logger
from actorserve.frontend.http_head import reply_head
from actorserve.frontend.v2_response import EncodedBody, encode_error, retry_after_s
from actorserve.frontend.v2_values import View


class Connection(Protocol):
    """What an exchange uses of its connection."""

    front: HttpFront

    def send_interim(self, head: bytes) -> None:
        """Write an interim response (100 Continue)."""

    def send_reply(self, exchange: Exchange, head: bytes, pieces: list[View], nbytes: int) -> None:
        """Write a reply; the exchange is complete when the transport has taken all of it."""

    @property
    def is_write_paused(self) -> bool:
        """Whether the peer takes less than is written."""

    def send_part(self, data: bytes) -> None:
        """Write a part of a reply that `send_reply` ends."""

    def sync_reading(self) -> None:
        """Read from the peer, or do not, as the current exchange needs it."""

    def consider_direct(self) -> None:
        """Receive the rest of the body straight into its places, where that pays."""


class _NoEvent:
    """Stands where uvicorn's protocol wakes up an ASGI app."""

    def set(self) -> None:
        """Do nothing: exchanges are called, they do not wait."""


class Exchange:
    """The part that all exchanges share: replying once, and steps that wait beside the loop.

    `response_complete`, `disconnected`, `keep_alive` and `message_event` are what uvicorn's
    protocol reads and writes of its cycles. `is_received` is true when the request is complete,
    `is_stalled` while no more of its body should be read. A stream (`is_stream`) hears of its
    peer's end whatever else waits, and of the peer's catching up.
    """

    message_event = _NoEvent()
    # Most requests never touch most of these: as class attributes they cost nothing then.
    is_stalled = False
    is_stream = False
    response_complete = False
    disconnected = False
    is_received = False
    _is_answered = False
    _steps = 0

    def __init__(self, connection: Connection, keep_alive: bool) -> None:
        self.connection = connection
        self.keep_alive = keep_alive

    def start(self) -> None:
        """Begin: it is this exchange's turn."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Stop: the peer is gone."""
        self.disconnected = True
        if not self._steps:
            self.release()

    def release(self) -> None:
        """Give back what the exchange holds; idempotent."""

    def on_writable(self) -> None:
        """The peer has caught up with what was written."""

    # --- replying ---

    def reply(self, body: EncodedBody, status: int = 200, extra: bytes = b"") -> None:
        """Send the one reply; anything after it is dropped."""
        if self._is_answered or self.disconnected:
            return
        self._is_answered = True
        head = reply_head(status, body, self.keep_alive, extra)
        self.connection.send_reply(self, head, body.pieces, body.nbytes)

    def reply_status(self, status: int, message: str, extra: bytes = b"") -> None:
        """Send an error as the reply."""
        self.connection.front.errors += 1
        text = encode_error(message)
        self.reply(EncodedBody([text], len(text), None), status, extra)

    def reply_error(self, error: ActorserveError) -> None:
        """Send an error of the server's as the reply."""
        wait_s = retry_after_s(error)
        extra = b"" if wait_s is None else b"retry-after: %d\r\n" % wait_s
        self.reply_status(error.http_status, error.message, extra)

    # --- steps that wait ---

    def run_step(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step that waits for something beside the loop.

        What the exchange holds is not released under it, even when the peer goes meanwhile.
        """
        self._steps += 1
        self.connection.front.start_task(self._guarded(step))

    async def _guarded(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except ActorserveError as error:
            self.on_failure(error)
        except Exception:
            self.on_failure(unexpected())
        finally:
            self._steps -= 1
            if not self.disconnected:
                self.connection.sync_reading()
            elif not self._steps:
                self.release()

    def on_failure(self, error: ActorserveError) -> None:
        """A step failed."""
        self.reply_error(error)


def unexpected() -> InternalError:
    """Log the exception that is being handled and return what the client is told."""
    logger.exception("a request failed in the HTTP front end")
    return InternalError("the HTTP front end failed on this request; the server's log says why")


class Refusal(Exchange):
    """The last reply of a connection whose bytes cannot be read any further."""

    def __init__(self, connection: Connection, status: int, message: str) -> None:
        super().__init__(connection, keep_alive=False)
        self._status = status
        self._message = message

    def start(self) -> None:
        """Reply at once."""
        self.reply_status(self._status, self._message)
