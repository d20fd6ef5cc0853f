# SPDX-License-Identifier: Apache-2.0
"""What is shown again and again: redrawn in place on a terminal, appended anywhere else."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

HOME = "\x1b[H"
CLEAR_ALL = "\x1b[2J"
CLEAR_LINE = "\x1b[K"
CLEAR_BELOW = "\x1b[J"


class Screen:
    """A terminal, or a pipe; documents for programs (`is_json`) are appended to either."""

    def __init__(self, stream: TextIO, *, is_json: bool = False) -> None:
        self._stream = stream
        self._is_redrawn = stream.isatty() and not is_json
        self._is_drawn = False

    @property
    def width(self) -> int | None:
        """How long a line may be: what a terminal would wrap would scroll what is above it."""
        return shutil.get_terminal_size().columns if self._is_redrawn else None

    def show(self, text: str) -> None:
        """Show a text instead of the last one, or below it."""
        if not self._is_redrawn:
            print(text, file=self._stream, flush=True)
            return
        lines = text.split("\n")
        most = max(2, shutil.get_terminal_size().lines - 2)
        if len(lines) > most:
            lines = [*lines[: most - 1], f"… {len(lines) - most + 1} more lines"]
        # No blank screen in between: what is there is overwritten line by line.
        begin = HOME if self._is_drawn else CLEAR_ALL + HOME
        body = "".join(f"{line}{CLEAR_LINE}\n" for line in lines)
        self._stream.write(begin + body + CLEAR_BELOW)
        self._stream.flush()
        self._is_drawn = True

    def complain(self, text: str) -> None:
        """Say why there is nothing to show."""
        if self._is_redrawn:
            self.show(text[: self.width])
        else:
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the cursor below what was shown last, and below the ^C of who ended it."""
        if self._is_redrawn:
            print(file=self._stream, flush=True)
