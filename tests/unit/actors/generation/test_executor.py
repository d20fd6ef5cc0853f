# SPDX-License-Identifier: Apache-2.0
"""The client's side over transports of the test's own, and the worker's thread."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    GenerationResult,
    LoRARequest,
    Output,
    SamplingParams,
)
from actorserve.actors.generation.engines.scripted import Scripted
from actorserve.actors.generation.engines.scripted_text import ByteTokenizer
from actorserve.errors import ActorserveError, Cancelled, InvalidArgument, WaitTimeout
from actorserve.wire.generation import Call, Submit
from tests.conftest import wait_until
from tests.generation.immediate import Immediate, nothing

THREAD = ExecutorConfig(worker="thread")
LONG = SamplingParams(max_tokens=1_000_000)
PATIENCE_S = 30.0


def test_a_request_is_registered_before_it_is_sent():
    """`_send` finds it in the table."""
    seen = []

    class Looking(Immediate):
        def _send(self, message: Any) -> None:
            if isinstance(message, Submit):
                seen.append([each.id in self._registry.feeds for each in message.requests])
            super()._send(message)

    Looking().generate([1])
    assert seen == [[True]]


def test_a_death_between_the_check_and_the_entry_leaves_nothing():
    """Submitting looks again after registering."""
    executor = Immediate(nothing)
    prepare = executor._prepare

    def dying(request: Any) -> Any:
        prepared = prepare(request)
        executor.fail_all(EngineDeadError("just now"))
        return prepared

    executor._prepare = dying  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="just now"):
        executor.generate_async([1])
    assert executor.stats().in_flight == 0
    assert executor.requests == []


def test_all_that_is_pending_fails_once_and_the_first_error_stays():
    """Results, calls, whoever waits for room or readiness; and a revival serves again."""
    executor = Immediate(nothing)
    results = [executor.generate_async([1], LONG) for _ in range(3)]
    answer = executor._calls.start("echo", [], None)
    executor.fail_all(EngineDeadError("first", rank=2, pid=77, traceback="Traceback: here"))
    executor.fail_all(EngineDeadError("second"))
    for result in results:
        with pytest.raises(EngineDeadError, match=r"rank 2 \(process 77\) is dead: first"):
            result.result(0)
    with pytest.raises(EngineDeadError, match="Traceback: here"):
        answer.result(0)
    executor.deliver([Output(results[0].request_id, 0, [1])])
    assert executor.stats().late_outputs == 1
    with pytest.raises(EngineDeadError, match="first"):
        executor.get_stats(0)
    executor.revive()
    assert executor.generate_async([1]).running()


def test_an_error_keeps_its_traceback_short():
    """However often it is raised."""
    executor = Immediate(nothing)
    result = executor.generate_async([1])
    executor.fail_all(EngineDeadError("gone"))
    depths = []
    for _ in range(5):
        with pytest.raises(EngineDeadError) as caught:
            result.result(0)
        depths.append(len(caught.traceback))
    assert len(set(depths)) == 1


def test_one_wake_for_a_loop_and_batch(monkeypatch: pytest.MonkeyPatch):
    """256 tasks of one loop are woken by one call, from another thread."""
    executor = Immediate(nothing)

    async def main() -> int:
        loop = asyncio.get_running_loop()
        results = [executor.generate_async([1], streaming=True) for _ in range(256)]
        tasks = [asyncio.ensure_future(result.aresult_step()) for result in results]
        await asyncio.sleep(0)
        calls = []
        plain = loop.call_soon_threadsafe

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            return plain(*args, **kwargs)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        outputs = [Output(result.request_id, 0, [1], "length", True) for result in results]
        thread = threading.Thread(target=executor.deliver, args=(outputs,))
        thread.start()
        await asyncio.gather(*tasks)
        thread.join()
        return len(calls)

    assert asyncio.run(main()) == 1


def test_a_step_takes_everything_and_nothing_changes_between_steps():
    """Outputs that came are not seen before the next step."""
    executor = Immediate(nothing)
    result = executor.generate_async([1], streaming=True)
    executor.deliver([Output(result.request_id, 0, [5]), Output(result.request_id, 0, [6])])
    assert result.outputs[0].token_ids == []
    result.result_step()
    assert result.outputs[0].token_ids_diff == [5, 6]
    executor.deliver([Output(result.request_id, 0, [7], "length", True)])
    assert result.done() and not result.finished
    assert result.outputs[0].token_ids_diff == [5, 6]
    assert [each.outputs[0].token_ids_diff for each in result] == [[7]]
    assert result.finished


def test_beams_may_rewrite_what_was_seen():
    """A replaced beam's new tokens are all of them, or those behind what stayed."""
    executor = Immediate(nothing, ByteTokenizer(), max_beam_width=2)
    params = SamplingParams(beam_width=2)
    result = executor.generate_async([1], params, streaming=True)
    number = result.request_id
    executor.deliver([Output(number, 0, list(b"ab"), replace=True)])
    result.result_step()
    executor.deliver([Output(number, 0, list(b"abc"), replace=True)])
    result.result_step()
    assert result.outputs[0].token_ids_diff == list(b"c")
    executor.deliver([Output(number, 0, list(b"xyz"), replace=True)])
    result.result_step()
    assert (result.outputs[0].token_ids_diff, result.outputs[0].text) == (list(b"xyz"), "xyz")
    assert result.outputs[0].text_diff == "xyz"


