# SPDX-License-Identifier: Apache-2.0
"""What every executor must do, C1 to C11, in a thread and in processes; ranks have their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    GenerationExecutor,
    GenerationResult,
    LoRARequest,
    RequestError,
    SamplingParams,
)
from actorserve.errors import Cancelled, InvalidArgument, Unavailable
from tests.conftest import wait_until
from tests.generation.asking import LONG, PATIENCE_S, is_idle, short, tokens_of
from tests.generation.conftest import Make
from tests.generation.immediate import Immediate

# --- C1 to C3: answers ---


def test_c1_deltas_make_the_whole(speaking: GenerationExecutor):
    """What the steps of a stream add up to is the answer without a stream: tokens and text."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    whole = speaking.generate("äöü", params)
    assert isinstance(whole, GenerationResult)
    tokens: list[int] = []
    text = ""
    for step in speaking.generate_async("äöü", params, streaming=True):
        output = step.outputs[0]
        assert output.text_diff == output.text_diff  # a pure look
        tokens += output.token_ids_diff
        text += output.text_diff
        assert (output.token_ids, output.text) == (tokens, text)
    assert tokens == tokens_of(whole)
    assert text == whole.outputs[0].text != ""


def test_c1_a_character_is_never_cut(speaking: GenerationExecutor):
    """Text comes when its characters are whole, and adds up to the text."""
    script = "a\N{GRINNING FACE}ß中b"
    tokens = list(script.encode())
    seen = []
    request = speaking.request("x", short(len(tokens)), streaming=True, extra={"tokens": tokens})
    for step in speaking.submit(request):
        seen.append(step.outputs[0].text_diff)
    assert "".join(seen) == script
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(seen)


@pytest.mark.parametrize("streaming", [False, True])
def test_c2_an_early_answer_is_there_when_submit_returns(streaming: bool):
    """It is delivered once and at once, sync and async."""
    executor = Immediate()

    async def main() -> list[int]:
        result = executor.generate_async([1], short(), streaming=streaming)
        async for _ in result:
            pass
        return tokens_of(result)

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_c3_threads_and_a_loop_get_their_own_answers(plain: GenerationExecutor):
    """Two threads and a loop submit 10 000 mixed requests; none gets another's answer."""
    count = 3333

    def expected(start: int, length: int) -> list[int]:
        return [(start + step) % 1000 for step in range(1, length + 1)]

    def in_thread(offset: int) -> None:
        pending = []
        for n in range(count):
            start, length = (offset + n) % 1000, n % 3 + 1
            request = plain.request([start], short(length), streaming=n % 2 == 0)
            pending.append((plain.submit_waiting(request, PATIENCE_S), start, length))
        for result, start, length in pending:
            assert tokens_of(result.result(PATIENCE_S)) == expected(start, length)

    async def one(n: int) -> None:
        start, length = n % 1000, n % 3 + 1
        result = await plain.asubmit(plain.request([start], short(length), streaming=n % 2 == 0))
        if n % 2:
            await result
        else:
            async for _ in result:
                pass
        assert tokens_of(result) == expected(start, length)

    async def in_loop() -> None:
        for begin in range(0, count, 500):
            await asyncio.gather(*[one(n) for n in range(begin, min(begin + 500, count))])

    with ThreadPoolExecutor(3) as pool:
        works = [pool.submit(in_thread, 100), pool.submit(in_thread, 500)]
        works.append(pool.submit(lambda: asyncio.run(in_loop())))
        for each in works:
            each.result(50)
    assert is_idle(plain)


# --- C4: errors ---


def test_c4_an_error_ends_one_request_for_good(plain: GenerationExecutor):
    """In a loop as in a thread: the partial outputs stay, the error is always the same."""

    async def main() -> None:
        other = plain.generate_async([1], short(30), streaming=True)
        result = plain.generate_async(
            [1], short(30), streaming=True, extra={"error": "half way", "error_at": 15}
        )
        with pytest.raises(RequestError, match="half way"):
            async for _ in result:
                pass
        assert len(tokens_of(result)) == 15
        with pytest.raises(RequestError, match="half way"):
            await result
        with pytest.raises(RequestError, match="half way"):
            await result.aresult_step()
        assert len(tokens_of(await other)) == 30

    asyncio.run(main())


def test_c4_a_dead_engine_stays_dead(make: Make):
    """An exception in `add` is the engine's end, also for those who were waiting."""
    executor = make({"add_error": "out of order"})
    results = []
    with contextlib.suppress(EngineDeadError):
        for _ in range(10):
            results.append(executor.generate_async([1], short()))
    for result in results * 2:
        with pytest.raises(EngineDeadError, match="out of order"):
            result.result(PATIENCE_S)
    wait_until(lambda: executor.error is not None)
    with pytest.raises(EngineDeadError, match="out of order"):
        executor.call("echo")


# --- C5 to C7: cancelling ---


def test_c5_cancel_before_while_and_after(make: Make):
    """A waiting request, a running one and a finished one; the slot is free for the next."""
    executor = make({"slots": 1, "delay_s": 0.005})
    running = executor.generate_async([1], LONG, streaming=True)
    running.result_step(PATIENCE_S)
    waiting = executor.generate_async([1], LONG)
    after = executor.generate_async([1], short())
    assert waiting.cancel() and running.cancel() and running.cancel()
    for result in (waiting, running):
        with pytest.raises(Cancelled):
            result.result(PATIENCE_S)
    assert len(tokens_of(after.result(PATIENCE_S))) == 4
    assert not after.cancel() and not after.cancelled()
    assert len(tokens_of(after.result(0))) == 4
    assert executor.stats().late_outputs == 0


