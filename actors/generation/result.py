# SPDX-License-Identifier: Apache-2.0
"""The answer to one request: a future, and a stream of its own states. For any thread or loop.

    feed (what has come) ── a step ──► outputs (what the client sees)

What always holds: `outputs` change only within a step (and so while somebody waits or iterates
here); an error stays, and every later access raises the same one; whoever gives the result up
(a cancelled task, `cancel`, the last reference) ends the request.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.feed import Feed
from actorserve.actors.generation.output import CompletionOutput
from actorserve.actors.generation.text import Detokenizer
from actorserve.actors.generation.wait import end_s_of
from actorserve.actors.generation.wake import leave
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, Cancelled, InternalError, WaitTimeout
from actorserve.wire.generation import Output

if TYPE_CHECKING:
    from actorserve.actors.generation.executor import GenerationExecutor
    from actorserve.actors.generation.request import GenerationRequest

LATE_S = 0.5
"""How long after its deadline a request waits for the engine to say so itself."""


class GenerationResult:
    """What becomes of a request.

    `for x in result` and `async for x in result` yield the result itself after each step; the
    diffs of its outputs are what that step brought. A step takes everything that has come.
    """

    __slots__ = (
        "__weakref__",
        "_error",
        "_executor",
        "_feed",
        "_is_finished",
        "_lock",
        "_request",
        "_texts",
        "context_logits",
        "outputs",
    )

    def __init__(
        self, request: GenerationRequest, feed: Feed, executor: GenerationExecutor
    ) -> None:
        self._feed = feed
        self._request = request
        self._executor = executor
        self._is_finished = False
        self._error: ActorserveError | None = None
        self._lock = threading.Lock()
        self._texts: dict[int, Detokenizer] = {}
        self.outputs = [CompletionOutput(i) for i in range(request.sampling_params.sequences)]
        self.context_logits: npt.NDArray[np.float32] | None = None

    # --- what it is ------------------------------------------------------------------------------

    @property
    def request_id(self) -> int:
        """The executor's number for the request, never used for another."""
        return self._feed.id

    @property
    def user_id(self) -> str | None:
        """The client's own name for the request."""
        return self._request.user_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self._request.prompt_token_ids

    @property
    def prompt(self) -> str | None:
        """The prompt as it was given, if it was a text."""
        return self._request.prompt

    @property
    def streaming(self) -> bool:
        """Whether outputs come before the end."""
        return self._request.streaming

    @property
    def beam_width(self) -> int:
        """How wide the beam search is."""
        return self._request.sampling_params.beam_width

    @property
    def finished(self) -> bool:
        """Whether `outputs` are complete: the last step was the last one."""
        return self._is_finished

    @property
    def error(self) -> ActorserveError | None:
        """The error that it ended with, as far as steps have come; None without one."""
        return self._error

    def done(self) -> bool:
        """Whether its end is here, so that `result` would not wait."""
        return self._feed.is_ended

    def running(self) -> bool:
        """Whether its end is yet to come."""
        return not self._feed.is_ended

    def cancelled(self) -> bool:
        """Whether it ended because it was cancelled."""
        return self._feed.is_ended and isinstance(self._feed.error, Cancelled)

    def cancel(self) -> bool:
        """End the request; its final output "cancelled" follows. False if it is over already."""
        return self._executor.give_up(self._feed)

    close = cancel

    # --- steps -----------------------------------------------------------------------------------

    def result_step(self, timeout: float | None = None) -> None:
        """Take what has come; wait, in this thread, if that is nothing.

        Raises WaitTimeout (a TimeoutError) after `timeout` seconds, and the request's own error.
        """
        end_s = end_s_of(timeout)
        while not self._feed.has_news():
            if not self._feed.wait_in_thread(self._limit_s(end_s), for_end=False):
                self._check_wait(end_s, timeout)
        self._step(raises=True)

    async def aresult_step(self, timeout: float | None = None) -> None:
        """Take what has come; wait, in this event loop, if that is nothing. As `result_step`."""
        if not self._feed.has_news():
            await _Wait(self, timeout, for_end=False)
        self._step(raises=True)

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait in this thread for the end and return this result, complete.

        Raises WaitTimeout (a TimeoutError) after `timeout` seconds in all, whereupon one may wait
        again, and the request's own error.
        """
        end_s = end_s_of(timeout)
        while not self._feed.is_ended:
            if not self._feed.wait_in_thread(self._limit_s(end_s), for_end=True):
                self._check_wait(end_s, timeout)
        self._step(raises=False)
        self._raise_error()
        return self

    async def aresult(self, timeout: float | None = None) -> GenerationResult:
        """Wait in this event loop for the end, as `result`. A cancelled wait ends the request."""
        if not self._feed.is_ended:
            await _Wait(self, timeout, for_end=True)
        self._step(raises=False)
        self._raise_error()
        return self

    def exception(self, timeout: float | None = None) -> ActorserveError | None:
        """Wait for the end and return its error, or None. Raises WaitTimeout only."""
        try:
            self.result(timeout)
        except ActorserveError as error:
            if not self._is_finished:
                raise
            return error
        return None

    async def aexception(self, timeout: float | None = None) -> ActorserveError | None:
        """As `exception`, in this event loop. A cancelled wait ends the request."""
        try:
            await self.aresult(timeout)
        except ActorserveError as error:
            if not self._is_finished:
                raise
            return error
        return None

    def poll(self) -> bool:
        """Take what has come without waiting; whether there was anything. Raises nothing."""
        has_news = bool(self._feed.inbox) or (self._feed.is_ended and not self._is_finished)
        self._step(raises=False)
        return has_news

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self.aresult().__await__()

    def __iter__(self) -> GenerationResult:
        return self

    def __next__(self) -> GenerationResult:
        if self._is_finished:
            self._raise_error()
            raise StopIteration
        self.result_step()
        return self

    def __aiter__(self) -> GenerationResult:
        return self

    async def __anext__(self) -> GenerationResult:
        if self._is_finished:
            self._raise_error()
            raise StopAsyncIteration
        feed = self._feed
        if not (feed.inbox or feed.is_ended):
            if feed.deadline_s:
                await _Wait(self, None, for_end=False)
            else:
                await self._next_news(feed)
        self._step(raises=True)
        return self

    async def _next_news(self, feed: Feed) -> None:
        """Wait without a limit, as streams do for each of their tokens: nothing but a future."""
        loop = asyncio.get_running_loop()
        waiters = feed.step_waiters
        while not (feed.inbox or feed.is_ended):
            future: asyncio.Future[None] = loop.create_future()
            waiters.append(future)
            if feed.inbox or feed.is_ended:
                leave(waiters, future)
                return
            try:
                await future
            except BaseException:  # the waiting task was cancelled, or its generator closed
                leave(waiters, future)
                self.cancel()
                raise

    def __del__(self) -> None:
        feed = getattr(self, "_feed", None)
        if feed is not None and not feed.is_ended and hasattr(self, "_executor"):
            self._executor.give_up(feed)

    def __hash__(self) -> int:
        return hash(self.request_id)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id},"
            f" prompt_token_ids={self.prompt_token_ids}, outputs={self.outputs},"
            f" finished={self.finished})"
        )

    # --- inside ----------------------------------------------------------------------------------

    def _step(self, *, raises: bool) -> None:
        """Apply everything that has come; raise the error, if that is all that there is."""
        with self._lock:
            has_ended = self._feed.is_ended  # before the look: what it ended with lies there then
            for completion in self.outputs:
                completion.begin_step()
            try:
                has_more = self._apply_inbox()
            except Exception as error:  # a tokenizer's mistake
                has_more = self._fail_here(error)
            if has_ended and not self._is_finished:
                self._error = self._feed.error
                has_more = self._finish_texts() or has_more
                self._is_finished = True
        if raises and not has_more:
            self._raise_error()

    def _apply_inbox(self) -> bool:
        inbox = self._feed.inbox
        has_more = False
        while inbox:
            output = inbox.popleft()
            if output.seq >= len(self.outputs):
                continue  # an engine may show more beams than were asked for
            completion = self.outputs[output.seq]
            completion.apply(output)
            if output.arrays is not None and "context_logits" in output.arrays:
                self.context_logits = output.arrays["context_logits"]
            if self._executor.tokenizer is not None:
                self._apply_text(completion, output)
            has_more = has_more or bool(output.tokens) or output.finish in ("stop", "length")
        return has_more

    def _fail_here(self, error: Exception) -> bool:
        """End the request, since what has come cannot be shown; False: there is nothing new."""
        if not self._is_finished:
            text = f"request {self.request_id}: its tokens are no text"
            self._error = InternalError(f"{text}: {type(error).__name__}: {error}")
            self._is_finished = True
            self._executor.end_early(self._feed, self._error)
        return False

    def _apply_text(self, completion: CompletionOutput, output: Output) -> None:
        seq = output.seq
        text = self._texts.get(seq)
        if text is None or output.replace:
            params = self._request.sampling_params
            stops = () if params.include_stop_str_in_output else params.stop_texts
            assert self._executor.tokenizer is not None
            text = self._texts[seq] = Detokenizer(self._executor.tokenizer, stops)
            if output.replace and completion.text:
                completion.set_text("")
        if output.tokens:
            completion.text += text.push(output.tokens)
        if output.finish is not None:
            self._finish_text(completion, text)

    def _finish_text(self, completion: CompletionOutput, text: Detokenizer) -> None:
        completion.text += text.finish()
        if text.found:
            completion.finish_reason, completion.stop_reason = "stop", text.found
        del self._texts[completion.index]

    def _finish_texts(self) -> bool:
        """Give out what was held back of sequences that got no end of their own."""
        before = [len(completion.text) for completion in self.outputs]
        for seq, text in list(self._texts.items()):
            self._finish_text(self.outputs[seq], text)
        if self._error is not None:
            finish = self._feed.finish or "error"
            for completion in self.outputs:
                completion.finish_reason = completion.finish_reason or finish
        return before != [len(completion.text) for completion in self.outputs]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _limit_s(self, end_s: float | None) -> float | None:
        """Return how long to sleep at most: till the caller's limit, or the request's own."""
        if end_s is None and not self._feed.deadline_s:
            return None
        now_s = monotonic_s()
        limit_s = None if end_s is None else end_s - now_s
        if self._feed.deadline_s:
            left_s = self._feed.deadline_s + LATE_S - now_s
            limit_s = left_s if limit_s is None else min(limit_s, left_s)
        return None if limit_s is None else max(0.0, limit_s)

    def _check_wait(self, end_s: float | None, timeout: float | None) -> None:
        """Nothing has come: see whether that is right. Raises WaitTimeout at the caller's limit."""
        now_s = monotonic_s()
        feed = self._feed
        if feed.deadline_s and now_s >= feed.deadline_s + LATE_S:
            text = "the request's time was over, and the engine did not say so"
            self._executor.end_early(feed, WaitTimeout(text))
        elif end_s is not None and now_s >= end_s:
            raise WaitTimeout(f"request {feed.id} was not finished in {timeout:g} s")


class _Wait:
    """An awaitable wait for a step or for the end; when its task is cancelled, so is the request.

    Running out of time cancels nothing.
    """

    __slots__ = ("_end_s", "_for_end", "_result", "_timeout")

    def __init__(self, result: GenerationResult, timeout: float | None, *, for_end: bool) -> None:
        self._result = result
        self._timeout = timeout
        self._end_s = end_s_of(timeout)
        self._for_end = for_end

    def __await__(self) -> Generator[Any, None, None]:
        result, feed = self._result, self._result._feed
        is_there = feed.has_ended if self._for_end else feed.has_news
        while not is_there():
            try:
                came = yield from feed.wait_in_loop(
                    result._limit_s(self._end_s), for_end=self._for_end
                )
            except BaseException:  # the waiting task was cancelled, or its generator closed
                result.cancel()
                raise
            if not came:
                result._check_wait(self._end_s, self._timeout)
