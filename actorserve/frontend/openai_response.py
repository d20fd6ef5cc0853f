# SPDX-License-Identifier: Apache-2.0
"""What a model generates, piece by piece, to the documents and events of OpenAI's API.

    Piece ─┬─ Whole:  kept until the end, then one document
           └─ Chunks: an event for each, a last one with the usage, "data: [DONE]"

Pure: no I/O, the time and the id come from outside. Choices are numbered prompt by prompt: choice
k of prompt p has the index p * n + k.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from actorserve.errors import ActorserveError, InternalError
from actorserve.frontend.openai_errors import encode_body, error_body
from actorserve.frontend.openai_request import Asked
from actorserve.frontend.openai_tensors import Piece, TokenLogprob
from actorserve.frontend.v2_generate import event

DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct):
    """How many tokens a request has cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a completion's text, in columns."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]] | None


class ChatLogprobs(msgspec.Struct):
    """The tokens of a message, in rows."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(msgspec.Struct):
    """One text, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class ChatMessage(msgspec.Struct):
    """What the model says."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Delta(msgspec.Struct):
    """A piece of a message; the first one has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class DeltaChoice(msgspec.Struct):
    """A piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


Choice = CompletionChoice | ChatChoice | DeltaChoice


class _Document(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET


class _Sequence:
    """One choice, as far as it has come."""

    __slots__ = ("completion_tokens", "finish", "logprobs", "offset", "pieces")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.offset = 0
        self.finish = ""
        self.completion_tokens = 0


class Reply:
    """What both forms of a reply count and know."""

    def __init__(self, asked: Asked, number: str, created: int) -> None:
        self.asked = asked
        self._sequences: dict[int, _Sequence] = {}
        self._prompt_tokens: dict[int, int] = {}
        self._discarded_tokens = 0  # OpenAI counts all that were generated
        self._created = created
        self._id = f"chatcmpl-{number}" if asked.is_chat else f"cmpl-{number}"
        if not asked.is_chat:
            self._object = "text_completion"
        else:
            self._object = "chat.completion.chunk" if asked.stream else "chat.completion"

    def _take(self, prompt: int, piece: Piece) -> tuple[int, _Sequence, bool]:
        """Note what a piece says; return its choice, and whether this is the choice's first."""
        index = prompt * self.asked.n + piece.index
        if not 0 <= piece.index < self.asked.n:
            raise InternalError(f"the model sent sequence {piece.index} of {self.asked.n}")
        sequence = self._sequences.get(index)
        is_first = sequence is None
        if sequence is None:
            sequence = self._sequences[index] = _Sequence()
        sequence.completion_tokens = max(sequence.completion_tokens, piece.completion_tokens)
        sequence.finish = piece.finish or sequence.finish
        self._discarded_tokens += piece.discarded_tokens
        known = self._prompt_tokens.get(prompt, 0)
        self._prompt_tokens[prompt] = max(known, piece.prompt_tokens)
        return index, sequence, is_first

    def _check_complete(self) -> None:
        """Raise where a choice has no end."""
        wanted = len(self.asked.prompts) * self.asked.n
        ended = sum(bool(each.finish) for each in self._sequences.values())
        if ended < wanted:
            raise InternalError(f"the model completed {ended} of {wanted} answers")

    def _usage(self) -> Usage:
        prompt = sum(self._prompt_tokens.values())
        completion = sum(each.completion_tokens for each in self._sequences.values())
        completion += self._discarded_tokens
        return Usage(prompt, completion, prompt + completion)

    def _encode(self, choices: list[Choice], usage: Usage | UnsetType | None) -> bytes:
        document = _Document(
            self._id, self._object, self._created, self.asked.model, choices, usage
        )
        return msgspec.json.encode(document)

    def _completion_logprobs(
        self, logprobs: list[TokenLogprob], offset: int
    ) -> CompletionLogprobs | None:
        """Return tokens in columns; `offset` is where the first one stands in the text."""
        if self.asked.logprobs is None:
            return None
        offsets = []
        for each in logprobs:
            offsets.append(offset)
            offset += len(each.token)
        return CompletionLogprobs(
            offsets,
            [each.logprob for each in logprobs],
            [each.token for each in logprobs],
            [{one.token: one.logprob for one in each.top_logprobs} for each in logprobs]
            if self.asked.logprobs
            else None,
        )

    def _chat_logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs | None:
        return None if self.asked.logprobs is None else ChatLogprobs(logprobs)


class Whole(Reply):
    """A reply in one document."""

    def take(self, prompt: int, piece: Piece) -> None:
        """Keep a piece."""
        _, sequence, _ = self._take(prompt, piece)
        sequence.pieces.append(piece.text)
        sequence.logprobs += piece.logprobs

    def document(self) -> bytes:
        """Return the reply. Raises InternalError where the model has not completed it."""
        self._check_complete()
        make = self._chat_choice if self.asked.is_chat else self._completion_choice
        choices = [make(index, each) for index, each in sorted(self._sequences.items())]
        return self._encode(choices, self._usage())

    def _chat_choice(self, index: int, sequence: _Sequence) -> Choice:
        message = ChatMessage("assistant", "".join(sequence.pieces))
        return ChatChoice(index, message, self._chat_logprobs(sequence.logprobs), sequence.finish)

    def _completion_choice(self, index: int, sequence: _Sequence) -> Choice:
        logprobs = self._completion_logprobs(sequence.logprobs, 0)
        return CompletionChoice(index, "".join(sequence.pieces), logprobs, sequence.finish)


class Chunks(Reply):
    """A reply as a stream of events."""

    def take(self, prompt: int, piece: Piece) -> bytes:
        """Return the event of a piece."""
        index, sequence, is_first = self._take(prompt, piece)
        finish = piece.finish or None
        choice: Choice
        if self.asked.is_chat:
            delta = Delta("assistant" if is_first else UNSET)
            if piece.text or is_first:
                delta.content = piece.text
            choice = DeltaChoice(index, delta, self._chat_logprobs(piece.logprobs), finish)
        else:
            logprobs = self._completion_logprobs(piece.logprobs, sequence.offset)
            sequence.offset += sum(len(each.token) for each in piece.logprobs)
            choice = CompletionChoice(index, piece.text, logprobs, finish)
        return event(self._encode([choice], None if self.asked.has_usage else UNSET))

    def end(self) -> bytes:
        """Return the last events. Raises InternalError where the model has not completed it."""
        self._check_complete()
        usage = event(self._encode([], self._usage())) if self.asked.has_usage else b""
        return usage + DONE


def error_events(error: ActorserveError) -> bytes:
    """Return what ends a stream that has begun and cannot go on."""
    return event(encode_body(error_body(error))) + DONE
