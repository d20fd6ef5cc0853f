# SPDX-License-Identifier: Apache-2.0
"""Ask a model to complete its own configuration, in a stub that is thrown away afterwards.

The model's class is imported there and never here, so that nothing of a model enters the
supervisor, and what its import leaves behind does not reach the instances.
"""

from __future__ import annotations

import asyncio
from collections import deque

from actorserve.actors.incarnation import log_output, log_record
from actorserve.actors.node import Node
from actorserve.errors import ActorserveError, BootError
from actorserve.runtime.child import Exit, SpawnSpec
from actorserve.runtime.host_end import HostEnd
from actorserve.wire.messages import (
    Attached,
    AutoComplete,
    AutoCompleted,
    BootFailed,
    LogRecord,
    ToSupervisor,
)

LAST_LINES = 20


class StubDied(ActorserveError):
    """The throw-away stub died before it answered: another try may go better."""


async def ask_model(
    node: Node, spec: SpawnSpec, question: AutoComplete, budget_s: float
) -> str | None:
    """Return the completed configuration as JSON, or None where the model has no such method.

    Raises BootError with the model's own error, StubDied, or what spawning raised.
    """
    ear = _Ear(node.loop, spec.name)
    end = ear.end = HostEnd(node.loop, node.exchange, node.arenas.next(), ear)
    try:
        child = await node.spawner.spawn(spec, ear.on_exit, ear.on_output)
        try:
            end.open(child.boot, spec.name)
            end.send(question)
        except (ActorserveError, OSError):
            pass  # It died already; its exit is on the way.
        try:
            return await asyncio.wait_for(ear.answer, budget_s)
        except asyncio.TimeoutError:
            raise BootError(
                f"auto_complete_config of '{question.model_name}' did not return "
                f"within {budget_s:g} s"
            ) from None
        finally:
            child.kill_group()
            await ear.gone
    finally:
        end.close()


class _Ear:
    """Listen to one throw-away stub; `answer` and `gone` are what it comes down to."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self._name = name
        self.answer: asyncio.Future[str | None] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()
        self.end: HostEnd | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)

    def on_attached(self, message: Attached) -> None:
        """Nothing to do: the question waits in the lane."""

    def on_messages(self, messages: list[ToSupervisor]) -> None:
        """Take the answer, or the reason why there is none."""
        for message in messages:
            if isinstance(message, LogRecord):
                log_record(self._name, message)
            if self.answer.done():
                continue
            if isinstance(message, AutoCompleted):
                self.answer.set_result(message.config_json)
            elif isinstance(message, BootFailed):
                self.answer.set_exception(BootError(message.reason))

    def on_refused(self, error: BootError) -> None:
        """Take the stub's own reason for the answer."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def on_hung_up(self) -> None:
        """Nothing to do: the stub is ended in any case."""

    def on_broken(self, error: ActorserveError) -> None:
        """Take a broken wire for the answer."""
        if not self.answer.done():
            self.answer.set_exception(BootError(error.message))

    def on_exit(self, exit_: Exit) -> None:
        """Read what the stub left; take its end for the answer, where none came."""
        if self.end is not None:
            self.end.close()
        if not self.answer.done():
            last = "".join(f"\n{line}" for line in self._lines)
            self.answer.set_exception(StubDied(f"the stub {exit_.describe()}{last}"))
        if not self.gone.done():
            self.gone.set_result(None)

    def on_output(self, stream: str, line: str) -> None:
        """Log a line, and keep the last ones for the reason."""
        self._lines.append(line)
        log_output(self._name, stream, line)
