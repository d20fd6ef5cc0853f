# SPDX-License-Identifier: Apache-2.0
"""A stub's replies over a channel's end that only notes: no process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from actorserve.actors.bodies import Bodies
from actorserve.actors.replies import Replies
from actorserve.actors.reply import Reply
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor
from actorserve.wire.messages import Handle, Responded, WireRequest, WireResponse, WireTensor

FINAL = 1
CLOSED = "Response sender has been closed"
decode = msgspec.msgpack.Decoder(Responded).decode


class Page:
    """The credit words of a health page, and who waits."""

    def __init__(self) -> None:
        self.total = 1 << 30
        self.wanting = 0
        self.is_told = True

    def granted(self, slot: int) -> int:
        return self.total

    def want_credit(self, slot: int, request: int) -> int:
        self.wanting = request
        return self.total

    def stop_wanting_credit(self, slot: int) -> None:
        self.wanting = 0

    def is_cancelled(self, slot: int, request: int) -> bool:
        return slot == 7


class End:
    """A stub's channel over a list."""

    arena_id = 2
    devices = None
    max_frame_bytes = 100_000

    def __init__(self) -> None:
        self.page = Page()
        self.is_severed = False
        self.sent: list[WireResponse] = []
        self.on_send: Callable[[WireResponse], None] = lambda response: None
        self.woken = 0
        self.placed = 0

    def send_encoded(self, data: bytes) -> None:
        (response,) = decode(data).responses
        self.on_send(response)
        self.sent.append(response)

    def send(self, message: Any) -> None:
        self.send_encoded(msgspec.msgpack.encode(message))

    def place(self, body: np.ndarray) -> Handle:
        self.placed += 1
        return Handle(2, self.placed, 0, 0, body.nbytes)

    def own(self, handle: Handle) -> Handle:
        return handle

    def forwarded(self, tensors: list[WireTensor]) -> None:
        pass

    def withdraw(self, tensors: list[WireTensor]) -> None:
        pass

    def wake_control(self) -> None:
        self.woken += 1


class World:
    """Replies over one end."""

    def __init__(self, *, decoupled: bool = True) -> None:
        self.end = End()
        bodies = Bodies(self.end, shared_inputs=False)  # type: ignore[arg-type]
        self.replies = Replies(
            self.end,  # type: ignore[arg-type]
            bodies,
            instance="m_0",
            model_path="/m/1/model.py",
            decoupled=decoupled,
        )

    def reply(self, request: int = 1, slot: int = 0) -> Reply:
        """Return the way back of a request."""
        return Reply(self.replies, WireRequest(request, "", [], ["OUT"], cancel_slot=slot))

    def grant(self, total: int, request: int = 1) -> None:
        """Let so many go in all, and tell whoever waits, as the control thread does."""
        self.end.page.total = total
        if self.end.page.wanting == request:
            self.replies.granted([request])

    @property
    def values(self) -> list[Any]:
        """What was sent: numbers, texts of errors, "" for the bare end; a final one in a list."""
        found = []
        for each in self.end.sent:
            value: Any = ""
            if each.error is not None:
                value = each.error.message.rpartition("message: ")[2]
            elif each.outputs:
                data = each.outputs[0].data
                value = len(each.outputs) if isinstance(data, Handle) else int(data[0])
            found.append([value] if each.final else value)
        return found


def answer(number: int, nbytes: int = 1) -> InferenceResponse:
    """Return a response of one number, in so many bytes."""
    return InferenceResponse([Tensor("OUT", np.full(nbytes, number, np.uint8))])
