# SPDX-License-Identifier: Apache-2.0
"""How long a peer may take: the judgement on one connection's phase. Pure: no clock, no I/O.

A sweep names the phase that the connection is in and the time. A phase that is still the same at
the next sweep has lasted since the first one that saw it, so nothing is noted on the hot path.
"""

from __future__ import annotations

import msgspec

from actorserve.frontend.http_settings import HttpSettings


class Phase(msgspec.Struct, frozen=True):
    """What a connection is doing. `mark` changes with every step forward.

    `kind` is "head", "body", "write" or "idle"; any other has no limit.
    """

    kind: str
    mark: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """What to do with a connection: `action` is "refuse" (408), "abort" or "close"."""

    action: str
    reason: str


class PhaseWatch:
    """The watch over one connection."""

    __slots__ = ("_phase", "_since_s")

    def __init__(self) -> None:
        self._phase = Phase("")
        self._since_s = 0.0

    def judge(
        self, phase: Phase, now_s: float, body_bytes: int, is_paused: bool, limits: HttpSettings
    ) -> Verdict | None:
        """Return what a sweep should do, None for nothing.

        `body_bytes` is how much of the body is here; while `is_paused`, the server itself does not
        read, and the time is not the peer's.
        """
        if phase != self._phase:
            self._phase, self._since_s = phase, now_s
            return None
        waited_s = now_s - self._since_s
        if phase.kind == "write" and waited_s > limits.write_timeout_s:
            return Verdict("abort", f"nothing of the reply taken in {waited_s:.0f} s")
        if phase.kind == "head" and waited_s > limits.head_timeout_s:
            return Verdict("refuse", f"no complete head within {limits.head_timeout_s:g} s")
        if phase.kind == "idle" and waited_s > limits.keep_alive_timeout_s:
            return Verdict("close", "idle")
        if phase.kind == "body":
            if is_paused:
                self._since_s += limits.sweep_interval_s
                return None
            over_s = waited_s - limits.body_grace_s
            if over_s > 0 and body_bytes < over_s * limits.min_body_bytes_per_s:
                return Verdict("refuse", f"only {body_bytes} bytes of the body in {waited_s:.0f} s")
        return None
