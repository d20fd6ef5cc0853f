# SPDX-License-Identifier: Apache-2.0
"""A model that can be computed by hand, its engine, a client of it, and ranks in threads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.engine import GenRequest, Output, RequestError, Sampling, World
from actorserve.actors.generation.engines.batching import BatchEngine
from actorserve.actors.generation.engines.decoder import Batch, FloatArray

VOCABULARY = 13
CONTEXT = 40
LIMIT = 2000  # iterations

Logits = Callable[[Sequence[int]], FloatArray]


def toy_logits(history: Sequence[int]) -> FloatArray:
    """Return logits that depend on every token of a history, and on their order."""
    state = 1
    for token in history:
        state = (state * 31 + token + 7) % 9973
    return np.array(
        [3.0 * math.sin((token + 1) * (state % 97) + state) for token in range(VOCABULARY)],
        np.float32,
    )


class ToyModel:
    """A DecoderModel whose memory is the tokens themselves."""

    name = "toy"
    vocab_size = VOCABULARY
    context_tokens = CONTEXT
    end_id: int | None = 0

    def __init__(self, logits: Logits = toy_logits) -> None:
        self._logits = logits
        self.batches: list[Batch] = []

    def allocate(self, slots: int) -> None:
        self.memory = np.full((slots, CONTEXT), -1)

    def forward(self, batch: Batch) -> FloatArray:
        self.batches.append(batch)
        assert (np.diff(batch.slots[: batch.decode]) > 0).all(), "slots ascend, one row each"
        assert len(batch.tokens) == batch.decode + sum(span.count for span in batch.spans)
        self.memory[batch.slots, batch.positions] = batch.tokens
        shift = np.zeros(len(batch.tokens), np.float32)
        for adapter, rows in batch.adapters:
            shift[rows] += adapter
        wanted = range(len(batch.tokens)) if batch.wanted is None else batch.wanted.tolist()
        out = [self._row(batch, row, shift[row]) for row in wanted]
        return np.stack(out) if out else np.zeros((0, VOCABULARY), np.float32)

    def _row(self, batch: Batch, row: int, shift: float) -> FloatArray:
        history = self.memory[batch.slots[row], : batch.positions[row] + 1]
        assert (history >= 0).all(), "every position before is in memory"
        logits = self._logits(history.tolist())
        logits[5] += shift
        return logits

    def copy_slot(self, source: int, target: int, tokens: int) -> None:
        self.memory[target, :tokens] = self.memory[source, :tokens]
        self.memory[target, tokens:] = -1

    def load_adapter(self, path: str) -> float:
        try:
            return float(path)
        except ValueError:
            raise RequestError(f"adapter {path!r} cannot be read") from None


class ToyEngine(BatchEngine):
    """The engine of it."""

    def __init__(self, logits: Logits = toy_logits, **options: Any) -> None:
        super().__init__(**options)
        self.model = ToyModel(logits)

    def load_model(self, rank: int, world: World | None) -> ToyModel:
        return self.model


def started(logits: Logits = toy_logits, **options: Any) -> ToyEngine:
    """Return a toy engine that runs."""
    engine = ToyEngine(logits, **options)
    engine.start(0, None)
    return engine


@dataclass
class Answer:
    """One sequence of a request, put together from outputs as a client does it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | None = None
    cum_logprob: float | None = None
    error: str | None = None
    deltas: list[list[int]] = field(default_factory=list)
    arrays: dict[str, Any] = field(default_factory=dict)


class Client:
    """Collects outputs; complains of any that break the protocol."""

    def __init__(self) -> None:
        self.answers: dict[int, dict[int, Answer]] = {}
        self.over: list[int] = []

    def take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            assert output.id not in self.over, f"output after the final one: {output}"
            answer = self.answers.setdefault(output.id, {}).setdefault(output.seq, Answer())
            assert answer.finish is None, f"output after the finish: {output}"
            if output.replace:
                answer.tokens, answer.logprobs = [], []
            answer.tokens += output.tokens
            answer.deltas.append(output.tokens)
            answer.logprobs += output.logprobs or []
            if output.cum_logprob is not None:
                answer.cum_logprob = output.cum_logprob
            answer.arrays.update(output.arrays or {})
            answer.finish, answer.stop_reason = output.finish, output.stop_reason
            answer.error = output.error
            if output.final:
                self.over.append(output.id)

    def run(self, engine: BatchEngine, requests: Sequence[GenRequest]) -> Client:
        """Add requests and poll until all are over."""
        for request in requests:
            engine.add(request)
        for _ in range(LIMIT):
            if all(request.id in self.over for request in requests):
                return self
            self.take(engine.poll(0.0))
        raise AssertionError(f"not over after {LIMIT} iterations: {self.answers}")


def run(engine: BatchEngine, *requests: GenRequest) -> Client:
    """Run requests together; returns what a client has then."""
    return Client().run(engine, requests)


def generate(engine: BatchEngine, prompt: list[int], **settings: Any) -> Answer:
    """Run one request alone; returns its first sequence."""
    return run(engine, request(1, prompt, **settings)).answers[1][0]


def request(number: int, prompt: list[int], **settings: Any) -> GenRequest:
    """Return a request; what is no field of Sampling is one of GenRequest."""
    own = {
        name: settings.pop(name) for name in ("adapter", "stream", "priority") if name in settings
    }
    return GenRequest(number, prompt, Sampling(**settings), **own)


class ThreadWorld:
    """One rank of several that are threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self._barrier = barrier
        self._shared = shared

    def all_gather(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        self._shared[self.rank] = array.copy()
        self._barrier.wait(20)
        everything = list(self._shared)
        self._barrier.wait(20)
        return everything

    def all_reduce(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        first, *others = self.all_gather(array)
        for other in others:
            first = first + other
        return first

    def broadcast(self, array: npt.NDArray[Any], root: int = 0) -> npt.NDArray[Any]:
        return self.all_gather(array)[root]

    def barrier(self) -> None:
        self._barrier.wait(20)


def on_ranks(size: int, work: Callable[[int, ThreadWorld], Any]) -> list[Any]:
    """Do the same in a thread for each rank; returns what each gives, raises what one raises."""
    barrier, shared = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank, ThreadWorld(rank, size, barrier, shared))
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    broken = [each for each in results if isinstance(each, BaseException)]
    for error in broken:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not broken
    return results
