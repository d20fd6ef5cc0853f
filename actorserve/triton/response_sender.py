# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.InferenceResponseSender`: sends a request's responses one by one.

What it sends with is a Reply, which whoever runs the model makes for each request.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from actorserve.triton.error import TritonModelException
from actorserve.triton.response import InferenceResponse


class Reply(Protocol):
    """The way back of one request. Any thread may use it."""

    def sender(self) -> InferenceResponseSender:
        """Return the request's sender: the same one each time."""

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send; raises TritonModelException for what may not be sent."""

    def is_cancelled(self) -> bool:
        """Tell whether the client has given up."""


class InferenceResponseSender:
    """Sends responses; may outlive `execute` and be used from any thread."""

    __slots__ = ("__weakref__", "_reply")

    _reply: Reply

    def __init__(self) -> None:
        raise TypeError("InferenceResponseSender: objects come from get_response_sender() only")

    @classmethod
    def _of(cls, reply: Reply) -> InferenceResponseSender:
        sender = cls.__new__(cls)
        sender._reply = reply
        return sender

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, or only the end of them (`flags` RESPONSE_COMPLETE_FINAL).

        Waits while the client does not read. Raises TritonModelException where the flags are
        unknown, nothing is sent, the sender is closed, or the model may not send that; TypeError
        for another type.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            raise TypeError(
                f"send(): response must be an InferenceResponse or None, got {type(response)}"
            )
        if not isinstance(flags, int):
            raise TypeError(f"send(): flags must be an int, got {type(flags)}")
        self._reply.send(response, flags)

    def is_cancelled(self) -> bool:
        """Tell whether the client has given up."""
        return self._reply.is_cancelled()


class NoReply:
    """What stands in a request that the model itself made: it is answered to the model."""

    def sender(self) -> InferenceResponseSender:
        """Return a sender that refuses."""
        return InferenceResponseSender._of(self)

    def send(self, response: InferenceResponse | None, flags: int) -> NoReturn:
        """Refuse."""
        raise TritonModelException(
            "Unable to send response. Response sender has no reference to the decoupled state of "
            "the model."
        )

    def is_cancelled(self) -> NoReturn:
        """Refuse."""
        raise TritonModelException(
            "is_cancelled is for requests that execute was given, not for those that a model makes."
        )


def check_sending(
    response: InferenceResponse | None, flags: int, *, decoupled: bool, sent: int, is_closed: bool
) -> None:
    """Raise TritonModelException for what may not be sent; `sent` counts the responses before.

    `is_closed` says that the end was sent. A model that is not decoupled may send that after its
    one response, which has ended the request already. The order of the checks and the texts are
    the real server's.
    """
    if flags not in (0, 1):
        raise TritonModelException("Unable to send response. Unsupported flag provided.")
    if response is None and not flags:
        raise TritonModelException(
            "Inference Response object must be provided when the response flags is set to zero."
        )
    if is_closed:
        raise TritonModelException("Unable to send response. Response sender has been closed.")
    if not decoupled and sent and response is not None:
        raise TritonModelException(
            "Unable to send response. Non-decoupled model cannot send more than one response."
        )
    if not decoupled and not sent and response is None:
        raise TritonModelException(
            "Unable to send response. Non-decoupled model cannot send complete final before "
            "sending a response."
        )
