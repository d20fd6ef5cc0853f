# SPDX-License-Identifier: Apache-2.0
"""The client's side of a generation executor: requests in, results out, whatever runs the engine.

What always holds: a request has its number and its feed before anything is sent, so that no
answer can come too early; submitting never blocks and never waits for a model to load.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, overload

from actorserve.actors.generation.engine import Engine
from actorserve.actors.generation.executor_engine import ExecutorEngine
from actorserve.actors.generation.feed import Feed
from actorserve.actors.generation.gathering import (
    as_batch,
    cancel_all,
    each_of,
    first_completed,
    raise_first,
)
from actorserve.actors.generation.main_script import check_not_importing
from actorserve.actors.generation.request import GenerationRequest, LoRARequest
from actorserve.actors.generation.result import GenerationResult
from actorserve.actors.generation.sampling_params import SamplingParams
from actorserve.actors.generation.spec import EngineSpec, ExecutorConfig, importable, spec_of
from actorserve.actors.generation.text import StopWatch
from actorserve.actors.generation.wait import end_s_of, left_s_of, wait_async, wait_here
from actorserve.clock import monotonic_s
from actorserve.errors import (
    ActorserveError,
    Cancelled,
    Full,
    InvalidArgument,
    Unavailable,
    WaitTimeout,
)
from actorserve.runtime.waiting import limit_of
from actorserve.wire.generation import Abort, GenRequest, Submit

Params = SamplingParams | Sequence[SamplingParams | None] | None
Loras = LoRARequest | Sequence[LoRARequest | None] | None
Prompts = list[str] | tuple[str, ...] | Sequence[Sequence[int]]

_FIELDS = {"timeout", "priority", "user_id", "extra", "prompt"}


class GenerationExecutor(ExecutorEngine):
    """Run requests on an engine. Every method may be called from any thread and any loop."""

    @staticmethod
    def create(
        engine: Engine | EngineSpec | str,
        executor_config: ExecutorConfig | None = None,
        model_world_size: int = 1,
        world_size: int = 0,
        *,
        wait: bool = True,
    ) -> GenerationExecutor:
        """Return an executor for an engine: its name, a spec, or an instance.

        An instance, and a spec under `worker="thread"`, runs in a thread of this process;
        everything else in `model_world_size` processes. With `wait` (the default) the engine has
        loaded when this returns. Raises what its load failed with.
        """
        executor = _made(engine, executor_config or ExecutorConfig(), model_world_size, world_size)
        if wait:
            try:
                executor.wait_ready()
            except BaseException:
                executor.shutdown()
                raise
        return executor

    @staticmethod
    async def acreate(
        engine: Engine | EngineSpec | str,
        executor_config: ExecutorConfig | None = None,
        model_world_size: int = 1,
        world_size: int = 0,
    ) -> GenerationExecutor:
        """As `create`, without blocking the loop while the engine loads."""
        executor = _made(engine, executor_config or ExecutorConfig(), model_world_size, world_size)
        try:
            await executor.aready()
        except BaseException:
            await executor.ashutdown()
            raise
        return executor

    def __enter__(self) -> GenerationExecutor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> GenerationExecutor:
        await self.aready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.ashutdown()

    # --- requests --------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Send a request and return its result, at once.

        Raises InvalidArgument for what no engine can do, Full when too many are in flight, the
        error of a dead engine, and Unavailable after a shutdown.
        """
        registry = self._registry
        if registry.error is not None:
            raise registry.error.with_traceback(None)
        if self._is_closing:
            raise Unavailable("the executor is shut down")
        if len(registry.feeds) >= registry.max_in_flight:
            raise Full(f"{registry.max_in_flight} requests are in flight, as many as may be")
        feed, wire = self._prepare(request)
        lora = request.lora_request
        try:
            registry.add(feed)
            result = GenerationResult(request, feed, self)
            if lora is None or self._adapters.route(lora, wire):
                self._send(Submit([wire]))
            if feed.error is not None:  # an engine died in between, and this may reach the next
                self._send(Abort([feed.id]))
        except BaseException as error:  # an interrupt, too: what was sent or not is ended
            why = (
                error
                if isinstance(error, ActorserveError)
                else Cancelled("submitting the request was interrupted")
            )
            self.end_early(feed, why)
            raise
        return result

    async def asubmit(
        self, request: GenerationRequest, timeout: float | None = None
    ) -> GenerationResult:
        """As `submit`; waits for room. Raises WaitTimeout if there is none in `timeout` seconds."""
        end_s = end_s_of(timeout)
        while True:
            try:
                return self.submit(request)
            except Full:
                if not await wait_async(self._registry.room, left_s_of(end_s)):
                    raise WaitTimeout(f"no room for a request in {timeout:g} s") from None

    def submit_waiting(
        self, request: GenerationRequest, timeout: float | None = None
    ) -> GenerationResult:
        """As `asubmit`, in a thread."""
        end_s = end_s_of(timeout)
        while True:
            try:
                return self.submit(request)
            except Full:
                if not wait_here(self._registry.room, left_s_of(end_s)):
                    raise WaitTimeout(f"no room for a request in {timeout:g} s") from None

    def generate_async(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
        **fields: Any,
    ) -> GenerationResult:
        """Submit one prompt: tokens, or a text where the engine has a tokenizer.

        `fields` are those of GenerationRequest: timeout, priority, user_id, extra.
        """
        return self.submit(
            self.request(prompt_token_ids, sampling_params, lora_request, streaming, **fields)
        )

    @overload
    def generate(
        self,
        prompt_token_ids: str | Sequence[int],
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt_token_ids: Prompts,
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> GenerationResult | list[GenerationResult]: ...

    def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Wait for the result of one prompt, or for the results of a list of prompts.

        Everything is checked before anything is sent. If one fails, the others are waited for,
        and the first error is raised; an interrupted wait ends them all.
        """
        requests, is_single = self._batch(prompt_token_ids, sampling_params, lora_request, fields)
        results: list[GenerationResult] = []
        try:
            results += map(self.submit_waiting, requests)
            errors = [result.exception() for result in results]
        except BaseException:
            cancel_all(results)
            raise
        raise_first(errors)
        return results[0] if is_single else results

    @overload
    async def agenerate(
        self,
        prompt_token_ids: str | Sequence[int],
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> GenerationResult: ...

    @overload
    async def agenerate(
        self,
        prompt_token_ids: Prompts,
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> list[GenerationResult]: ...

    @overload
    async def agenerate(
        self,
        prompt_token_ids: Any,
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> GenerationResult | list[GenerationResult]: ...

    async def agenerate(
        self,
        prompt_token_ids: Any,
        sampling_params: Params = None,
        lora_request: Loras = None,
        **fields: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """As `generate`, without blocking the loop; a cancelled wait ends all of its requests."""
        requests, is_single = self._batch(prompt_token_ids, sampling_params, lora_request, fields)
        results: list[GenerationResult] = []
        errors: list[ActorserveError | None] = []
        try:
            for request in requests:
                results.append(await self.asubmit(request))
            for result in results:
                errors.append(await result.aexception())
        except BaseException:
            cancel_all(results)
            raise
        raise_first(errors)
        return results[0] if is_single else results

    def request(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        streaming: bool = False,
        **fields: Any,
    ) -> GenerationRequest:
        """Return a request; a text becomes tokens. Raises InvalidArgument without a tokenizer."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidArgument(
                    "the prompt is a text, and this engine has no tokenizer: send token ids"
                )
            fields["prompt"] = prompt
            try:
                prompt = self.tokenizer.encode(prompt)
            except UnicodeEncodeError as error:
                raise InvalidArgument(f"the prompt cannot be written as UTF-8: {error}") from None
        unknown = sorted(fields.keys() - _FIELDS)
        if unknown:
            raise InvalidArgument(
                f"a request has no field {unknown[0]!r}: it has {', '.join(sorted(_FIELDS))}; what "
                "is about choosing tokens belongs into SamplingParams"
            )
        return GenerationRequest(prompt, sampling_params, lora_request, streaming, **fields)

    def abort(self, ids: Iterable[int]) -> None:
        """End requests by their numbers; unknown ones are ignored."""
        for number in ids:
            feed = self._registry.feeds.get(number)
            if feed is not None:
                self.give_up(feed)

    def wait_first_completed(
        self, futures: Iterable[GenerationResult], timeout: float | None = None
    ) -> Generator[GenerationResult, None, None]:
        """Yield each result once, as they are completed."""
        return first_completed(futures, timeout)

    # --- inside ----------------------------------------------------------------------------------

    def _batch(
        self, prompts: Any, params: Params, loras: Loras, fields: dict[str, Any]
    ) -> tuple[list[GenerationRequest], bool]:
        """Return one checked request a prompt, and whether it was a single one."""
        prompts, is_single = as_batch(prompts)
        each_params = each_of("sampling_params", params, len(prompts))
        each_lora = each_of("lora_requests", loras, len(prompts))
        requests = [
            self.request(*each, False, **fields) for each in zip(prompts, each_params, each_lora)
        ]
        for request in requests:
            request.sampling_params.to_sampling(self.tokenizer)
        return requests, is_single

    def _prepare(self, request: GenerationRequest) -> tuple[Feed, GenRequest]:
        """Return the two ends of a request: what waits here, and what goes to the engine."""
        params, lora, info = request.sampling_params, request.lora_request, self._registry.info
        sampling = params.to_sampling(self.tokenizer, self._end_id())
        if params.beam_width > self.config.max_beam_width:
            raise InvalidArgument(
                f"sampling: beam_width is {params.beam_width}, more than the executor's"
                f" max_beam_width ({self.config.max_beam_width})"
            )
        if lora is not None and info is not None and not info.adapters:
            raise InvalidArgument(f"engine {info.name!r} has no adapters")
        now_s = monotonic_s()
        number = self._ids.next()
        feed = Feed(number, len(request.prompt_token_ids), now_s, params.sequences)
        if (limit_s := limit_of(request.timeout)) is not None:
            feed.deadline_s = now_s + limit_s
        if params.stop_texts:
            assert self.tokenizer is not None
            feed.watch = StopWatch(
                self.tokenizer,
                params.stop_texts,
                sampling.n,
                awaits_logits=params.return_generation_logits,
            )
        request.set_id(number)
        return feed, GenRequest(
            number,
            request.prompt_token_ids,
            sampling,
            0 if lora is None else lora.lora_int_id,
            feed.deadline_s,
            request.priority,
            request.streaming or feed.watch is not None,
            request.extra,
        )

    def _end_id(self) -> int | None:
        if self.tokenizer is not None and self.tokenizer.end_id is not None:
            return self.tokenizer.end_id
        info = self._registry.info
        return None if info is None else info.end_id


def _made(
    engine: Engine | EngineSpec | str,
    config: ExecutorConfig,
    model_world_size: int,
    world_size: int,
) -> GenerationExecutor:
    if model_world_size < 1 or 0 < world_size < model_world_size:
        raise InvalidArgument(
            f"the model wants {model_world_size} ranks, and the world has {world_size}"
        )
    check_not_importing()
    if isinstance(engine, (str, EngineSpec)):
        spec_of(engine).check()
    if not isinstance(engine, (str, EngineSpec)) or config.worker == "thread":
        if model_world_size > 1:
            raise InvalidArgument("an engine in a thread has one rank; more are processes")
        from actorserve.actors.generation.worker import GenerationWorker

        return GenerationWorker(engine, config)
    from actorserve.actors.generation.proxy import GenerationProxy

    return GenerationProxy(importable(spec_of(engine)), config, model_world_size)
