# SPDX-License-Identifier: Apache-2.0
"""What tests of cancellation share: models that note when they are told, and clients that leave."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.server.script_models import ScriptServer

PATIENT = """\
kept.told = None
sender = request.get_response_sender()
note("begun")
def run(request=request, sender=sender):
    while not request.is_cancelled():
        time.sleep(0.002)
    note("told")
    sender.send(failure("as you like", pb_utils.TritonError.CANCELLED), FINAL)
start(run)
"""
"""Answers when it is cancelled, and notes both moments."""

BUSY = """\
note("begun")
while not request.is_cancelled():
    time.sleep(0.002)
note("told")
result = [failure("as you like", pb_utils.TritonError.CANCELLED)]
"""
"""The same on the main thread of a plain model."""


class Notes:
    """A file to which models write words."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    @property
    def words(self) -> list[str]:
        """What was written since the last look at `clear`."""
        return self.path.read_text().split()

    def code(self, code: str) -> str:
        """Return code that may call `note`."""
        note = f"def note(word):\n    open({str(self.path)!r}, 'a').write(word + ' ')\n"
        return note + code

    def wait(self, *words: str) -> None:
        """Wait until these words were written, in any order."""
        wait_until(lambda: sorted(self.words) == sorted(words), 20, f"{self.words} != {words}")


def in_task(server: ScriptServer, model: str, code: str) -> Any:
    """Start an inference in a task of the server's loop; returns the task."""

    async def main() -> Any:
        inputs = {"CODE": [code.encode()]}
        return asyncio.ensure_future(server.server.infer(model, inputs))

    return server.run(main())


def cancel(server: ScriptServer, task: Any) -> None:
    """Cancel a task and wait for its end."""

    async def main() -> None:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    server.run(main())
