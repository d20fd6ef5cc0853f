# SPDX-License-Identifier: Apache-2.0
"""An executor that answers before `submit` returns: as early as an answer can come."""

from __future__ import annotations

from typing import Any

from actorserve.actors.generation import (
    EngineInfo,
    ExecutorConfig,
    GenerationExecutor,
    Output,
    Tokenizer,
)
from actorserve.wire.generation import Abort, Close, GenRequest, Submit


class Immediate(GenerationExecutor):
    """Delivers what `answers` makes of a request, within `_send`; notes all that was sent."""

    def __init__(
        self, answers: Any = None, tokenizer: Tokenizer | None = None, **config: Any
    ) -> None:
        super().__init__(ExecutorConfig(**config), tokenizer)
        self.answers = answers or one_by_one
        self.sent: list[Any] = []
        self.loaded(EngineInfo("immediate", adapters=True))

    @property
    def aborted(self) -> list[int]:
        """The ids of all requests that were ended."""
        return [each for sent in self.sent if isinstance(sent, Abort) for each in sent.ids]

    @property
    def requests(self) -> list[GenRequest]:
        """All requests that were sent."""
        return [each for sent in self.sent if isinstance(sent, Submit) for each in sent.requests]

    def _send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Submit):
            for request in message.requests:
                for output in self.answers(request):
                    self.deliver([output])
        elif isinstance(message, Close):
            self.gone()


def one_by_one(request: GenRequest) -> list[Output]:
    """Answer with a token a message: 0, 1, 2, …"""
    last = request.sampling.max_tokens - 1
    return [
        Output(request.id, 0, [each], "length" if each == last else None, each == last)
        for each in range(last + 1)
    ]


def nothing(request: GenRequest) -> list[Output]:
    """Answer nothing; the test delivers."""
    return []