def test_c5_the_slot_is_free_within_an_iteration(make: Make):
    """The engine is told before its next iteration."""
    executor = make({"slots": 1, "delay_s": 0.02})
    running = executor.generate_async([1], LONG, streaming=True)
    running.result_step(PATIENCE_S)
    before = executor.call("iterations")
    running.cancel()
    running.exception(PATIENCE_S)
    assert executor.call("iterations") - before <= 3  # the one that runs, the next, and slack


def test_c5_there_is_one_final_however_the_engine_behaves(make: Make):
    """What comes after a final output is dropped and counted."""
    executor = make()
    results = [executor.generate_async([n], short(), extra={"stray": True}) for n in range(5)]
    for n, result in enumerate(results):
        assert tokens_of(result.result(PATIENCE_S)) == [n + 1, n + 2, n + 3, n + 4]
    assert len(tokens_of(executor.generate_async([1], short()).result(PATIENCE_S))) == 4
    assert is_idle(executor)


def test_c6_a_cancelled_task_ends_its_request(plain: GenerationExecutor):
    """Whether it awaited the end or the next step."""

    async def main() -> None:
        for streaming in (False, True):
            result = plain.generate_async([1], LONG, streaming=streaming)

            async def consume(result: GenerationResult = result, steps: bool = streaming) -> None:
                if not steps:
                    await result
                async for _ in result:
                    pass

            task = asyncio.ensure_future(consume())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert isinstance(await asyncio.to_thread(result.exception, 5), Cancelled)

    asyncio.run(main())
    wait_until(lambda: is_idle(plain))


def test_c6_a_dropped_generator_ends_its_request(plain: GenerationExecutor):
    """Whoever stops reading and forgets the result has cancelled it."""

    async def deltas() -> AsyncIterator[list[int]]:
        async for step in plain.generate_async([1], LONG, streaming=True):
            yield step.outputs[0].token_ids_diff

    async def main() -> None:
        generator = deltas()
        await generator.__anext__()
        await generator.aclose()  # type: ignore[attr-defined]  # it is a generator

    asyncio.run(main())
    gc.collect()
    wait_until(lambda: is_idle(plain))


def test_c7_a_cancel_during_submit_leaves_nothing(plain: GenerationExecutor):
    """However soon it comes, both ends forget the request."""
    results = [plain.generate_async([1], LONG) for _ in range(200)]
    assert all(result.cancel() for result in results)
    assert all(isinstance(each.exception(PATIENCE_S), Cancelled) for each in results)
    assert is_idle(plain)
    running = plain.generate_async([2], short())
    assert len(tokens_of(running.result(PATIENCE_S))) == 4


def test_c7_a_cancel_while_its_adapter_loads_leaves_nothing(make: Make, tmp_path: Any):
    """A request that was never sent ends at once, and is not sent later."""
    executor = make({"adapters": True, "adapter_s": 0.3})
    result = executor.generate_async([1], LONG, LoRARequest("slow", 3, str(tmp_path)))
    assert result.cancel()
    assert isinstance(result.exception(0), Cancelled)
    executor.load_adapter(LoRARequest("slow", 3, str(tmp_path)))
    assert is_idle(executor)
    assert not [each for each in executor.call("order") if each.startswith("add")]


# --- C11: the end ---


def test_c11_a_shutdown_may_come_from_anywhere(make: Make):
    """From another thread, within a loop, with and without drain, and again."""
    executor = make()
    threads = [threading.Thread(target=executor.shutdown, args=(n % 2 == 0,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    executor.shutdown()

    async def main() -> None:
        async with make({"delay_s": 0.01}) as inner:
            result = inner.generate_async([1], short(10))
            await inner.ashutdown(drain=True)
            assert len(tokens_of(await result)) == 10
        make().shutdown()

    asyncio.run(main())


def test_c11_a_forgotten_executor_ends_its_engine(make: Make, request: pytest.FixtureRequest):
    """Its last reference ends it; the leak check sees to the rest."""
    worker = request.node.callspec.params["make"]
    code = (
        "import gc, sys, threading\n"
        "from actorserve.actors.generation import *\n"
        f"config = ExecutorConfig(worker={worker!r})\n"
        "executor = GenerationExecutor.create(EngineSpec('scripted'), config)\n"
        "result = executor.generate_async([1], SamplingParams(max_tokens=3)).result(30)\n"
        "threads = [t for t in threading.enumerate() if t.name.startswith('generation')]\n"
        "assert threads\n"
        "del executor, result\n"
        "for thread in threads: thread.join(30)\n"
        "assert not any(t.is_alive() for t in threads)\n"
        "executor = GenerationExecutor.create(EngineSpec('scripted'), config)\n"
        "running = executor.generate_async([1], SamplingParams(max_tokens=10**6))\n"
        "print('done')\n"  # and the interpreter ends with one at work
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_requests_after_a_shutdown_are_refused(make: Make):
    """And a text without a tokenizer is."""
    executor = make()
    with pytest.raises(InvalidArgument, match="no tokenizer"):
        executor.generate("text")
    executor.shutdown()
    with pytest.raises(Unavailable):
        executor.generate([1])
