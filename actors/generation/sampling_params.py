# SPDX-License-Identifier: Apache-2.0
"""How a client says what it wants generated, and its translation into what engines get."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from actorserve.actors.generation.engine import Tokenizer
from actorserve.errors import InvalidArgument, Unsupported
from actorserve.wire.generation import Sampling

_UNSUPPORTED = (
    "external_draft_tokens_config",
    "prompt_tuning_config",
    "logits_post_processor_name",
    "top_p_min",
    "top_p_reset_ids",
    "top_p_decay",
    "beam_search_diversity_rate",
    "early_stopping",
)
_MAX_TOKENS = 1 << 31

# name: (lowest, whether that itself is allowed, highest)
_RANGES: dict[str, tuple[float, bool, float]] = {
    "end_id": (-1, True, _MAX_TOKENS),
    "pad_id": (-1, True, _MAX_TOKENS),
    "seed": (-(1 << 63), True, (1 << 64) - 1),
    "random_seed": (-(1 << 63), True, (1 << 64) - 1),
    "max_tokens": (1, True, _MAX_TOKENS),
    "max_new_tokens": (1, True, _MAX_TOKENS),
    "min_tokens": (0, True, _MAX_TOKENS),
    "beam_width": (1, True, 1 << 16),
    "n": (1, True, 1 << 16),
    "best_of": (1, True, 1 << 16),
    "top_k": (0, True, _MAX_TOKENS),
    "top_p": (0, False, 1),
    "min_p": (0, True, 1),
    "temperature": (0, True, 1e6),
    "repetition_penalty": (0, False, 1e6),
    "presence_penalty": (-1e6, True, 1e6),
    "frequency_penalty": (-1e6, True, 1e6),
    "length_penalty": (-1e6, True, 1e6),
    "no_repeat_ngram_size": (0, True, _MAX_TOKENS),
    "logprobs": (0, True, _MAX_TOKENS),
}
_WHOLE = {
    "end_id",
    "pad_id",
    "seed",
    "random_seed",
    "max_tokens",
    "max_new_tokens",
    "min_tokens",
    "beam_width",
    "n",
    "best_of",
    "top_k",
    "no_repeat_ngram_size",
    "logprobs",
}
_NEVER_NONE = ("max_tokens", "n", "beam_width")
_FLAGS = (
    "ignore_eos",
    "include_stop_str_in_output",
    "return_log_probs",
    "return_context_logits",
    "return_generation_logits",
    "exclude_input_from_output",
)


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when it is enough. None stands for "as usual".

    With neither `temperature`, `top_k` nor `top_p` the choice is greedy. `max_new_tokens` is an
    older name of `max_tokens`. `end_id` defaults to the model's; -1, or `ignore_eos`, never ends.
    `stop` and `bad` are texts (the executor must have a tokenizer), `stop_token_ids` and
    `bad_token_ids` tokens or sequences of tokens. `n` sequences are returned, the best of
    `best_of`; with a `beam_width` over 1, the `n` best beams (all of them by default).
    `logprobs`: None, 0 for the chosen tokens, k for the k most probable ones beside them;
    `return_log_probs` is an older name of 0. `embedding_bias` and `logit_bias` are added to the
    logits. A wrong value raises InvalidArgument when the request is submitted.
    """

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    max_new_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    bad: str | Sequence[str] | None = None
    bad_token_ids: Sequence[int | Sequence[int]] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int | Sequence[int]] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    logit_bias: dict[int, float] | None = None
    external_draft_tokens_config: Any = None
    prompt_tuning_config: Any = None
    logits_post_processor_name: str | None = None
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: int | None = None
    top_p_decay: float | None = None
    seed: int | None = None
    random_seed: int | None = None
    temperature: float | None = None
    beam_search_diversity_rate: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: int | None = None
    no_repeat_ngram_size: int | None = None
    logprobs: int | None = None
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    exclude_input_from_output: bool = True
    _cached: tuple[tuple[Any, ...], Sampling] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that stop a sequence."""
        return _texts("stop", self.stop)

    @property
    def sequences(self) -> int:
        """How many sequences a result has."""
        return max(self.n, self.beam_width if self.n == 1 else 1)

    def check(self) -> None:
        """Raise InvalidArgument or Unsupported for what cannot be served by any engine."""
        for name in _UNSUPPORTED:
            if getattr(self, name) is not None:
                raise Unsupported(f"sampling: {name} is not supported")
        for name in _FLAGS:
            value = getattr(self, name)
            if type(value) is not bool:
                raise InvalidArgument(f"sampling: {name} is {value!r}, expected True or False")
        if not self.exclude_input_from_output:
            raise Unsupported("sampling: exclude_input_from_output=False is not supported")
        for name, (lowest, is_lowest_fine, highest) in _RANGES.items():
            value = getattr(self, name)
            if value is not None or name in _NEVER_NONE:
                _check_number(name, value, lowest, is_lowest_fine, highest)
        best_of = self.best_of or self.n
        if best_of < self.n:
            raise InvalidArgument(f"sampling: best_of is {best_of}, less than n ({self.n})")
        if self.beam_width > 1 and self.n > self.beam_width:
            raise InvalidArgument(
                f"sampling: n is {self.n}, more than beam_width ({self.beam_width})"
            )

    def to_sampling(
        self,
        tokenizer: Tokenizer | None = None,
        end_id: int | None = None,
    ) -> Sampling:
        """Return what an engine gets; `end_id` is the model's own.

        Raises InvalidArgument for what makes no sense, or needs a tokenizer that is not there.
        """
        if any(each is not None for each in _mutable_fields(self)):  # `==` is an array's own
            return self._translated(tokenizer, end_id)
        now = (tokenizer, end_id, *_all_fields(self))
        if self._cached is None or not _is_same(self._cached[0], now):
            self._cached = (now, self._translated(tokenizer, end_id))
        return self._cached[1]

    def _translated(self, tokenizer: Tokenizer | None, end_id: int | None) -> Sampling:
        self.check()
        if tokenizer is None and (self.stop_texts or _texts("bad", self.bad)):
            raise InvalidArgument(
                "sampling: stop and bad are texts, and this engine has no tokenizer;"
                " name token ids instead (stop_token_ids, bad_token_ids)"
            )
        is_greedy = self.temperature is None and self.top_k is None and self.top_p is None
        return Sampling(
            max_tokens=self.max_tokens if self.max_new_tokens is None else self.max_new_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=_or(self.temperature, 0.0 if is_greedy else 1.0),
            top_k=self.top_k or 0,
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            no_repeat_ngram_size=self.no_repeat_ngram_size or 0,
            seed=self.random_seed if self.seed is None else self.seed,
            end_id=self._end_id(end_id),
            stop_words=_words("stop_token_ids", self.stop_token_ids),
            bad_words=self._bad_words(tokenizer),
            logit_bias=self._bias(),
            logprobs=0 if self.logprobs is None and self.return_log_probs else self.logprobs,
            context_logits=self.return_context_logits,
            generation_logits=self.return_generation_logits,
            n=self.sequences,
            best_of=max(self.best_of or 1, self.sequences if self.beam_width == 1 else 1),
            beam_width=self.beam_width,
            length_penalty=_or(self.length_penalty, 0.0),
            include_stop=self.include_stop_str_in_output,
        )

    def _end_id(self, of_model: int | None) -> int | None:
        if self.ignore_eos or self.end_id == -1:
            return None
        return of_model if self.end_id is None else self.end_id

    def _bad_words(self, tokenizer: Tokenizer | None) -> list[list[int]]:
        words = _words("bad_token_ids", self.bad_token_ids)
        for text in _texts("bad", self.bad):
            assert tokenizer is not None
            for form in (text, f" {text}"):  # a word within a line is another token, mostly
                tokens = tokenizer.encode(form)
                if tokens and tokens not in words:
                    words.append(tokens)
        return words

    def _bias(self) -> dict[int, float]:
        bias: dict[int, float] = {}
        try:
            for token, value in dict(_given(self.logit_bias)).items():
                bias[_token_of(token)] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"sampling: logit_bias has to be a dict of token ids and numbers: {error}"
            ) from None
        try:
            for token, value in enumerate(_given(self.embedding_bias)):
                if value:
                    bias[token] = bias.get(token, 0.0) + float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(
                f"sampling: embedding_bias has to be a number for each token: {error}"
            ) from None
        return bias


# What is said by values that never change in place is translated once, not with every request.
_mutable_fields = attrgetter(
    "bad", "bad_token_ids", "stop", "stop_token_ids", "embedding_bias", "logit_bias"
)
_all_fields = attrgetter(*(each.name for each in fields(SamplingParams) if each.init))


def _is_same(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    try:
        return before == now
    except (TypeError, ValueError):  # an array, where none belongs: it will be refused
        return False


def _check_number(
    name: str, value: Any, lowest: float, is_lowest_fine: bool, highest: float
) -> None:
    kinds = int if name in _WHOLE else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    fits = is_number and lowest <= value <= highest  # NaN is never between
    if not fits or (value == lowest and not is_lowest_fine):
        kind = "a whole number" if name in _WHOLE else "a number"
        least = f"{lowest:g} or more" if is_lowest_fine else f"more than {lowest:g}"
        most = f", at most {highest:g}" if highest < 1e6 else ""
        raise InvalidArgument(f"sampling: {name} is {value!r}, expected {kind}, {least}{most}")


def _given(values: Any) -> Any:
    """Return what can be iterated; an array has no truth of its own."""
    return () if values is None else values


def _each_of(name: str, value: Iterable[Any] | None) -> tuple[Any, ...]:
    try:
        return tuple(_given(value))
    except TypeError:
        raise InvalidArgument(f"sampling: {name} is {value!r}, expected a list") from None


def _texts(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _each_of(name, value)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidArgument(f"sampling: {name} has {text!r}, expected a text")
        if not text.isascii():
            _check_unicode(name, text)
    return texts


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"sampling: {name} cannot be written as UTF-8: {error}") from None


def _words(name: str, value: Sequence[int | Sequence[int]] | None) -> list[list[int]]:
    words = []
    for word in _each_of(name, value):
        try:
            word = [word] if isinstance(word, numbers.Integral) else list(word)
            tokens = [_token_of(each) for each in word]
        except (TypeError, ValueError):
            tokens = []
        if not tokens:
            raise InvalidArgument(f"sampling: {name} has {word!r}, expected token ids")
        words.append(tokens)
    return words


def _token_of(value: Any) -> int:
    """Return a token id. Raises ValueError."""
    if type(value) is not bool and isinstance(value, numbers.Integral):
        token = int(value)
        if 0 <= token < _MAX_TOKENS:
            return token
    raise ValueError(f"{value!r} is no token id")


def _or(value: float | None, usual: float) -> float:
    return usual if value is None else float(value)
