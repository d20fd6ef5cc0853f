# SPDX-License-Identifier: Apache-2.0
"""An engine that does what it is told: for tests, and for measuring everything but a model.

Without a script a request gets the tokens that follow its prompt's last one (…, p+1, p+2, …,
modulo the vocabulary), so that whoever knows the prompt knows the answer. A request's `extra`
may say more, for it alone:

    tokens      its tokens, instead; they are repeated
    end         finish with "stop" after so many tokens
    reject      refuse it in `add` with this text
    error       end it with this text, after `error_at` tokens (0)
    chunk       so many tokens an iteration (1)
    stray       say something of it after its final output, twice
    silent      give no final output when it is aborted
    prefill     iterations before the first token (0)

With a beam width every iteration replaces the beams; with `logprobs` each token has its own,
-0.5, and as many others. Options stand at the constructor. It is an engine of either mode, and
on several ranks it counts along.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from actorserve.actors.generation.engine import RequestError, World
from actorserve.actors.generation.engines.scripted_row import Row, output_of
from actorserve.actors.generation.engines.scripted_text import ByteTokenizer
from actorserve.errors import InternalError
from actorserve.wire.generation import EngineInfo, GenRequest, Output


class Scripted:
    """The engine. See the module's head for what requests may say.

    - `vocab_size`; `text`: with a tokenizer of bytes (then the vocabulary is 257).
    - `slots`, `kv_tokens`: what it has room for; 0 is no limit.
    - `mode`: "step", or "thread": it runs by itself; `with_fileno`: and says when it has something.
    - `delay_s`: each iteration takes that long; `load_s`: so does loading.
    - `load_error`: loading fails with this text; `add_error`: `add` does, as its death.
    - `fail_at`, `kill_at`, `hang_at`: at this iteration (from 1) it raises, its process is
      killed, or it never comes back.
    - `on_rank`: which rank loading and the last three happen on; -1: on each.
    - `adapters`: it loads adapters; from a path that exists, unless `any_path`. `adapter_s`: how
      long that takes. With an adapter its number is added to every token.
    - `kv_events`: it tells of each sequence that begins and ends.
    """

    ranks: Literal["leader", "lockstep"] = "lockstep"

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        text: bool = False,
        slots: int = 0,
        kv_tokens: int = 0,
        mode: Literal["step", "thread"] = "step",
        with_fileno: bool = False,
        delay_s: float = 0.0,
        load_s: float = 0.0,
        load_error: str = "",
        add_error: str = "",
        fail_at: int = 0,
        kill_at: int = 0,
        hang_at: int = 0,
        on_rank: int = -1,
        adapters: bool = False,
        any_path: bool = False,
        adapter_s: float = 0.0,
        kv_events: bool = False,
    ) -> None:
        self.options = {"text": text}
        self.mode: Literal["step", "thread"] = mode
        self.rank = 0
        self.iterations = 0
        self.is_closed = False
        self.order: list[str] = []  # what was asked, shortly: the last thousand
        self.released = threading.Event()  # ends a hang, for tests in one process
        self._vocab_size = 257 if text else vocab_size
        self._slots, self._kv_tokens = slots, kv_tokens
        self._delay_s, self._load_s, self._adapter_s = delay_s, load_s, adapter_s
        self._load_error, self._add_error = load_error, add_error
        self._fail_at, self._kill_at, self._hang_at = fail_at, kill_at, hang_at
        self._is_quiet = not (fail_at or kill_at or hang_at or delay_s)
        self._on_rank = on_rank
        self._has_adapters, self._any_path = adapters, any_path
        self._adapters: dict[int, str] = {}
        self._rows: dict[int, Row] = {}
        self._ended: list[Output] = []
        self._strays: list[Output] = []
        self._used_tokens = 0
        self._events: deque[tuple[str, int]] | None = deque() if kv_events else None
        self._bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if with_fileno else None
        if with_fileno:
            self.fileno = self._fileno

    @staticmethod
    def tokenizer(options: dict[str, Any]) -> ByteTokenizer | None:
        """Return the tokenizer of bytes, if the options ask for text."""
        return ByteTokenizer() if options.get("text") else None

    def start(self, rank: int, world: World | None) -> EngineInfo:
        """Load, as slowly and as well as the options say."""
        self.rank = rank
        if self._load_s:
            self._pause(self._load_s)
        if self._load_error and self._is_here:
            raise InternalError(self._load_error)
        if world is not None:
            world.barrier()
        return EngineInfo(
            "scripted",
            vocab_size=self._vocab_size,
            slots=self._slots,
            kv_tokens=self._kv_tokens,
            end_id=256 if self.options["text"] else None,
            adapters=self._has_adapters,
            max_beam_width=64,
        )

    def add(self, request: GenRequest) -> None:
        """Take a request, or refuse it."""
        extra = request.extra or {}
        self._note(f"add {request.id}")
        if "reject" in extra:
            raise RequestError(str(extra["reject"]))
        if self._add_error:
            raise InternalError(self._add_error)
        if max(request.prompt) >= self._vocab_size:
            raise RequestError(f"token {max(request.prompt)} is not in the vocabulary")
        if request.adapter and request.adapter not in self._adapters:
            raise RequestError(f"there is no adapter {request.adapter}")
        row = Row(request, extra, self._vocab_size)
        self._rows[request.id] = row
        self._used_tokens += row.room
        self._tell("stored", request.id)
        self._wake()

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; "cancelled" follows with the next iteration."""
        self._note(f"abort {list(ids)}")
        for number in ids:
            row = self._rows.get(number)
            if row is None:
                continue
            self._drop(row)
            if not row.is_silent:
                self._ended.append(Output(number, finish="cancelled", final=True))
        self._wake()

    def poll(self, timeout_s: float) -> list[Output]:
        """Run an iteration: a token for every sequence, or as many as their scripts say."""
        if self.mode == "thread" and not self._await_work(timeout_s):
            return []
        self.iterations += 1
        if not self._is_quiet:
            self._misbehave()
        outputs, self._ended = self._ended, []
        if self._strays:
            outputs += self._strays
            self._strays = []
        finished: list[Row] = []
        for row in self._rows.values():
            if row.is_plain:
                made = row.made = row.made + 1
                is_last = made >= row.limit
                token = (row.base + made) % row.vocab_size
                if is_last:
                    outputs.append(Output(row.id, 0, [token], row.finish, True))
                    finished.append(row)
                else:
                    outputs.append(Output(row.id, 0, [token]))
            elif output_of(row, outputs):
                finished.append(row)
        for row in finished:
            self._drop(row)
            if row.is_stray:
                stray = Output(row.id, 0, [1], "stop", True)
                self._strays += [stray, stray]
        return outputs

    def close(self) -> None:
        """Let go of everything."""
        self._note("close")
        self.is_closed = True
        self.released.set()
        if self._bell is not None:
            for each in self._bell:
                os.close(each)
            self._bell = None

    # --- what engines may have -------------------------------------------------------------------

    def capacity(self) -> tuple[int, int]:
        """Return how many requests and tokens there is room for."""
        rows = self._slots - len(self._rows) if self._slots else 1 << 30
        tokens = self._kv_tokens - self._used_tokens if self._kv_tokens else 1 << 40
        return rows, tokens

    def stats(self) -> dict[str, Any]:
        """Return what it uses."""
        return {"kv_used_tokens": self._used_tokens, "kv_tokens": self._kv_tokens}

    def kv_events(self) -> list[tuple[str, int]]:
        """Return which sequences began and ended since the last time."""
        if not self._events:
            return []
        events = list(self._events)
        self._events.clear()
        return events

    def load_adapter(self, number: int, path: str) -> None:
        """Load an adapter, which adds its number to every token."""
        self._note(f"load {number}")
        if not self._has_adapters:
            raise RequestError("this engine has no adapters")
        if self._adapter_s:
            self._pause(self._adapter_s)
        if not self._any_path and not Path(path).exists():
            raise RequestError(f"adapter {number}: there is no {path}")
        self._adapters[number] = path

    def unload_adapter(self, number: int) -> None:
        """Forget an adapter."""
        self._note(f"unload {number}")
        if self._adapters.pop(number, None) is None:
            raise RequestError(f"there is no adapter {number}")

    def prepare(self, method: str, *args: Any) -> None:
        """Say whether a call would go well: not "refuse", on the rank of the options."""
        self._note(f"prepare {method}")
        if method == "refuse" and self._is_here:
            raise RequestError(f"rank {self.rank} refuses {list(args)}")

    def rollback(self, method: str, *args: Any) -> None:
        """Note that a call was called off."""
        self._note(f"rollback {method}")

    def call(self, method: str, *args: Any) -> Any:
        """Answer a call: "echo" its arguments, "order" what was asked, "pid", "fail", "die"."""
        self._note(f"call {method}")
        if method == "echo":
            return list(args)
        if method == "order":
            return list(self.order)
        if method == "iterations":
            return self.iterations
        if method == "pid":
            return os.getpid()
        if method == "fail":
            raise InternalError(str(args[0]) if args else "as it was told")
        if method == "logits":
            return np.zeros(2).tolist()
        return None

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _is_here(self) -> bool:
        return self._on_rank in (-1, self.rank)

    def _misbehave(self) -> None:
        if self._delay_s:
            self._pause(self._delay_s)
        if not self._is_here:
            return
        if self.iterations == self._fail_at:
            raise InternalError(f"iteration {self.iterations} failed, as it was told")
        if self.iterations == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.iterations == self._hang_at:
            self.released.wait()

    def _await_work(self, timeout_s: float) -> bool:
        if self._bell is not None:
            try:
                os.read(self._bell[0], 4096)
            except BlockingIOError:
                return False
        if not (self._rows or self._ended):
            self._pause(timeout_s)
            return False
        self._wake()  # there is more, since this one has only begun
        return True

    def _fileno(self) -> int:
        assert self._bell is not None
        return self._bell[0]

    def _wake(self) -> None:
        if self._bell is not None:
            os.write(self._bell[1], b"\0")

    def _pause(self, seconds: float) -> None:
        select.select([], [], [], seconds)

    def _drop(self, row: Row) -> None:
        del self._rows[row.id]
        self._used_tokens -= row.room
        self._tell("removed", row.id)

    def _tell(self, what: str, number: int) -> None:
        if self._events is not None:
            self._events.append((what, number))

    def _note(self, what: str) -> None:
        self.order.append(what)
        if len(self.order) > 1000:
            del self.order[:500]
