# SPDX-License-Identifier: Apache-2.0
"""What a stub's process prints when it ends on purpose, and its supervisor repeats.

What always holds: the line begins with LAST_WORDS and is among the last ones; whoever reads a
process's output sees why it ended, and needs nothing else to tell others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

LAST_WORDS = "the process ends: "
MOST_CHARS = 1000
LINES = 20


def say_last_words(reason: str) -> None:
    """Print why this process is about to end; the first line of the reason."""
    text = reason.strip().splitlines()[0] if reason.strip() else "no reason"
    print(f"{LAST_WORDS}{text[:MOST_CHARS]}", file=sys.stderr, flush=True)


def last_words_of(lines: Sequence[str]) -> str:
    """Return the reason that a process gave in its last lines of output; "" for none."""
    for line in list(lines)[-LINES:]:
        if line.startswith(LAST_WORDS):
            return line.removeprefix(LAST_WORDS)
    return ""