def test_logits_come_with_their_tokens():
    """Those of the prompt once, those of tokens joined."""
    with GenerationExecutor.create(EngineSpec("scripted", {"vocab_size": 9}), THREAD) as executor:
        params = SamplingParams(
            max_tokens=5, return_context_logits=True, return_generation_logits=True
        )
        for streaming in (False, True):
            result = executor.generate_async([1, 2], params, streaming=streaming).result(5)
            assert result.context_logits is not None
            assert result.context_logits.shape == (2, 9)
            logits = result.outputs[0].generation_logits
            assert logits is not None
            assert np.argmax(logits, 1).tolist() == result.outputs[0].token_ids


def test_wide_beams_need_leave():
    """The config says how wide they may be."""
    with pytest.raises(InvalidArgument, match="max_beam_width"):
        Immediate().generate([1], SamplingParams(beam_width=2))


def test_an_engine_that_says_nothing_is_not_waited_for_beyond_a_deadline():
    """The client's own clock ends it, and the engine is told."""
    executor = Immediate(nothing)
    result = executor.generate_async([1], timeout=0.01)
    with pytest.raises(WaitTimeout, match="did not say so"):
        result.result()
    assert executor.aborted == [result.request_id]

    async def main() -> None:
        with pytest.raises(WaitTimeout):
            await executor.generate_async([1], timeout=0.01)

    asyncio.run(main())


def test_calls_have_answers_errors_and_limits():
    """From a thread and from a loop; one that is given up is forgotten."""
    with GenerationExecutor.create(EngineSpec("scripted"), THREAD) as executor:
        assert executor.call("echo", 1, "x", [2]) == [1, "x", [2]]
        assert asyncio.run(executor.acall("echo")) == []
        with pytest.raises(InvalidArgument, match="InternalError: oh no"):
            executor.call("fail", "oh no")
        with pytest.raises(InvalidArgument, match="refuses"):
            executor.call("refuse", 1)
    silent = Immediate(nothing)
    with pytest.raises(TimeoutError, match="no answer"):
        silent.call("echo", timeout=0.01)
    with pytest.raises(TimeoutError, match="no answer"):
        asyncio.run(silent.acall("echo", timeout=0.01))
    assert silent.stats().calls == 0
    assert [each.method for each in silent.sent if isinstance(each, Call)] == ["echo"] * 2


