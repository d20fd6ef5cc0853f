# SPDX-License-Identifier: Apache-2.0
"""The way back of one request in a stub: every request gets its end, whatever the model does.

    execute ─► send, send, FINAL                           in any thread, also after it returned
            ─► raises ─► fail
            ─► lets the sender and the request go ──► finalizer ─► the control thread ─► an error

A request that execute leaves without an answer stays open for as long as the model has it, or its
sender: it may send later, from anywhere. What a sender needs is made when the model asks for one
(sending.py), so that requests which are answered by what execute returns cost nothing more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from actorserve.actors.bodies import Room
from actorserve.actors.replies import Replies, error_response, thread_errors
from actorserve.actors.sending import Sending
from actorserve.triton.error import TritonModelException
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_sender import InferenceResponseSender, check_sending
from actorserve.wire.messages import WireRequest, WireResponse

_NEVER_TAKEN = "execute returned None, and the request was dropped without a response sender"
_DROPPED = "the response sender was dropped before the final response was sent"


class Reply:
    """The way back of one request; see triton.response_sender.Reply."""

    __slots__ = ("_guard", "_is_answered", "_replies", "_sending", "wire")

    def __init__(self, replies: Replies, wire: WireRequest) -> None:
        self.wire = wire
        self._replies = replies
        self._is_answered = False  # its end is the batch's to bring
        self._sending: Sending | None = None
        self._guard: _Guard | None = None

    # --- triton.response_sender.Reply ------------------------------------------------------------

    def sender(self) -> InferenceResponseSender:
        """Return the request's sender."""
        replies = self._replies
        if replies.end.is_severed:
            return InferenceResponseSender._of(self)
        with replies.lock:
            sending = self._sending
            if sending is None:
                sending = Sending(replies, self.wire, is_over=self._is_answered)
                self._watch(sending)
                assert self._guard is not None
                sending.is_over |= self._guard.is_disowned
                self._sending = sending
                if self._is_answered:  # meanwhile: see `answered`
                    sending.is_over = sending.is_closed = True
            sender = sending.sender() if sending.sender is not None else None
            if sender is None:
                sender = InferenceResponseSender._of(self)
                sending.sender = weakref.ref(sender)
            return sender

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send a response, or the bare end; see InferenceResponseSender.send."""
        replies, sending = self._replies, self._sending
        if replies.end.is_severed or sending is None:
            raise TritonModelException(
                "Unable to send response. The request belongs to the process that forked this one."
            )
        is_within = sending.is_mine
        with sending.lock:
            wire = self._wire(sending, response, flags)
            if wire is None:
                return
            if is_within:
                sending.keep(wire)
                return
            place = sending.put(wire)
        sending.leave(place, waits=True)

    def _wire(
        self, sending: Sending, response: InferenceResponse | None, flags: int
    ) -> WireResponse | None:
        """Return what is to be sent; None for the end of what has ended with its one response."""
        replies = self._replies
        decoupled = replies.decoupled
        check_sending(
            response, flags, decoupled=decoupled, sent=sending.sent, is_closed=sending.is_closed
        )
        if flags:
            sending.is_closed = True
        if sending.is_over:
            return None
        is_final = bool(flags) or not decoupled
        if response is None:
            wire = WireResponse(self.wire.id, [], None, "{}", True, True)
        else:
            sending.sent += 1
            wire = replies.wire_response(self.wire, response, Room(), final=is_final)
            wire = replies.settled(wire)
        sending.is_over = is_final
        return wire

    def is_cancelled(self) -> bool:
        """Tell whether the client has given up: a look at the health page."""
        wire = self.wire
        if self._guard is not None and self._guard.is_disowned:
            return True  # the slot may be another's by now
        if wire.cancel_slot < 0:
            return False
        return self._replies.end.page.is_cancelled(wire.cancel_slot, wire.id)

    # --- triton.flow.Flow ------------------------------------------------------------------------

    def watch_cancel(self, on_cancel: Callable[[], object]) -> None:
        """Have `on_cancel` called when the client gives up; see triton.flow."""
        self._replies.watch_cancel(self.wire, on_cancel)

    def unwatch_cancel(self) -> None:
        """Forget it."""
        self._replies.unwatch_cancel(self.wire.id)

    def when_drained(self, on_drained: Callable[[], None]) -> bool:
        """Have `on_drained` called when all that was sent has gone; False where it has already."""
        sending = self._sending
        return sending is not None and sending.when_drained(on_drained)

    # --- what runs the model ---------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether its end is on its way: with the batch, or before it."""
        sending = self._sending
        return self._is_answered if sending is None else sending.is_done

    def answered(self) -> bool:
        """Hear that the batch brings its end; False where it has one already.

        Without a lock, as all requests of plain models go here: the flag is set before the look
        for a sender, and who makes a sender looks for the flag afterwards.
        """
        self._is_answered = True
        sending = self._sending
        if sending is None:
            return True
        with sending.lock:
            was_over = sending.is_over
            if not was_over:
                sending.is_over = sending.is_closed = sending.is_done = True
        sending.catch_up()
        return not was_over

    def fail(self, text: str) -> bool:
        """End it with an error, unless it has an end; True where the batch has to bring that."""
        self._is_answered = True
        sending = self._sending
        if sending is None:
            return True
        with sending.lock:
            was_over = sending.is_over
            sending.is_over = sending.is_closed = True
        if was_over:
            sending.catch_up()
            return False
        sending.end(error_response(self.wire.id, text))
        return False

    def note_cause(self, text: str) -> None:
        """Remember what ended code of the model's that could have answered; see failed_code.py."""
        if self._guard is not None:
            self._guard.cause = text

    def stay_open(self) -> None:
        """Hear that the batch brings nothing: what the model has kept of it may answer later."""
        with self._replies.lock:
            if self._guard is None:
                self._watch(None)

    def _watch(self, sending: Sending | None) -> None:
        """See to it that the request ends when nobody can answer it any more."""
        if self._guard is None:
            self._guard = _Guard(self._replies, self.wire.id)
        self._guard.sending = sending


class _Guard:
    """Goes with its reply; ends a request that has no end then. Requests with answers have none."""

    __slots__ = ("__weakref__", "_replies", "_request", "cause", "is_disowned", "sending")

    def __init__(self, replies: Replies, request: int) -> None:
        self._replies = replies
        self._request = request
        self.sending: Sending | None = None
        self.cause = ""  # what ended the code that could have answered
        self.is_disowned = False
        replies.keep(request, self)

    def disown(self, wire: WireResponse) -> None:
        """End the request: nobody is left to hear of it. Control thread."""
        with self._replies.lock:
            self.is_disowned = True
            sending = self.sending
        if sending is not None:
            sending.disown(wire)
        else:
            self._replies.send(wire)

    def __del__(self) -> None:
        sending = self.sending
        self._replies.forget(self._request)
        is_over = self.is_disowned if sending is None else sending.is_over
        if self._replies.end.is_severed or is_over:
            return
        why = _NEVER_TAKEN if sending is None else _DROPPED
        cause = self.cause or getattr(thread_errors, "text", "")
        text = f"{why}: {cause}" if cause else why
        self._replies.abandon(self._request, sending, text)
