# SPDX-License-Identifier: Apache-2.0
"""Where the answers of `actorserve chat` come from: what its sources have in common.

    chat_running.RunningServer   POST /v1/chat/completions, by the standard library's HTTP
    chat_own.OwnServer           the repository's model in stubs of this process, without a port

Both work in a thread of their own and tell pieces of an answer as they come, so that whoever waits
for them can be interrupted by a signal, and nothing there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from actorserve.errors import ActorserveError, ConfigError, NotFound

Tell = Callable[["str | ActorserveError | None"], None]
"""Hears each piece of an answer, then None, or the error that ended it. Called in any thread."""

Cancel = Callable[[], None]
"""Ends an answer that nobody wants any more; idempotent."""


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str


class Manner(msgspec.Struct, frozen=True):
    """How answers are generated; None for as the model does it by itself."""

    max_tokens: int | None = None
    temperature: float | None = None


class Source(Protocol):
    """Whoever answers."""

    model: str

    def ask(self, messages: Sequence[Message], manner: Manner, tell: Tell) -> Cancel:
        """Begin an answer; `tell` hears it."""

    def close(self) -> None:
        """Let go of everything."""


def choose_model(wanted: str, found: Sequence[str], where: str) -> str:
    """Return the model to talk to. Raises NotFound or ConfigError."""
    names = ", ".join(found) or "none"
    if wanted and wanted not in found:
        raise NotFound(f"{where} has no model '{wanted}' that generates text; it has: {names}")
    if wanted:
        return wanted
    if not found:
        raise NotFound(f"{where} has no model that generates text")
    if len(found) != 1:
        raise ConfigError(f"name a model with --model; {where} has: {names}")
    return found[0]