def test_metrics_hear_of_every_end():
    """How many tokens, how long, and how it ended."""
    heard = []
    with GenerationExecutor.create(EngineSpec("scripted"), THREAD) as executor:
        executor.on_finished(heard.append)
        executor.generate([1, 2], SamplingParams(max_tokens=3))
        executor.generate_async([1], extra={"error": "x"}).exception(5)
        wait_until(lambda: len(heard) == 2)
    assert [(each.finish, each.prompt_tokens, each.tokens) for each in heard] == [
        ("length", 2, 3),
        ("error", 1, 0),
    ]
    assert 0 < heard[0].first_s <= heard[0].total_s


def test_an_executor_is_collected_when_nobody_has_it():
    """Its thread does not keep it, and ends."""
    executor = GenerationExecutor.create(EngineSpec("scripted"), THREAD)
    executor.generate([1])
    weak = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert weak() is None
    finally:
        gc.enable()


def test_a_result_keeps_its_executor():
    """Whoever has a result gets its answer."""
    result = GenerationExecutor.create(EngineSpec("scripted"), THREAD).generate_async([1])
    gc.collect()
    assert len(result.result(PATIENCE_S).outputs[0].token_ids) == 32


def test_a_hung_iteration_is_the_engines_death():
    """Nobody waits longer than the config says; the thread is left behind."""
    engine = Scripted(hang_at=2)
    config = ExecutorConfig(worker="thread", hang_timeout_s=0.2)
    executor = GenerationExecutor.create(engine, config)
    with pytest.raises(EngineDeadError, match=r"over 0\.2 s"):
        executor.generate([1], LONG)
    executor.shutdown(timeout=0.1)
    engine.released.set()  # and so the test's leak check is content


def test_an_instance_can_be_given():
    """It runs in a thread, whatever the config says of specs."""
    engine = Scripted(text=True)
    with GenerationExecutor.create(engine) as executor:
        result = executor.generate("abc", SamplingParams(max_tokens=3))
        assert isinstance(result, GenerationResult)
        assert result.outputs[0].text == "def"
        assert result.prompt == "abc"
    assert engine.is_closed
    with pytest.raises(InvalidArgument, match="one rank"):
        GenerationExecutor.create(Scripted(), model_world_size=2)
    with pytest.raises(InvalidArgument, match="2 ranks"):
        GenerationExecutor.create("scripted", model_world_size=2, world_size=1)


def test_thread_driven_engines_serve():
    """With a descriptor and without."""
    for with_fileno in (False, True):
        spec = EngineSpec("scripted", {"mode": "thread", "with_fileno": with_fileno})
        with GenerationExecutor.create(spec, THREAD) as executor:
            results = [
                executor.generate_async([n], SamplingParams(max_tokens=20)) for n in range(9)
            ]
            for n, result in enumerate(results):
                assert result.result(PATIENCE_S).outputs[0].token_ids == list(range(n + 1, n + 21))
            endless = executor.generate_async([1], LONG)
            endless.cancel()
            assert isinstance(endless.exception(PATIENCE_S), Cancelled)


class Stumbling(ByteTokenizer):
    """A tokenizer that does not know every token."""

    def decode_bytes(self, tokens: Any) -> bytes:
        """Raise for the token 7."""
        if 7 in tokens:
            raise KeyError(7)
        return super().decode_bytes(tokens)


@pytest.mark.parametrize("stop", [None, "xyz"])
def test_a_tokenizers_mistake_ends_one_request(stop: str | None):
    """Whoever reads it hears of it, ever after; the engine is told, and deliveries go on."""
    executor = Immediate(nothing, Stumbling())
    params = SamplingParams(stop=stop, max_tokens=10)
    bad, good = (executor.generate_async("a", params, streaming=True) for _ in range(2))
    executor.deliver([Output(bad.request_id, 0, [7]), Output(good.request_id, 0, [98])])
    good.result_step(0)
    assert good.outputs[0].text == "b"
    for _ in range(2):
        with pytest.raises(ActorserveError, match=r"no text: KeyError: 7"):
            bad.result_step(0)
    assert executor.aborted == [bad.request_id]
    with pytest.raises(ActorserveError, match="no text"):
        next(bad)


