# SPDX-License-Identifier: Apache-2.0
"""Colour for people who look at a terminal, and none for programs that read a pipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

RED = "31"
GREEN = "32"
YELLOW = "33"

_OF_WORD = {
    **dict.fromkeys(("RUNNING", "READY", "ok", "ready"), GREEN),
    **dict.fromkeys(("STARTING", "LOADING", "BACKOFF", "STOPPING", "UNLOADING"), YELLOW),
    **dict.fromkeys(("warning", "skipped"), YELLOW),
    **dict.fromkeys(("FATAL", "UNAVAILABLE", "STOPPED", "failed", "not ready"), RED),
}


def is_coloured(stream: TextIO | None, environment: Mapping[str, str] | None = None) -> bool:
    """Whether colour is wanted there: what the variables say, else whether it is a terminal.

    A program that was started without the stream has None in its place.

    NO_COLOR beats FORCE_COLOR, as in Python's own programs; each counts when it is not empty.
    """
    if environment is None:
        environment = os.environ
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return stream is not None and environment.get("TERM") != "dumb" and stream.isatty()


def painted(word: str, shown: str | None = None) -> str:
    """Return `shown`, by default the word itself, in the colour that the word has, if any."""
    text = word if shown is None else shown
    colour = _OF_WORD.get(word)
    return text if colour is None else f"\x1b[{colour}m{text}\x1b[0m"
