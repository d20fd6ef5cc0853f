# SPDX-License-Identifier: Apache-2.0
"""What has come for one request and was not taken yet: between who delivers and who reads.

What always holds: one outcome, the first that anybody gives it (a final output, or an error);
outputs are taken in the order in which they came, and while nobody takes them they are merged,
so that memory grows with the tokens and not with the messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

from actorserve.actors.generation.merge import merged, own
from actorserve.actors.generation.text import StopWatch
from actorserve.actors.generation.wake import Waiters, wait_in_loop, wait_in_thread
from actorserve.errors import ActorserveError
from actorserve.wire.generation import Output

FOLD_AT = 32
"""How many outputs lie unread before they are merged."""


class Feed:
    """One request's way back. One deliverer at a time; readers of any thread and loop."""

    __slots__ = (
        "__weakref__",
        "deadline_s",
        "end_waiters",
        "error",
        "finish",
        "first_s",
        "fold_at",
        "id",
        "inbox",
        "is_ended",
        "last_s",
        "prompt_tokens",
        "step_waiters",
        "submitted_s",
        "tokens",
        "unfinished",
        "watch",
    )

    def __init__(
        self, number: int, prompt_tokens: int, submitted_s: float, sequences: int = 1
    ) -> None:
        self.id = number
        self.inbox: deque[Output] = deque()
        self.step_waiters: Waiters = []  # who wants to know of every output
        self.end_waiters: Waiters = []  # who wants to know of the end
        self.is_ended = False  # written after what it ended with
        self.error: ActorserveError | None = None
        self.watch: StopWatch | None = None
        self.deadline_s = 0.0
        self.fold_at = FOLD_AT
        self.prompt_tokens = prompt_tokens
        self.tokens = 0
        self.submitted_s = submitted_s
        self.first_s = 0.0  # when the first output came
        self.last_s = 0.0
        self.finish: str | None = None
        self.unfinished = set(range(sequences))  # the sequences that have no end of their own yet

    def has_news(self) -> bool:
        """Whether a step would not wait."""
        return bool(self.inbox) or self.is_ended

    def has_ended(self) -> bool:
        """Whether the outcome is here."""
        return self.is_ended

    def fold(self) -> None:
        """Merge what lies here. Only the deliverer may; a reader may read meanwhile."""
        inbox = self.inbox
        newest_first: list[Output] = []
        try:
            for _ in range(len(inbox)):
                newest_first.append(inbox.pop())
        except IndexError:  # a reader was quicker
            pass
        newest_first.reverse()
        outputs = [own(each) if type(each) is Output else each for each in merged(newest_first)]
        inbox.extend(outputs)
        self.fold_at = FOLD_AT + len(outputs)

    def wait_in_thread(self, timeout_s: float | None, *, for_end: bool) -> bool:
        """Wait for an output, or for the end; False after `timeout_s` seconds."""
        if for_end:
            return wait_in_thread(self.end_waiters, self.has_ended, timeout_s)
        return wait_in_thread(self.step_waiters, self.has_news, timeout_s)

    def wait_in_loop(self, timeout_s: float | None, *, for_end: bool) -> Generator[Any, None, bool]:
        """Wait for an output, or for the end; False after `timeout_s` seconds."""
        if for_end:
            return wait_in_loop(self.end_waiters, self.has_ended, timeout_s)
        return wait_in_loop(self.step_waiters, self.has_news, timeout_s)
