# SPDX-License-Identifier: Apache-2.0
"""The model of every entry that names the backend "generation": its engine, behind `execute`.

    execute ─► read_question ─► executor.generate_async ─► a step ─► Answer ─► sender.send
                                        ▲                             then: drained(sender)
    the client gives up ─► cancel ──────┘

With one rank the engine runs in a thread of this process, with more in processes that are its
children. When it dies its requests fail with what it died of, and this process ends: whoever
supervises it starts it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from actorserve.actors.generation import (
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    GenerationResult,
    LoRARequest,
)
from actorserve.actors.generation.backend.answer import Answer
from actorserve.actors.generation.backend.metrics import GenerationMetrics
from actorserve.actors.generation.backend.question import Question, read_question
from actorserve.actors.generation.blas import limit_blas_threads
from actorserve.actors.generation.engines.registry import engine_class
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, Code, EngineDeadError, InternalError, InvalidArgument
from actorserve.triton import pb_utils
from actorserve.triton.config_json import model_config_from_json
from actorserve.triton.error import TritonErrorCode
from actorserve.triton.failure import format_exception
from actorserve.triton.flow import drained, on_cancel
from actorserve.triton.generation_parameters import (
    GenerationParameters,
    read_generation_parameters,
)
from actorserve.triton.last_words import say_last_words

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

LAST_WORDS_S = 1.0
"""How long a process whose engine is dead waits for its requests to be told."""
EXIT_CODE = 1
STEPS_IN_A_ROW = 8
"""How many steps one stream may take before the others of the loop have their turn."""

_CODES = {
    Code.DEADLINE_EXCEEDED: pb_utils.TritonError.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: pb_utils.TritonError.UNAVAILABLE,
    Code.PERMISSION_DENIED: pb_utils.TritonError.INVALID_ARG,
    Code.TOO_LARGE: pb_utils.TritonError.INVALID_ARG,
}
"""The nearest that the model API has for codes that it lacks."""


class TritonPythonModel:
    """See the module's head."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Raises what keeps it from loading."""
        folder = Path(args["model_repository"])
        version = folder / args["model_version"]
        config = model_config_from_json(args["model_config"], "the model's configuration")
        parameters = read_generation_parameters(config, str(folder), str(version))
        for place in (str(version), str(folder)):  # where the module of an engine may lie
            if place not in sys.path:
                sys.path.append(place)
        self._default_max_tokens = parameters.default_max_tokens
        self._adapters = {
            name: LoRARequest(name, number, path)
            for number, (name, path) in enumerate(parameters.adapters.items(), 1)
        }
        self._open = 0
        self._is_quiet = threading.Event()
        self._is_quiet.set()
        self._is_finalizing = False
        limit_blas_threads()
        _import_engine(parameters.engine)
        try:
            self._executor = _executor(parameters)
        except EngineDeadError as error:
            if error.is_accident:  # as that of a stub while it initializes: it is started again
                say_last_words(error.message)
                os._exit(1)
            raise
        self._metrics = GenerationMetrics(
            args["model_name"], args["model_version"], args["model_instance_name"]
        )
        self._watcher = threading.Thread(target=self._watch, name="generation watch", daemon=True)
        self._watcher.start()

    async def execute(self, requests: list[Any]) -> None:
        """Serve requests to their ends."""
        self._open += len(requests)
        self._is_quiet.clear()
        try:
            if len(requests) == 1:
                await self._serve(requests[0])
            else:
                await asyncio.gather(*map(self._serve, requests))
        finally:
            self._open -= len(requests)
            if not self._open:
                self._is_quiet.set()

    def finalize(self) -> None:
        """End the engine."""
        self._is_finalizing = True
        self._executor.shutdown()
        self._watcher.join(LAST_WORDS_S)

    # --- one request -----------------------------------------------------------------------------

    async def _serve(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            question = read_question(request, self._default_max_tokens)
            since_s = monotonic_s()
            result = self._generate(question)
            answer = self._answer(question, request, result)
            self._metrics.prompt_tokens.increment(len(result.prompt_token_ids))
            with on_cancel(request, result.cancel):
                if question.streams:
                    await self._stream(result, answer, sender, since_s)
                else:
                    await self._tell_whole(result, answer, sender)
        except ActorserveError as error:
            _send_error(sender, error)

    def _generate(self, question: Question) -> GenerationResult:
        """Submit what is asked for. Raises ActorserveError."""
        adapter = None
        if question.adapter:
            adapter = self._adapters.get(question.adapter)
            if adapter is None:
                known = ", ".join(self._adapters) or "none"
                raise InvalidArgument(
                    f"there is no adapter '{question.adapter}': this model has {known}"
                )
        return self._executor.generate_async(
            self._prompt(question), question.params, adapter, question.streams
        )

    def _prompt(self, question: Question) -> str | list[int]:
        if question.messages is None:
            prompt = question.tokens if question.text is None else question.text
            assert prompt is not None
            return prompt
        tokenizer = self._executor.tokenizer
        if tokenizer is None:
            raise InvalidArgument(
                "this model's engine has no tokenizer: it takes token ids, and no messages"
            )
        return tokenizer.chat(question.messages)

    def _answer(self, question: Question, request: Any, result: GenerationResult) -> Answer:
        tokenizer, text = self._executor.tokenizer, ""
        if question.with_input:
            text = question.text or ""
            if question.text is None and tokenizer is not None:
                text = tokenizer.decode_bytes(result.prompt_token_ids).decode("utf-8", "replace")
        return Answer(
            question, request.requested_output_names(), result.prompt_token_ids, text, tokenizer
        )

    async def _tell_whole(self, result: GenerationResult, answer: Answer, sender: Any) -> None:
        """Send each sequence when all of them are there."""
        await result.aresult()
        self._metrics.count_tokens(sum(each.length for each in result.outputs), is_last=True)
        logits = result.context_logits
        responses = [answer.whole(each, logits) for each in result.outputs]
        _send(sender, responses, is_last=True)

    async def _stream(
        self, result: GenerationResult, answer: Answer, sender: Any, since_s: float
    ) -> None:
        """Send what each step adds; while the client does not read, steps grow longer."""
        first_s, count, steps = 0.0, 0, 0
        async for step in result:
            new = sum([len(each.token_ids_diff) for each in step.outputs])
            if new and not count:
                first_s = monotonic_s()
                self._metrics.first_token.observe(first_s - since_s)
            count += new
            self._metrics.count_tokens(new, is_last=step.finished)
            logits = step.context_logits
            made = [answer.delta(each, logits) for each in step.outputs]
            responses = [each for each in made if each is not None]
            is_last = step.finished and step.error is None
            _send(sender, responses, is_last=is_last)
            if is_last:
                break
            await drained(sender)
            steps += 1
            if steps % STEPS_IN_A_ROW == 0:
                await asyncio.sleep(0)  # an engine may be so quick that nothing else here waits
        further = count / len(result.outputs) - 1
        if further > 0:
            self._metrics.further_token.observe((monotonic_s() - first_s) / further)

    # --- around ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Hand on what the engine says of each iteration, until it ends. A thread of its own."""
        try:
            while True:
                self._metrics.note(json.loads(self._executor.get_stats()))
        except ActorserveError as error:
            if not self._is_finalizing:
                self._die(error)

    def _die(self, error: ActorserveError) -> None:
        """End this process, whose engine is dead, when those who wait have been told."""
        say_last_words(error.message)
        self._is_quiet.wait(LAST_WORDS_S)
        os._exit(EXIT_CODE)


def _executor(parameters: GenerationParameters) -> GenerationExecutor:
    """Start the engine. Raises what keeps it from loading."""
    return GenerationExecutor.create(
        EngineSpec(parameters.engine, parameters.options),
        ExecutorConfig(
            max_beam_width=parameters.max_beam_width,
            # The server holds back what is too much; its abort may be on the way yet.
            max_in_flight=2 * parameters.max_in_flight,
            worker="thread" if parameters.ranks == 1 else "process",
            load_timeout_s=parameters.load_timeout_s,
            hang_timeout_s=parameters.hang_timeout_s,
            stats_kept=1,
        ),
        model_world_size=parameters.ranks,
    )


def _import_engine(name: str) -> None:
    """Import an engine's module. What it raises becomes the load's reason, and nothing more.

    An error of the model API's own is not printed once more with its traceback by the stub.
    """
    try:
        engine_class(name)
    except ActorserveError:
        raise
    except Exception as error:
        raise InternalError(format_exception(error)) from error


def _send(sender: Any, responses: list[Any], *, is_last: bool) -> None:
    """Send responses, the last one with the end of the request where that `is_last`."""
    for place, response in enumerate(responses, 1):
        is_end = is_last and place == len(responses)
        sender.send(response, FINAL if is_end else 0)
    if is_last and not responses:
        sender.send(flags=FINAL)


def _send_error(sender: Any, error: ActorserveError) -> None:
    code = _CODES.get(error.code) or TritonErrorCode(error.code)
    told = pb_utils.TritonError(error.message, code)
    sender.send(pb_utils.InferenceResponse(error=told), FINAL)
