# SPDX-License-Identifier: Apache-2.0
"""What an engine is: the protocol between a pump and whatever generates tokens.

    pump, one thread a rank:   start ─► ( add, abort, call ─► poll )* ─► close

The pump calls everything from one thread, so that an engine needs no lock. What `add` raises as
RequestError fails that request alone; any other exception, from any method but `call`, means
that the engine is dead. An engine never has to be fair, bounded or exactly-once: the pump counts
finals, drops what comes after them, and holds requests back while `capacity` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from actorserve.errors import InvalidArgument
from actorserve.wire.generation import EngineInfo, GenRequest, Output, Sampling

__all__ = [
    "Engine",
    "EngineInfo",
    "GenRequest",
    "Output",
    "RequestError",
    "Sampling",
    "Tokenizer",
    "World",
]

Array = npt.NDArray[np.generic]


class RequestError(InvalidArgument):
    """A request that this engine cannot serve; others are not affected."""


class World(Protocol):
    """The ranks of one engine, as one of them sees them. Every rank makes the same calls."""

    rank: int
    size: int

    def all_reduce(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the sum over all ranks, added in the order of ranks: equal on each, bit by bit."""

    def all_gather(self, array: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return every rank's array, in the order of ranks; shapes may differ."""

    def broadcast(self, array: npt.NDArray[Any], root: int = 0) -> npt.NDArray[Any]:
        """Return the array of `root`; the others' must have its shape and dtype."""

    def barrier(self) -> None:
        """Return when every rank has come here."""


class Engine(Protocol):
    """Generate tokens for many requests at once.

    `mode` "step": `poll` runs one iteration and returns at once, with [] where it brought nothing.
    "thread": the engine runs by itself and `poll` waits up to its timeout. `ranks` "lockstep": the
    pump tells every rank the same; "leader": rank 0 alone is told, and tells the others itself.

    Optional, found by name: `capacity`, `stats`, `kv_events`, `load_adapter`, `unload_adapter`,
    `call`, `prepare` and `rollback` (the phases around a call: all ranks prepare, then all call
    or all roll back), `fileno` (thread-driven: readable when poll has something), and on the class
    `tokenizer(options)`, which returns a Tokenizer without loading weights, or None. `options`
    are the spec's; an engine that is given as an instance says them by its attribute `options`
    (a dict), without which they are {}.
    """

    mode: Literal["step", "thread"]
    ranks: Literal["leader", "lockstep"]

    def __init__(self, **options: Any) -> None:
        """Take the options, and do nothing slow yet."""

    def start(self, rank: int, world: World | None) -> EngineInfo:
        """Load. `world` is None for a single rank. What it raises is shown to whoever asked.

        InvalidArgument and Unsupported (actorserve.errors) reach them as they are, as a refusal;
        anything else is a dead engine, with its traceback.
        """

    def add(self, request: GenRequest) -> None:
        """Take a request. Raises RequestError for one that it cannot serve.

        It gets `sampling.n` sequences, numbered from 0, each with a `finish`; a request that ends
        with fewer is an error.
        """

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; unknown ids are ignored. A final Output "cancelled" follows for each."""

    def poll(self, timeout_s: float) -> Sequence[Output]:
        """Run an iteration, or wait; return what came of it."""

    def close(self) -> None:
        """Let go of everything."""


class HasCapacity(Protocol):
    """An engine that says how much more it can take."""

    def capacity(self) -> tuple[int, int]:
        """Return how many more requests and how many more tokens of context it can take now."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to tokens and back."""

    end_id: int | None
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; special ones written in it are taken as such."""

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; special ones give none. A character may be cut."""

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the prompt of a conversation: dicts of role and content.

        Raises InvalidArgument for a role it does not know, RequestError without a chat template.
        """
