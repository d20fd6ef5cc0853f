# SPDX-License-Identifier: Apache-2.0
"""What is around a request in flight: where it waits, where it runs, and what was called for it.

As response_factory.py needs them; the scheduler, what is at one stub (in_flight.py), and the calls
of models (call_desk.py) are that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from actorserve.actors.response_factory import ResponseFactory
    from actorserve.state.statistics import VersionStatistics


class Place(Protocol):
    """What has requests at one stub (InFlight), as a factory needs it; `owner` is the instance."""

    owner: object

    def tell_cancelled(self, factory: ResponseFactory) -> None:
        """Set the request's cancel word."""

    def extend_credit(self, factory: ResponseFactory) -> None:
        """Let its sender send more, as the client has taken some."""

    def lift_credit(self, factory: ResponseFactory) -> None:
        """Let its sender send whatever it likes: it is dropped."""

    def disown(self) -> None:
        """Have the stub end what it has kept of requests without a client."""


class Child(Protocol):
    """A call that was made for a request."""

    def parent_cancelled(self) -> None:
        """Hear that the request was cancelled; others may want the call still."""


class Desk(Protocol):
    """Where requests wait and run: the scheduler, as a factory needs it."""

    retries: int
    counts: VersionStatistics

    def remove(self, factory: ResponseFactory) -> None:
        """Take a queued request out."""

    def ended(self, factory: ResponseFactory) -> None:
        """Count the end of a request."""