def test_an_idle_worker_sleeps():
    """Nothing wakes it while nobody wants anything."""
    with GenerationExecutor.create(EngineSpec("scripted"), THREAD) as executor:
        executor.generate([1])
        before = _cpu_s()
        threading.Event().wait(0.3)
        assert _cpu_s() - before < 0.1


def test_a_forked_child_is_told_that_it_has_no_engine():
    """It does not wait for answers that go to its parent."""
    with GenerationExecutor.create(EngineSpec("scripted"), THREAD) as executor:
        result = executor.generate_async([1], LONG)
        pid = os.fork()
        if pid == 0:
            try:
                result.result(0.1)
            except EngineDeadError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert result.running()
        result.cancel()


def test_everything_has_a_form_for_loops(tmp_path: Path):
    """Ready, submit, adapters, statistics, and the end, without blocking."""
    spec = EngineSpec("scripted", {"adapters": True})
    lora = LoRARequest("a", 3, str(tmp_path))

    async def main() -> None:
        async with await GenerationExecutor.acreate(spec, THREAD) as executor:
            result = await executor.asubmit(executor.request([1]))
            assert (await result).finished
            await executor.aload_adapter(lora)
            await executor.aload_adapter(lora)
            assert executor.adapters == [lora]
            await executor.aunload_adapter(3)
            assert "iter" in await executor.aget_stats()
            with pytest.raises(TimeoutError):
                while True:
                    await executor.aget_stats(timeout=0.01)
            executor.check_health()
        with pytest.raises(EngineDeadError, match="no weights"):
            broken = EngineSpec("scripted", {"load_error": "no weights"})
            await GenerationExecutor.acreate(broken, THREAD)

    asyncio.run(main())


def test_a_slow_load_can_be_waited_for_with_a_limit():
    """And the executor be used, or ended, meanwhile."""
    spec = EngineSpec("scripted", {"load_s": 0.3})
    executor = GenerationExecutor.create(spec, THREAD, wait=False)
    assert executor.info is None
    with pytest.raises(TimeoutError, match="not loaded"):
        executor.wait_ready(0.01)
    result = executor.generate_async([1])
    assert executor.wait_ready(PATIENCE_S).name == "scripted"
    assert result.result(PATIENCE_S).finished
    executor.shutdown()
    late = GenerationExecutor.create(spec, THREAD, wait=False)
    late.shutdown(timeout=0.01)  # while it loads: its thread ends when it can


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_streams_in_loops_of_either_kind(kind: str):
    """Many at once, one of them with a limit of its own, and one that is cancelled."""
    if kind == "uvloop":
        loop = pytest.importorskip("uvloop").new_event_loop()
    else:
        loop = asyncio.new_event_loop()

    async def stream(executor: GenerationExecutor, number: int, **fields: Any) -> list[int]:
        tokens = []
        params = SamplingParams(max_tokens=50)
        async for step in executor.generate_async([number], params, streaming=True, **fields):
            tokens += step.outputs[0].token_ids_diff
        return tokens

    async def main() -> None:
        async with await GenerationExecutor.acreate(EngineSpec("scripted"), THREAD) as executor:
            streams = [stream(executor, n) for n in range(40)]
            found = await asyncio.gather(*streams, stream(executor, 40, timeout=PATIENCE_S))
            assert found == [list(range(n + 1, n + 51)) for n in range(41)]
            endless = executor.generate_async([1], LONG)
            task = asyncio.ensure_future(endless.aresult())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(Cancelled):
                await endless

    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


