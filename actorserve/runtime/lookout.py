# SPDX-License-Identifier: Apache-2.0
"""How a loop waits for a lane's next message: it looks once a turn while that pays, else it parks.

    expect ─┐                ┌── news ──► on_news ──► rest ─┐
            ├──► look, once a turn ◄────────────────────────┤
            │                └── patience ends ──► park ◄───┘ nothing is due, or waits are long
            └──► parked ──► bell ──► on_news

Nothing is held up by it: other callbacks have their turns between two looks. Only waits for what
is due are looked at and learnt from; a loop that nobody owes an answer parks at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from actorserve.shm.patience import Patience


class Lane(Protocol):
    """What is read: the receiving end of a lane, or what stands before it."""

    def has_news(self) -> bool:
        """Whether something is there."""

    def park(self) -> bool:
        """Ask to be rung; False where something is there already."""

    def unpark(self) -> None:
        """Take `park` back."""


class Lookout:
    """See the module's head. Belongs to the loop; `on_news` reads everything, then calls `rest`."""

    __slots__ = ("_is_closed", "_is_looking", "_lane", "_loop", "_on_news", "patience")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, lane: Lane, on_news: Callable[[], None]
    ) -> None:
        self.patience = Patience()
        self._loop = loop
        self._lane = lane
        self._on_news = on_news
        self._is_looking = False
        self._is_closed = False

    def expect(self) -> None:
        """Hear that something is due from now on; nothing was before."""
        if not self._is_looking and self.patience.begin():
            self._lane.unpark()
            self._look_soon()

    def rest(self, *, is_due: bool) -> None:
        """Hear that everything is read; `is_due` says that more will come without further ado."""
        if self._is_looking:
            return
        if is_due and self.patience.begin():
            self._look_soon()
        else:
            self._park()

    def close(self) -> None:
        """Look no more; harmless twice."""
        self._is_closed = True

    def _look_soon(self) -> None:
        self._is_looking = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_looking = False
        if self._is_closed:
            return
        if self._lane.has_news():
            self._on_news()
        elif self.patience.lasts():
            self._look_soon()
        else:
            self._park()

    def _park(self) -> None:
        if not self._lane.park():
            self._loop.call_soon(self._on_news)
