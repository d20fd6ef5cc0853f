# SPDX-License-Identifier: Apache-2.0
"""An engine for tests of the backend "generation": it repeats the prompt, and notes what it hears.

It is copied into the models' version folders as echo_engine.py, and named "echo_engine:Echo".
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from actorserve.actors.generation import (
    EngineInfo,
    GenRequest,
    Output,
    RequestError,
    World,
)

VOCABULARY = 256


class Letters:
    """A tokenizer whose tokens are bytes."""

    end_id = None
    vocab_size = VOCABULARY

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes."""
        return bytes(tokens)

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return the last message, with its role in front."""
        return self.encode(f"{messages[-1]['role']}: {messages[-1]['content']} ")


class _Running:
    def __init__(self, request: GenRequest) -> None:
        self.request = request
        self.made = 0
        self.is_new = True


class Echo:
    """Options: `notes` is a file, `pace_s` an iteration takes, `fails` is why it cannot load.

    A prompt that is "die" is its end. Adapter n makes n times the same letter.
    """

    mode = "step"
    ranks = "lockstep"

    def __init__(
        self, *, notes: str = "", slots: int = 8, pace_s: float = 0.0, fails: str = ""
    ) -> None:
        self._notes, self._slots, self._pace_s, self._fails = notes, slots, pace_s, fails
        self._running: dict[int, _Running] = {}
        self._aborted: list[int] = []
        self._adapters: dict[int, str] = {}

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Letters:
        """Return the tokenizer."""
        return Letters()

    def start(self, rank: int, world: World | None) -> EngineInfo:
        """Load."""
        if self._fails:
            raise OSError(self._fails)
        return EngineInfo("echo", VOCABULARY, 1 << 20, self._slots, adapters=True, max_beam_width=4)

    def capacity(self) -> tuple[int, int]:
        """Say how much fits."""
        return self._slots - len(self._running), 1 << 30

    def stats(self) -> dict[str, Any]:
        """Say what is in use."""
        return {"slots": self._slots, "slots_used": len(self._running)}

    def add(self, request: GenRequest) -> None:
        """Take a request."""
        if 0 in request.prompt:
            raise RequestError("the prompt has a zero in it")
        self._note(f"add:{self._text(request)}")
        self._running[request.id] = _Running(request)

    def abort(self, ids: Sequence[int]) -> None:
        """End requests."""
        self._aborted += [each for each in ids if each in self._running]

    def poll(self, timeout_s: float) -> list[Output]:
        """Make a letter for each request."""
        if self._pace_s:
            select.select([], [], [], self._pace_s)
        outputs = []
        for number in self._aborted:
            running = self._running.pop(number)
            self._note(f"abort:{self._text(running.request)}")
            outputs.append(Output(number, finish="cancelled", final=True))
        self._aborted = []
        for running in list(self._running.values()):
            outputs += self._turn(running)
        return outputs

    def load_adapter(self, adapter_id: int, path: str) -> None:
        """Take an adapter, which is a file with a letter."""
        self._adapters[adapter_id] = Path(path).read_text().strip()

    def close(self) -> None:
        """Say goodbye."""
        self._note("close")

    def _turn(self, running: _Running) -> list[Output]:
        request, sampling = running.request, running.request.sampling
        if bytes(request.prompt) == b"die":
            raise RuntimeError("told to die")
        token = request.prompt[running.made % len(request.prompt)]
        if request.adapter:
            token = ord(self._adapters[request.adapter])
        running.made += 1
        is_last = running.made >= sampling.max_tokens
        outputs = []
        for seq in range(sampling.n):
            output = Output(
                request.id,
                seq,
                [token],
                finish="length" if is_last else None,
                final=is_last and seq == sampling.n - 1,
            )
            if sampling.logprobs is not None:
                output.logprobs = [[(token, -0.5), *((33 + k, -1.0) for k in range(2))]]
                output.cum_logprob = -0.5 * running.made
            if sampling.generation_logits:
                output.arrays = {"generation_logits": np.full((1, VOCABULARY), token, np.float32)}
            if sampling.context_logits and running.is_new:
                output.arrays = output.arrays or {}
                shape = (len(request.prompt), VOCABULARY)
                output.arrays["context_logits"] = np.ones(shape, np.float32)
            outputs.append(output)
        running.is_new = False
        if is_last:
            del self._running[request.id]
        return outputs

    def _text(self, request: GenRequest) -> str:
        return bytes(request.prompt).decode("utf-8", "replace").strip()

    def _note(self, word: str) -> None:
        if self._notes:
            with open(self._notes, "a") as file:
                file.write(word + "\n")