ODD: list[dict[str, Any]] = [
    *({"seed": value, "temperature": 1.0} for value in ("x", 1.5, [1], 1 << 70, True, np.int64(3))),
    *({"random_seed": value, "temperature": 1.0} for value in (float("nan"), {})),
    *({"end_id": value} for value in ("x", 2.5, True, 1 << 40, -2, np.ones(2))),
    *({name: None} for name in ("max_tokens", "n", "beam_width")),
    *({"max_tokens": value} for value in (True, 1 << 2000, np.ones(2))),
    *({"return_context_logits": value} for value in (None, 1, np.ones(2))),
    *({"include_stop_str_in_output": value} for value in ("yes", np.ones(2))),
    *({name: 5} for name in ("stop", "bad", "stop_token_ids", "bad_token_ids", "logit_bias")),
    *({"stop_token_ids": value} for value in ([1.5], [True], [1 << 31], [[]], np.ones(2))),
    *({"logit_bias": value} for value in ({1.5: 1.0}, {-1: 1.0}, {1: "b"}, {1 << 40: 1.0}, [3])),
    *({"embedding_bias": value} for value in (5, "x", [[1]], np.ones((2, 2)))),
]


@pytest.mark.parametrize("engine", ["tinygpt", "scripted"])
def test_no_value_of_a_sampling_parameter_kills_the_engine(engine: str):
    """What is of no use is refused when it is submitted, whatever its type."""
    with GenerationExecutor.create(engine, THREAD) as executor:
        for odd in ODD:
            with pytest.raises(InvalidArgument):
                executor.generate_async([1], SamplingParams(**{"max_tokens": 1, **odd}))
        assert executor.error is None
        assert executor.stats().in_flight == 0


def test_biases_and_words_may_be_arrays():
    """As the vectors of other programs are; an array has no truth of its own."""
    params = SamplingParams(embedding_bias=np.array([0, 2.5]), stop_token_ids=np.array([7, 8]))
    sampling = params.to_sampling()
    assert sampling.logit_bias == {1: 2.5}
    assert sampling.stop_words == [[7], [8]]


@pytest.mark.parametrize("extra", [{1: 2}, "text", [1]])
def test_extra_is_a_dict_with_names(extra: Any):
    """Ranks could not read anything else."""
    with pytest.raises(InvalidArgument, match="extra"):
        Immediate().generate_async([1], extra=extra)


def test_a_prompt_that_is_no_unicode_is_refused():
    """A lone surrogate has no bytes, and so no tokens."""
    odd = SamplingParams(bad="\ud800")
    with GenerationExecutor.create(EngineSpec("scripted", {"text": True}), THREAD) as executor:
        for prompt, params in (("\ud800", None), ("a", odd)):
            with pytest.raises(InvalidArgument, match="UTF-8"):
                executor.generate_async(prompt, params)


@pytest.mark.parametrize("timeout", [1e8, 1e12, float("inf")])
def test_a_deadline_that_is_far_kills_nobody(timeout: float):
    """While the engine works by itself, the pump sleeps until the next deadline at most."""
    engine = EngineSpec("scripted", {"mode": "thread", "with_fileno": True})
    with GenerationExecutor.create(engine, THREAD) as executor:
        result = executor.generate_async([1], SamplingParams(max_tokens=300), timeout=timeout)
        assert result.result(PATIENCE_S).outputs[0].length == 300


def test_a_forked_child_waits_for_no_news():
    """Neither for a load nor for statistics: there will be none."""
    loads = threading.Event()

    class Loading(Scripted):
        def start(self, rank: int, world: Any) -> Any:
            loads.wait(PATIENCE_S)
            return super().start(rank, world)

    executor = GenerationExecutor.create(Loading(), THREAD, wait=False)
    pid = os.fork()
    if pid == 0:
        told = 0
        for wait in (executor.wait_ready, executor.get_stats):
            try:
                wait(timeout=PATIENCE_S)
            except EngineDeadError:
                told += 1
        os._exit(told)
    _, status = os.waitpid(pid, 0)
    loads.set()
    executor.shutdown()
    assert os.waitstatus_to_exitcode(status) == 2
