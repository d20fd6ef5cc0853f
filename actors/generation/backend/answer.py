# SPDX-License-Identifier: Apache-2.0
"""What was generated, as responses: all of a sequence at its end, or what each step added.

Only outputs that the client asked for are made. Tensors that are always the same are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from actorserve.actors.generation import CompletionOutput, Tokenizer
from actorserve.actors.generation.backend.question import Question
from actorserve.actors.generation.output import DISCARDED
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor

_encode_json = msgspec.json.Encoder().encode


def _string(name: str, text: str) -> Tensor:
    return Tensor(name, np.array([text.encode("utf-8", "replace")], np.object_))


def _whole(name: str, number: int) -> Tensor:
    return Tensor(name, np.array([number], np.int32))


_UNFINISHED = _string("finish_reason", "")
_NO_TEXT = _string("text_output", "")
_INDEXES = tuple(_whole("index", number) for number in range(64))


def _response(output: CompletionOutput, tensors: list[Tensor]) -> InferenceResponse:
    if not output.discarded_tokens:
        return InferenceResponse(tensors)
    return InferenceResponse(tensors, parameters={DISCARDED: output.discarded_tokens})


class Answer:
    """The responses to one request."""

    def __init__(
        self,
        question: Question,
        wanted: Iterable[str],
        prompt: Sequence[int],
        prompt_text: str,
        tokenizer: Tokenizer | None,
    ) -> None:
        """`wanted` are names of outputs; `prompt_text` is used where the question wants it."""
        self._question = question
        self._wanted = frozenset(wanted)
        self._prompt = list(prompt)
        self._prompt_text = prompt_text
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def delta(
        self, output: CompletionOutput, context_logits: npt.NDArray[Any] | None = None
    ) -> InferenceResponse | None:
        """Return what the last step added to a sequence; None where that is nothing.

        Beams change until they end: nothing of them is told before.
        """
        is_last = output.finish_reason is not None
        if output.index in self._ended:
            return None
        if self._question.params.beam_width > 1:
            return self.whole(output, context_logits) if is_last else None
        tokens, text = output.token_ids_diff, output.text_diff
        if not (tokens or text or is_last):
            return None
        new = len(output.logprobs_diff)
        top = output.top_logprobs[len(output.top_logprobs) - new :]
        tensors = self._common(output, text, tokens, output.logprobs_diff, top)
        return _response(output, tensors + self._last(output, context_logits))

    def whole(
        self, output: CompletionOutput, context_logits: npt.NDArray[Any] | None = None
    ) -> InferenceResponse:
        """Return all of a sequence."""
        tensors = self._common(
            output, output.text, output.token_ids, output.logprobs, output.top_logprobs
        )
        return _response(output, tensors + self._last(output, context_logits))

    def _common(
        self,
        output: CompletionOutput,
        text: str,
        tokens: list[int],
        logprobs: list[float],
        top: list[list[tuple[int, float]]],
    ) -> list[Tensor]:
        """Return what every response has."""
        index, wanted = output.index, self._wanted
        if index not in self._begun:
            self._begun.add(index)
            if self._question.with_input:
                text, tokens = self._prompt_text + text, self._prompt + tokens
        tensors = []
        if "text_output" in wanted:
            tensors.append(_string("text_output", text) if text else _NO_TEXT)
        if "output_ids" in wanted:
            tensors.append(Tensor("output_ids", np.array(tokens, np.int32)))
        if "index" in wanted:
            is_known = index < len(_INDEXES)
            tensors.append(_INDEXES[index] if is_known else _whole("index", index))
        if "finish_reason" in wanted:
            reason = output.finish_reason
            tensors.append(_string("finish_reason", reason) if reason else _UNFINISHED)
        if self._question.has_logprobs:
            tensors += self._logprobs(logprobs, top)
        return tensors

    def _logprobs(self, logprobs: list[float], top: list[list[tuple[int, float]]]) -> list[Tensor]:
        tensors = []
        if "output_log_probs" in self._wanted:
            tensors.append(Tensor("output_log_probs", np.array(logprobs, np.float32)))
        if "top_logprobs" in self._wanted:
            told = [self._told(each) for each in top]
            text = np.array([_encode_json(told)], np.object_)
            tensors.append(Tensor("top_logprobs", text))
        return tensors

    def _told(self, pairs: list[tuple[int, float]]) -> dict[str, Any]:
        """Say the probabilities at one place: the token's own, then the most probable ones."""
        most = self._question.params.logprobs or 0
        own = self._token(*pairs[0])
        best = sorted(dict(pairs).items(), key=lambda pair: -pair[1])[:most]
        own["top_logprobs"] = [self._token(*pair) for pair in best]
        return own

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = b"" if self._tokenizer is None else self._tokenizer.decode_bytes([token])
        return {
            "id": token,
            "token": raw.decode("utf-8", "replace"),
            "bytes": list(raw),
            "logprob": logprob,
        }

    def _last(
        self, output: CompletionOutput, context_logits: npt.NDArray[Any] | None
    ) -> list[Tensor]:
        """Return what only the last response of a sequence has."""
        if output.finish_reason is None:
            return []
        self._ended.add(output.index)
        wanted, tensors = self._wanted, []
        if "prompt_tokens" in wanted:
            tensors.append(_whole("prompt_tokens", len(self._prompt)))
        if "completion_tokens" in wanted:
            tensors.append(_whole("completion_tokens", output.length))
        if self._question.has_logprobs and "cum_log_probs" in wanted:
            total = np.array([output.cumulative_logprob or 0.0], np.float32)
            tensors.append(Tensor("cum_log_probs", total))
        if context_logits is not None and "context_logits" in wanted:
            tensors.append(Tensor("context_logits", context_logits))
        if output.generation_logits is not None and "generation_logits" in wanted:
            tensors.append(Tensor("generation_logits", output.generation_logits))
        return tensors
