# SPDX-License-Identifier: Apache-2.0
"""What travels between a generation executor and the ranks of its engine.

    executor ── work lane ──► rank 0   Start, Submit, Abort, Call, Close
    executor ── control lane ► rank 0  Ping (messages.py)
    rank     ── up lane ────► executor Loading, Loaded, LoadFailed, Outputs, CallEnded,
                                       IterationStats, KvEvents, Closed, Pong
    rank 0   ══ broadcast ring ► ranks Step   (every rank sees the same steps, in one order)

A message that is longer than a frame may be is sent as Fragments. Requests and outputs are what
engines see too (actors/generation/engine.py), in the same process as in another one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actorserve.wire.codec import Decoder
from actorserve.wire.messages import Message, Ping, Pong


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the tokens of one request are chosen. Plain values: what "off" means stands here.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the
    other penalties 0 change nothing. `seed` None takes one at random. `end_id` None never ends
    by itself. `logprobs` None asks for none, 0 for those of the chosen tokens, k for the k most
    probable ones beside them. `stop_words` and `bad_words` are token sequences. `best_of`
    sequences are generated and the `n` best returned; beam search (`beam_width` over 1) returns
    its `n` best beams.
    """

    max_tokens: int = 32
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    seed: int | None = None
    end_id: int | None = None
    stop_words: list[list[int]] = []
    bad_words: list[list[int]] = []
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    context_logits: bool = False
    generation_logits: bool = False
    n: int = 1
    best_of: int = 1
    beam_width: int = 1
    length_penalty: float = 0.0
    include_stop: bool = False


class GenRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request as an engine gets it. `id` is the executor's and never used again.

    `prompt` holds token ids. `adapter` 0 is the base model. `deadline_s` is on the monotonic
    clock of this machine, 0 for none. Of two that wait, the higher `priority` goes first.
    `stream` false: only the end matters to the client, so deltas may be kept back until then.
    """

    id: int
    prompt: list[int]
    sampling: Sampling
    adapter: int = 0
    deadline_s: float = 0.0
    priority: int = 0
    stream: bool = True
    extra: dict[str, Any] | None = None


class Output(msgspec.Struct, array_like=True, gc=False):
    """What came for one sequence of one request.

    `tokens` are new ones, or with `replace` all of the sequence so far (beam search). `finish`
    ends the sequence: "stop", "length", "cancelled", "timeout" or "error"; `stop_reason` is the
    end id or the index of the stop word that ended it. `final` is the last message of the
    request: exactly one per id. `logprobs` has one entry a token: the pairs (token, natural
    logarithm of its probability), the chosen one first. `arrays` holds logits by name
    ("context_logits" [prompt tokens, vocabulary], "generation_logits" [tokens, vocabulary],
    float32): numpy arrays beside an engine, WireTensors on the wire.
    """

    id: int
    seq: int = 0
    tokens: list[int] = []
    finish: str | None = None
    final: bool = False
    stop_reason: int | None = None
    logprobs: list[list[tuple[int, float]]] | None = None
    cum_logprob: float | None = None
    error: str | None = None
    replace: bool = False
    arrays: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """What an engine says of itself when it has loaded; 0 where it does not know."""

    name: str
    vocab_size: int = 0
    context_tokens: int = 0
    slots: int = 0
    kv_tokens: int = 0
    end_id: int | None = None
    adapters: bool = False
    max_beam_width: int = 1
    extra: dict[str, Any] = {}


# --- executor to ranks ---------------------------------------------------------------------------


class Start(Message, frozen=True, tag=60):
    """Load the engine: `engine` names it, `options` are its own, `rank` of `size` is to be it."""

    engine: str
    options: dict[str, Any]
    rank: int
    size: int
    epoch: int


class Submit(Message, frozen=True, tag=61):
    """Take these requests."""

    requests: list[GenRequest]


class Abort(Message, frozen=True, tag=62):
    """End these requests; those that are over already are no mistake."""

    ids: list[int]


class Call(Message, frozen=True, tag=63):
    """Call a method of the engine on every rank, in two phases; CallEnded answers `number`."""

    number: int
    method: str
    args: list[Any]
    deadline_s: float = 0.0


class Close(Message, frozen=True, tag=64):
    """Close the engine and end. With `drain`, what was accepted is finished first."""

    drain: bool = False


class Fragment(Message, frozen=True, tag=65):
    """A piece of a message that is longer than a frame; the last one completes it."""

    data: bytes
    is_last: bool


# --- ranks to executor ---------------------------------------------------------------------------


class Loading(Message, frozen=True, tag=70):
    """A rank has begun to load its engine."""

    rank: int


class Loaded(Message, frozen=True, tag=71):
    """A rank is ready."""

    rank: int
    info: EngineInfo


class LoadFailed(Message, frozen=True, tag=72):
    """A rank could not load its engine; it ends by itself.

    `code` is that of an error by which the engine refuses what was asked of it; None for a fault.
    """

    rank: int
    error: str
    traceback: str
    code: int | None = None


class Outputs(Message, frozen=True, tag=73):
    """What one iteration brought, for all requests together."""

    outputs: list[Output]


class CallEnded(Message, frozen=True, tag=74):
    """The end of Call `number`: a result, or an error as text."""

    number: int
    result: Any = None
    error: str | None = None


class IterationStats(Message, frozen=True, tag=75):
    """Snapshots of iterations since the last such message; `dropped` were left out in all."""

    snapshots: list[dict[str, Any]]
    dropped: int


class KvEvents(Message, frozen=True, tag=76):
    """Events of the key-value cache; the first has the sequence number `first`."""

    first: int
    events: list[Any]


class EngineFailed(Message, frozen=True, tag=77):
    """A rank's engine is dead: an error that was no request's. The rank ends by itself."""

    rank: int
    error: str
    traceback: str


class Closed(Message, frozen=True, tag=78):
    """A rank has closed its engine and ends."""

    rank: int


# --- rank 0 to the other ranks, on the broadcast ring ---------------------------------------------


class Step(Message, frozen=True, tag=80):
    """One turn of the pump, the same on every rank: add, abort, call, then poll if `poll`.

    `call` is a phase of a two-phase call: (number, phase, method, args), the phases being
    "prepare", "commit" and "rollback".
    """

    number: int
    adds: list[GenRequest]
    aborts: list[int]
    call: tuple[int, str, str, list[Any]] | None = None
    poll: bool = True
    close: bool = False


ToRank = Start | Submit | Abort | Call | Close | Fragment | Ping
FromRank = (
    Loading
    | Loaded
    | LoadFailed
    | Outputs
    | CallEnded
    | IterationStats
    | KvEvents
    | EngineFailed
    | Closed
    | Fragment
    | Pong
)

decode_to_rank: Decoder[ToRank] = Decoder(ToRank, "to a rank")
decode_from_rank: Decoder[FromRank] = Decoder(FromRank, "from a rank")
decode_step: Decoder[Step] = Decoder(Step, "of the broadcast ring")
