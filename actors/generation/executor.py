# SPDX-License-Identifier: Apache-2.0
"""The client's side of a generation executor: requests in, results out, whatever runs the engine.

What always holds: a request has its number and its feed before anything is sent, so that no
answer can come too early; submitting never blocks and never waits for a model to load.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any

from actorserve.actors.generation.calls import awaited, result_of
from actorserve.actors.generation.engine import Engine, EngineInfo
from actorserve.actors.generation.executor_reading import ExecutorReading
from actorserve.actors.generation.feed import Feed
from actorserve.actors.generation.gathering import as_batch, each_of, first_completed
from actorserve.actors.generation.request import GenerationRequest, LoRARequest
from actorserve.actors.generation.result import GenerationResult
from actorserve.actors.generation.sampling_params import SamplingParams
from actorserve.actors.generation.spec import EngineSpec, ExecutorConfig, spec_of
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
from actorserve.wire.generation import GenRequest, Submit

_FIELDS = {"timeout", "priority", "user_id", "extra", "prompt"}


class GenerationExecutor(ExecutorReading):
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
        except ActorserveError as error:
            registry.end(feed, error)
            raise
        except BaseException:  # an interrupt: nobody has the result, and it may be sent or not
            self.end_early(feed, Cancelled("submitting the request was interrupted"))
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

    def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **fields: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Wait for the results of one prompt, or of a list of prompts.

        Everything is checked before anything is sent. If one fails, the others are waited for,
        and the first error is raised; an interrupted wait ends them all.
        """
        prompts, is_single = as_batch(prompt_token_ids)
        params = each_of("sampling_params", sampling_params, len(prompts))
        loras = each_of("lora_requests", lora_request, len(prompts))
        requests = [self.request(*each, False, **fields) for each in zip(prompts, params, loras)]
        for request in requests:
            request.sampling_params.to_sampling(self.tokenizer)
        results: list[GenerationResult] = []
        try:
            results += map(self.submit_waiting, requests)
            errors = [result.exception() for result in results]
        except BaseException:
            for result in results:
                result.cancel()
            raise
        for error in errors:
            if error is not None:
                raise error
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

    # --- the engine ------------------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo | None:
        """What the engine says of itself; None while it loads."""
        return self._registry.info

    @property
    def error(self) -> ActorserveError | None:
        """Why nothing is served now; None if something is."""
        return self._registry.error

    def check_health(self) -> None:
        """Raise the error of a dead engine."""
        if self._registry.error is not None:
            raise self._registry.error.with_traceback(None)

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        """Wait in this thread until the engine has loaded; its error if that fails."""
        limit_s = self._load_limit_s() if timeout is None else timeout
        if not wait_here(self._registry.ready, limit_s):
            raise WaitTimeout(f"the engine has not loaded in {limit_s:g} s")
        return self._ready_info()

    async def aready(self, timeout: float | None = None) -> EngineInfo:
        """As `wait_ready`, in an event loop."""
        limit_s = self._load_limit_s() if timeout is None else timeout
        if not await wait_async(self._registry.ready, limit_s):
            raise WaitTimeout(f"the engine has not loaded in {limit_s:g} s")
        return self._ready_info()

    def _load_limit_s(self) -> float | None:
        """How long to wait for the engine; who judges the loading itself says more, and later."""
        return self.config.load_timeout_s or None

    def _ready_info(self) -> EngineInfo:
        self.check_health()
        info = self._registry.info
        assert info is not None  # ready, and not dead
        return info

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine on every rank and return rank 0's result.

        It takes effect on all ranks or on none. Raises RequestError with what the engine says.
        """
        return result_of(self._calls.start(method, list(args), timeout))

    async def acall(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """As `call`, in an event loop."""
        return await awaited(self._calls.start(method, list(args), timeout))

    def load_adapter(self, lora: LoRARequest, timeout: float | None = None) -> None:
        """Load an adapter before requests ask for it."""
        result_of(self._adapters.load(lora), timeout)

    async def aload_adapter(self, lora: LoRARequest) -> None:
        """As `load_adapter`, in an event loop."""
        await awaited(self._adapters.load(lora))

    def unload_adapter(self, number: int, timeout: float | None = None) -> None:
        """Unload an adapter; requests may load another under its number then."""
        result_of(self._adapters.unload(number), timeout)

    async def aunload_adapter(self, number: int) -> None:
        """As `unload_adapter`, in an event loop."""
        await awaited(self._adapters.unload(number))

    @property
    def adapters(self) -> list[LoRARequest]:
        """The adapters that are loaded."""
        return self._adapters.loaded

    # --- inside ----------------------------------------------------------------------------------

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
        feed = Feed(number, len(request.prompt_token_ids), now_s)
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
    if isinstance(engine, (str, EngineSpec)):
        spec_of(engine).check()
    if not isinstance(engine, (str, EngineSpec)) or config.worker == "thread":
        if model_world_size > 1:
            raise InvalidArgument("an engine in a thread has one rank; more are processes")
        from actorserve.actors.generation.worker import GenerationWorker

        return GenerationWorker(engine, config)
    from actorserve.actors.generation.proxy import GenerationProxy

    return GenerationProxy(spec_of(engine), config, model_world_size)
