# SPDX-License-Identifier: Apache-2.0
"""Repetitions, turns, and what is found.

On a machine that others use too, a single figure says nothing, and two figures from different
minutes cannot be compared. So everything is repeated, and contenders take turns: each round runs
all of them, in an order that moves on by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

OURS = "actorserve"
WARM_UP_ROUNDS = 1

Figures = Mapping[str | tuple[str, str], float]
"""Figures of one turn, by row, or by row and label where a row has more than one."""


class Contender(msgspec.Struct, frozen=True):
    """Who measures something: `turn` gives the figures of some of `rows` once."""

    label: str
    rows: tuple[str, ...]
    turn: Callable[[], Figures]


class Effort(msgspec.Struct, frozen=True):
    """How much is measured, and whether beside others or `is_alone`."""

    is_quick: bool = False
    is_alone: bool = False

    @property
    def rounds(self) -> int:
        """How many figures each contender gets, after the warm-up."""
        return self.pick(1, 5)

    @property
    def seconds(self) -> float:
        """How long one figure of a rate takes."""
        return 0.25 if self.is_quick else 0.8

    def pick(self, quick: int, full: int) -> int:
        """Return the count for this effort."""
        return quick if self.is_quick else full


class Findings(msgspec.Struct):
    """What a section found: figures by row and label, or the reason why there are none."""

    values: dict[str, dict[str, list[float]]] = {}
    reasons: dict[str, dict[str, str]] = {}

    def add(self, row: str, label: str, *values: float) -> None:
        """Take figures of a contender of a row."""
        self.values.setdefault(row, {}).setdefault(label, []).extend(values)

    def lack(self, rows: Sequence[str], label: str, reason: str) -> None:
        """Say why a contender has no (more) figures in these rows."""
        for row in rows:
            self.reasons.setdefault(row, {})[label] = reason


class CannotRun(Exception):
    """A contender cannot run on this machine; the text says why."""


def take_turns(
    findings: Findings,
    contenders: Sequence[Contender],
    effort: Effort,
    rounds: int | None = None,
) -> None:
    """Let every contender measure once per round, after rounds that do not count.

    The effort says how many rounds there are, unless the caller does.

    The order moves on, so that nobody always comes after the same neighbour. A contender that
    fails is left out from then on, and its rows get the reason.
    """
    left = [each for each in contenders if each.label == OURS or not effort.is_alone]
    for number in range(-WARM_UP_ROUNDS, effort.rounds if rounds is None else rounds):
        shift = number % len(left) if left else 0
        for contender in left[shift:] + left[:shift]:
            try:
                figures = contender.turn()
            except Exception as error:
                left.remove(contender)
                findings.lack(contender.rows, contender.label, reason_of(error))
                continue
            if number < 0:
                continue
            for key, value in figures.items():
                row, label = (key, contender.label) if isinstance(key, str) else key
                findings.add(row, label, value)


def reason_of(error: BaseException) -> str:
    """Return one line that says what went wrong."""
    text = " ".join(str(error).split())
    if isinstance(error, CannotRun):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
