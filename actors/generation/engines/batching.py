# SPDX-License-Identifier: Apache-2.0
"""In-flight batching over a DecoderModel: an Engine whose requests share every iteration.

    add ─► waiting ─► slots ─► prompt, in chunks ─► one token an iteration ─► slots free again

Each iteration runs one batch: a row for every answer that goes on, and as many tokens of prompts
as fit. Requests get slots in the order they came, all slots of one at once. Nothing here depends
on time or chance but the seeds that a request leaves open, and those come from rank 0: ranks that
are told the same do the same.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal

import numpy as np

from actorserve.actors.generation.engine import (
    EngineInfo,
    GenRequest,
    Output,
    RequestError,
    Tokenizer,
    World,
)
from actorserve.actors.generation.engines.active_rows import ActiveRows
from actorserve.actors.generation.engines.admitting import check_request
from actorserve.actors.generation.engines.choosing import next_tokens
from actorserve.actors.generation.engines.decoder import Batch, DecoderModel, FloatArray
from actorserve.actors.generation.engines.job import Job
from actorserve.actors.generation.engines.prompts import Piece, add_prompts
from actorserve.actors.generation.engines.sampler import FORBIDDEN, Sampler, stream_key
from actorserve.actors.generation.engines.sequence import Sequence
from actorserve.actors.generation.engines.slot_table import KvEvent, SlotTable
from actorserve.clock import monotonic_s
from actorserve.errors import AlreadyExists, InvalidArgument

__all__ = ["BatchEngine"]


class BatchEngine:
    """Base of engines in numpy; a subclass says how its model is loaded.

    Options: `slots` answers at once, `chunk_tokens` of prompts in one iteration.
    """

    mode: Literal["step", "thread"] = "step"
    ranks: Literal["leader", "lockstep"] = "lockstep"
    has_adapters = False  # whether the model of this class takes them

    def __init__(self, *, slots: int = 8, chunk_tokens: int = 128) -> None:
        for name, value in (("slots", slots), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise InvalidArgument(f"engine option {name}: {value}; expected 1 or more")
        self._chunk_tokens = chunk_tokens
        self._model: DecoderModel | None = None
        self._entropy = 0
        self._table = SlotTable(slots)
        self._sampler = Sampler(slots)
        self._jobs: dict[int, Job] = {}  # all there are, by id
        self._waiting: deque[Job] = deque()
        self._in_prompt: deque[Job] = deque()
        self._answering: list[Job] = []
        self._active: ActiveRows | None = None  # None: it has changed
        self._adapters: dict[int, Any] = {}
        self._ready: list[Output] = []
        self._figures: dict[str, Any] = {"decode_rows": 0, "prompt_rows": 0, "forward_s": 0.0}

    # --- what a subclass says --------------------------------------------------------------------

    def load_model(self, rank: int, world: World | None) -> DecoderModel:
        """Load and return the model; `world` is None for a single rank."""
        raise NotImplementedError

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer | None:
        """Return the tokenizer that these options mean, without loading weights."""
        return None

    # --- the engine ------------------------------------------------------------------------------

    def start(self, rank: int, world: World | None) -> EngineInfo:
        """Load the model and make its memory."""
        model = self.load_model(rank, world)
        model.allocate(self._table.slots)
        entropy = np.frombuffer(os.urandom(8), np.int64)
        self._entropy = int((entropy if world is None else world.broadcast(entropy))[0])
        self._model = model
        return EngineInfo(
            model.name,
            vocab_size=model.vocab_size,
            context_tokens=model.context_tokens,
            slots=self._table.slots,
            kv_tokens=self._table.slots * model.context_tokens,
            end_id=model.end_id,
            adapters=self.has_adapters,
            max_beam_width=self._table.slots,
        )

    def add(self, request: GenRequest) -> None:
        """Take a request, which waits until it has its slots. Raises RequestError."""
        model = self._loaded()
        check_request(
            request,
            vocabulary=model.vocab_size,
            context_tokens=model.context_tokens,
            slots=self._table.slots,
        )
        adapter = self._adapters.get(request.adapter)
        if adapter is None and request.adapter:
            raise RequestError(f"adapter: {request.adapter} is not loaded")
        # the last token of an answer needs no place in memory: nothing comes after it
        room = model.context_tokens - len(request.prompt) + 1
        job = Job(request, adapter, min(request.sampling.max_tokens, room), model.vocab_size)
        self._jobs[request.id] = job
        self._waiting.append(job)

    def abort(self, ids: SequenceOf[int]) -> None:
        """End requests and free their slots at once; unknown ids are ignored."""
        for number in ids:
            job = self._jobs.get(number)
            if job is not None:
                self._ready += job.cancel()
                self._forget(job)

    def poll(self, timeout_s: float) -> list[Output]:
        """Run one iteration and return what came of it, which may be nothing but a prompt read."""
        while self._waiting and self._waiting[0].width <= self._table.free:
            job = self._waiting.popleft()
            job.slots = self._table.take(job.width, job.id)
            self._in_prompt.append(job)
        if self._in_prompt or self._answering:
            self._iterate(self._loaded())
        outputs, self._ready = self._ready, []
        return outputs

    def close(self) -> None:
        """Let go of the model and of all requests."""
        self._model = self._active = None
        self._jobs.clear()
        self._waiting.clear()
        self._in_prompt.clear()
        self._answering.clear()
        self._adapters.clear()

    def capacity(self) -> tuple[int, int]:
        """Return how many more answers have a slot. Each brings its whole context with it."""
        free = max(0, self._table.free - sum(job.width for job in self._waiting))
        return free, sys.maxsize if free else 0

    def stats(self) -> dict[str, Any]:
        """Return what the last iteration did, and what is in use now."""
        slots = self._table.slots
        return {
            **self._figures,
            "slots": slots,
            "slots_used": slots - self._table.free,
            "kv_tokens": slots * self._loaded().context_tokens,
            "kv_tokens_used": int(self._table.length.sum()),
        }

    def kv_events(self) -> list[KvEvent]:
        """Return what happened to slots since the last call, oldest first."""
        return self._table.take_events()

    def load_adapter(self, adapter_id: int, path: str) -> None:
        """Load a LoRA adapter under a number. Raises RequestError, or AlreadyExists."""
        if adapter_id < 1:
            raise RequestError(f"adapter: {adapter_id}; expected 1 or more, 0 is the bare model")
        if adapter_id in self._adapters:
            raise AlreadyExists(f"adapter: {adapter_id} is loaded already; unload it first")
        self._adapters[adapter_id] = self._loaded().load_adapter(path)

    def unload_adapter(self, adapter_id: int) -> None:
        """Forget an adapter; requests that have it go on with it. Unknown numbers are ignored."""
        self._adapters.pop(adapter_id, None)

    def call(self, method: str, *args: Any) -> Any:
        """Answer "adapters" with the numbers of those that are loaded."""
        if method == "adapters" and not args:
            return sorted(self._adapters)
        raise InvalidArgument(f"this engine has no call {method!r} with {len(args)} arguments")

    def _loaded(self) -> DecoderModel:
        if self._model is None:
            raise InvalidArgument("the engine is not started, or closed")
        return self._model

    def _release(self, job: Job, slots: SequenceOf[int]) -> None:
        for slot in slots:
            job.slots.remove(slot)
            self._table.give_back(slot, job.id)
        self._active = None

    def _forget(self, job: Job) -> None:
        """Drop a request that is over, wherever it is."""
        del self._jobs[job.id]
        for jobs in (self._waiting, self._in_prompt, self._answering):
            if job in jobs:
                jobs.remove(job)
        self._release(job, job.slots.copy())

    # --- an iteration ----------------------------------------------------------------------------

    def _iterate(self, model: DecoderModel) -> None:
        if self._active is None:
            self._active = ActiveRows(self._answering)
        active, table = self._active, self._table
        slots = active.slots
        batch = Batch(table.last[slots], table.length[slots], slots, len(slots))
        batch.adapters = active.adapters
        pieces: list[Piece] = []
        if self._in_prompt:
            pieces = add_prompts(batch, self._in_prompt, self._chunk_tokens)
        started_s = monotonic_s()
        logits = model.forward(batch)
        self._figures["forward_s"] = monotonic_s() - started_s
        self._figures["decode_rows"] = batch.decode
        self._figures["prompt_rows"] = len(batch.tokens) - batch.decode
        table.length[slots] += 1
        if pieces:
            active = active.joined_by(self._end_prompts(model, pieces, logits))
        self._choose(active, logits)
        for job, rows in active.searches:
            self._search(model, job, logits[rows])

    def _end_prompts(
        self, model: DecoderModel, pieces: list[Piece], logits: FloatArray
    ) -> list[tuple[Job, int]]:
        """Note what is read; return the requests whose answers begin, and their rows of logits."""
        beginning = []
        for piece in pieces:
            job, span = piece.job, piece.span
            self._table.note_prompt(span.slot, job.id, span.position, span.count)
            job.done += span.count
            if job.context is not None:
                job.context.append(logits[piece.first : piece.behind].copy())
            if job.done < len(job.request.prompt):
                continue
            self._in_prompt.remove(job)
            self._answering.append(job)
            self._active = None
            self._ready += job.context_outputs()
            self._begin(model, job)
            beginning.append((job, piece.behind - 1))
        return beginning

    def _begin(self, model: DecoderModel, job: Job) -> None:
        sampling = job.request.sampling
        seed = self._entropy ^ job.id if sampling.seed is None else sampling.seed
        for answer in job.begin():
            self._sampler.set(answer.slot, sampling, stream_key(seed, answer.index))
            if answer.slot != job.slots[0]:
                self._copy_slot(model, job.slots[0], answer.slot)

    def _copy_slot(self, model: DecoderModel, source: int, target: int) -> None:
        model.copy_slot(source, target, self._table.note_copy(source, target))

    def _choose(self, active: ActiveRows, logits: FloatArray) -> None:
        """Give every answer but those of beam searches its next token."""
        answers, slots = active.answers, active.answer_slots
        if not answers:
            return
        rows = logits if active.answer_rows is None else logits[active.answer_rows]
        tokens = next_tokens(rows, answers, slots, self._sampler)
        self._table.last[slots] = tokens
        ready = self._ready
        for answer, token in zip(answers, tokens):
            if token != FORBIDDEN and not answer.take(token):
                if answer.shows_deltas and (output := answer.delta()) is not None:
                    ready.append(output)
                continue
            if token == FORBIDDEN:
                answer.finish = "error"
            self._end_answer(answer)

    def _end_answer(self, answer: Sequence) -> None:
        job = self._jobs[answer.request.id]
        outputs = job.ended(answer)
        self._ready += outputs
        if outputs and outputs[-1].final:
            self._forget(job)
        else:
            self._release(job, [answer.slot])

    def _search(self, model: DecoderModel, job: Job, logits: FloatArray) -> None:
        """Make a step of a beam search, whose rows of logits these are."""
        search = job.beams
        assert search is not None
        for beam, row in zip(search.beams, logits):
            if beam.constraints is not None:
                beam.constraints.apply(row)
        for source, target in search.step(logits):
            self._copy_slot(model, source, target)
        self._active = None
        if search.is_over():
            self._ready += job.end_beams()
            self._forget(job)
            return
        for beam in search.beams:
            self._table.last[beam.slot] = beam.tokens[-1]
        if job.shows_deltas:
            self._ready += search.show()
