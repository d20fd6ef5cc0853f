# SPDX-License-Identifier: Apache-2.0
"""Statistics of iterations, for whoever reads them: the newest at once, the others in a row.

Nobody has to read: the row is bounded, and what falls out of it is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from actorserve.runtime.waiting import Waiting

_to_json = msgspec.json.Encoder().encode


class Snapshots(Waiting):
    """Snapshots that wait to be read, each by one reader."""

    __slots__ = ("_dropped_before", "_dropped_here", "_kept", "is_over", "latest")

    def __init__(self, kept: int) -> None:
        super().__init__()
        self._kept: deque[dict[str, Any]] = deque(maxlen=kept)
        self._dropped_here = 0
        self._dropped_before = 0
        self.is_over = False
        self.latest: dict[str, Any] | None = None

    @property
    def dropped(self) -> int:
        """How many nobody read: they fell out here, or before they came here."""
        return self._dropped_here + self._dropped_before

    def add(self, snapshots: Sequence[dict[str, Any]], dropped_before: int = 0) -> None:
        """Add the newest ones."""
        self._dropped_before = dropped_before
        if not snapshots:
            return
        room = (self._kept.maxlen or 0) - len(self._kept)
        self._dropped_here += max(0, len(snapshots) - room)
        self._kept.extend(snapshots)
        self.latest = snapshots[-1]
        self.tell()

    def end(self) -> None:
        """Let everybody know that no more will come."""
        self.is_over = True
        self.tell()

    def has_news(self) -> bool:
        """See Waiting."""
        return bool(self._kept) or self.is_over

    def take(self) -> str | None:
        """Return the oldest as JSON; None if there is none."""
        try:
            return _to_json(self._kept.popleft()).decode()
        except IndexError:
            return None
