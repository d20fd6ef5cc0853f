# SPDX-License-Identifier: Apache-2.0
"""When a child that died is started again: a policy, no clock and no dice of its own."""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

import msgspec

from actorserve.errors import ConfigError

Kind = Literal["permanent", "transient", "temporary"]

_MAX_DOUBLINGS = 64  # far beyond any `max_s`; keeps 2.0**n finite however often a child dies


class Restart(msgspec.Struct, frozen=True):
    """How a child is restarted. Raises ConfigError for values that make no sense.

    - `kind`, as in OTP: a `permanent` child is restarted whatever ended it, a `transient` one
      unless it ended normally, a `temporary` one never.
    - The first restart comes after `first_s`, the next ones after `base_s`, doubling up to
      `max_s`, each shortened by a random part of up to `jitter` (so that the children of one
      disaster do not come back in step, and `max_s` is never exceeded). A child that has been
      ready for `healthy_after_s` seconds starts from the beginning.
    - `deaths_before_ready` deaths in a row, without being ready in between, are final (FATAL).
    - `intensity=(n, period_s)`: more than n restarts within the period are final too; None, the
      default, tries for ever.
    """

    first_s: float = 0.0
    base_s: float = 0.1
    max_s: float = 30.0
    jitter: float = 0.2
    healthy_after_s: float = 60.0
    deaths_before_ready: int = 5
    intensity: tuple[int, float] | None = None
    kind: Kind = "permanent"

    def __post_init__(self) -> None:
        for name in ("first_s", "base_s", "max_s", "healthy_after_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"restart policy: {name} is {value}, expected seconds, 0 or more")
        if self.first_s > self.max_s:
            raise ConfigError(
                f"restart policy: the first delay ({self.first_s:g} s) is longer than the longest"
                f" ({self.max_s:g} s)"
            )
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"restart policy: jitter is {self.jitter}, expected 0 to 1")
        if self.deaths_before_ready < 1:
            raise ConfigError(
                f"restart policy: deaths_before_ready is {self.deaths_before_ready},"
                " expected 1 or more"
            )
        if self.intensity is not None and (self.intensity[0] < 0 or not self.intensity[1] > 0):
            raise ConfigError(
                f"restart policy: intensity is {self.intensity}, expected (restarts, seconds)"
            )
        if self.kind not in ("permanent", "transient", "temporary"):
            raise ConfigError(
                f"restart policy: kind is {self.kind!r},"
                " expected 'permanent', 'transient' or 'temporary'"
            )

    def delay_s(self, restarts: int, chance: float) -> float:
        """Return the delay before the next start, after `restarts` restarts in this row.

        `chance` is a random number from 0 to 1 (1 excluded).
        """
        if restarts == 0:
            delay = self.first_s
        else:
            delay = min(self.max_s, self.base_s * 2.0 ** min(restarts - 1, _MAX_DOUBLINGS))
        return delay * (1.0 - self.jitter * chance)

    def is_restarted_after(self, is_normal: bool) -> bool:
        """Whether a child that ended this way (of itself, unasked) is started again."""
        return self.kind == "permanent" or (self.kind == "transient" and not is_normal)


def parse_backoff(text: str, restart: Restart | None = None) -> Restart:
    """Read FIRST:MAX (seconds) into a policy; everything else is as in `restart`.

    Raises ConfigError for anything else. "0:0" restarts at once, always.
    """
    first, colon, longest = text.partition(":")
    try:
        if not colon:
            raise ValueError
        first_s, max_s = float(first), float(longest)
    except ValueError:
        raise ConfigError(
            f"restart back-off is {text!r}, expected FIRST:MAX in seconds, such as 0:30"
        ) from None
    return msgspec.structs.replace(restart or Restart(), first_s=first_s, max_s=max_s)


def note_restart(recent: deque[float], now_s: float, period_s: float) -> int:
    """Add a restart to the recent ones; return how many lie within the period, this one too."""
    recent.append(now_s)
    while recent[0] <= now_s - period_s:
        recent.popleft()
    return len(recent)


class History:
    """The deaths of one child, held against its policy.

    `deaths` and `early_deaths` (in a row, without being ready in between) may be read.
    """

    def __init__(self, restart: Restart) -> None:
        self.restart = restart
        self.deaths = 0
        self.early_deaths = 0
        self._row = 0  # restarts since the last good health: what the delay grows with
        self._recent: deque[float] = deque()  # restarts, for the intensity

    def forgive(self) -> None:
        """Start with a clean record, as after an order to start; `deaths` goes on counting."""
        self._row = self.early_deaths = 0
        self._recent.clear()

    def became_ready(self) -> None:
        """Note that the child is ready: deaths before this are not "in a row" any more."""
        self.early_deaths = 0

    def died(self, now_s: float, ready_since_s: float | None) -> str:
        """Note a death; return why it is the last one, or "" if the child may be tried again.

        `ready_since_s` is when the child became ready, None if it never did.
        """
        self.deaths += 1
        if ready_since_s is None:
            self.early_deaths += 1
        elif now_s - ready_since_s >= self.restart.healthy_after_s:
            self._row = 0
        if self.early_deaths >= self.restart.deaths_before_ready:
            return f"died {self.early_deaths} times in a row before it was ready"
        if self.restart.intensity is not None:
            limit, period_s = self.restart.intensity
            if note_restart(self._recent, now_s, period_s) > limit:
                return f"restarted more than {limit} times in {period_s:g} s"
        return ""

    def next_delay_s(self, chance: float) -> float:
        """Return the delay before the next start, and count that start."""
        delay_s = self.restart.delay_s(self._row, chance)
        self._row += 1
        return delay_s
