# SPDX-License-Identifier: Apache-2.0
"""An order to the system itself, whose end somebody waits for."""

from __future__ import annotations

from actorserve.runtime.waiting import Blocker


class Errand:
    """The owner of an Answer that is no message: a spawn, a stop."""

    __slots__ = ("_what", "door")

    def __init__(self, door: Blocker, what: str) -> None:
        self.door = door
        self._what = what

    def describe(self) -> str:
        """See Owner."""
        return self._what

    def given_up(self) -> None:
        """See Owner: what was ordered is done all the same."""
