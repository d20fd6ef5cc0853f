# SPDX-License-Identifier: Apache-2.0
"""What every executor must do, C12 to C21: budgets, pressure, streams; in threads and processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from actorserve.actors.generation import (
    GenerationExecutor,
    GenerationRequest,
    GenerationResult,
    LoRARequest,
    Output,
    RequestError,
    SamplingParams,
)
from actorserve.actors.generation.engines.scripted_text import ByteTokenizer
from actorserve.clock import monotonic_s
from actorserve.errors import Full
from actorserve.ids import Ids
from tests.conftest import wait_until
from tests.generation.asking import LONG, PATIENCE_S, is_idle, short, tokens_of
from tests.generation.conftest import Make
from tests.generation.immediate import Immediate, nothing


def test_c12_a_timeout_is_the_whole_budget(make: Make):
    """In a loop too: steps come all the time, and the budget runs out nevertheless."""
    executor = make({"delay_s": 0.01})

    async def main() -> None:
        result = executor.generate_async([1], short(150), streaming=True)
        began_s = monotonic_s()
        with pytest.raises(TimeoutError):
            await result.aresult(timeout=0.2)
        assert 0.15 < monotonic_s() - began_s < 1.4
        assert result.running()  # running out of time cancels nothing
        assert len(tokens_of(await result.aresult(PATIENCE_S))) == 150

    asyncio.run(main())


def test_c13_a_slow_reader_costs_little_and_loses_nothing():
    """Unread deltas become one; the reader then gets them all in one step."""
    executor = Immediate(nothing)
    result = executor.generate_async([1], LONG, streaming=True)
    number = result.request_id
    for place in range(10_000):
        executor.deliver([Output(number, 0, [place])])
    assert len(result._feed.inbox) < 100
    result.result_step(0)
    assert tokens_of(result) == result.outputs[0].token_ids_diff == list(range(10_000))
    executor.deliver([Output(number, 0, [1], "length", True)])
    assert len(tokens_of(result.result(0))) == 10_001


def test_c13_a_slow_reader_keeps_nobody_waiting(plain: GenerationExecutor):
    """Others are served while one stream is not read."""
    unread = plain.generate_async([1], short(5000), streaming=True)
    for _ in range(20):
        plain.generate([2], short())
    assert len(tokens_of(unread.result(PATIENCE_S))) == 5000


def test_c14_when_all_is_full_the_loop_goes_on(make: Make):
    """Submitting is refused or awaited, and takes the loop no time either way."""
    executor = make({"slots": 2, "delay_s": 0.001}, max_in_flight=20)

    async def main() -> float:
        longest_s = 0.0
        tasks = []
        for n in range(300):
            request = executor.request([n], short(3))
            began_s = monotonic_s()
            tasks.append(asyncio.ensure_future(_ended(executor, request)))
            with contextlib.suppress(Full):
                executor.submit(executor.request([n], short(1))).cancel()
            longest_s = max(longest_s, monotonic_s() - began_s)
            await asyncio.sleep(0)
        assert [len(each) for each in await asyncio.gather(*tasks)] == [3] * 300
        return longest_s

    assert asyncio.run(main()) < 0.2


async def _ended(executor: GenerationExecutor, request: GenerationRequest) -> list[int]:
    return tokens_of(await (await executor.asubmit(request, PATIENCE_S)))


def test_c15_unread_statistics_take_no_memory():
    """Of 100 000 iterations that nobody reads, as many are kept as the config says."""
    executor = Immediate(stats_kept=100)
    for n in range(1000):
        executor.take_stats([{"iter": 100 * n + each} for each in range(100)], 0)
    assert len(executor._registry.snapshots._kept) == 100
    assert executor.stats().snapshots_dropped == 99_900
    assert executor.latest_stats() == {"iter": 99_999}


def test_c15_statistics_are_of_each_iteration(make: Make):
    """Read with and without a loop, they come in order and say what went on."""
    executor = make()
    result = executor.generate_async([1, 2, 3], short(3), streaming=True)
    first = json.loads(asyncio.run(executor.aget_stats(PATIENCE_S)))
    second = json.loads(executor.get_stats(PATIENCE_S))
    assert (first["iter"], second["iter"]) == (0, 1)
    assert first["prompt_tokens"] == 3 and second["prompt_tokens"] == 0
    assert first["running"] == 1 and "kv_used_tokens" in first
    assert len(tokens_of(result.result(PATIENCE_S))) == 3


# --- C16 to C21 ---


def test_c16_cache_events_are_numbered_replayed_and_gaps_seen(make: Make):
    """A reader gets what is kept, from where it was, and how much it missed."""
    executor = make({"kv_events": True}, kv_events_kept=4)
    heard: list[tuple[int, list[Any]]] = []
    stop = executor.on_kv_event(lambda first, events: heard.append((first, events)))
    for n in range(4):
        executor.generate([n], short(2))
        wait_until(lambda n=n: executor.stats().kv_events == 2 * n + 2)
    replay = executor.kv_events(since=0)
    assert (replay.first, replay.next, replay.missed, len(replay.events)) == (4, 8, 4, 4)
    assert [each[0] for each in replay.events] == ["stored", "removed"] * 2
    assert executor.kv_events(since=8).events == []
    assert [first for first, _ in heard] == sorted(first for first, _ in heard)
    assert sum(len(events) for _, events in heard) == 8
    stop()
    stop()
    executor.generate([1], short(2))
    assert sum(len(events) for _, events in heard) == 8


def test_c17_a_failing_adapter_fails_one_request(make: Make, tmp_path: Any):
    """Its path may be right the next time; without adapters there is an error, never the base."""
    executor = make({"adapters": True})
    lora = LoRARequest("late", 9, str(tmp_path / "late"))
    other = executor.generate_async([1], short())
    with pytest.raises(RequestError, match="late"):
        executor.generate([1], short(), lora)
    assert tokens_of(other.result(PATIENCE_S)) == [2, 3, 4, 5]
    (tmp_path / "late").mkdir()
    result = executor.generate([1], short(), lora)
    assert isinstance(result, GenerationResult)
    assert tokens_of(result) == [11, 12, 13, 14]
    executor.unload_adapter(9)
    with pytest.raises(RequestError, match="no adapter 9"):
        executor.unload_adapter(9)
    assert executor.adapters == []


def test_c18_a_result_belongs_to_no_loop(plain: GenerationExecutor):
    """Made in one loop, it is awaited in another, then read in a thread; and the other way."""

    async def submit() -> GenerationResult:
        return plain.generate_async([1], short(50), streaming=True)

    async def step(result: GenerationResult) -> int:
        await result.aresult_step()
        return len(tokens_of(result))

    result = asyncio.run(submit())
    assert asyncio.run(step(result)) > 0
    assert len(tokens_of(result.result(PATIENCE_S))) == 50

    async def wait(result: GenerationResult) -> list[int]:
        return tokens_of(await result)

    assert len(asyncio.run(wait(plain.generate_async([1], short(50))))) == 50


def test_c19_stop_texts_stop_across_deltas():
    """However the tokens are portioned, text and place are the same, and the engine is told."""
    tokens = list(b"one two END three")
    for size in range(1, len(tokens) + 1):
        executor = Immediate(nothing, ByteTokenizer())
        params = SamplingParams(max_tokens=100, stop=["END", "DX"])
        result = executor.generate_async("?", params, streaming=True)
        texts = []
        for begin in range(0, len(tokens), size):
            executor.deliver([Output(result.request_id, 0, tokens[begin : begin + size])])
            if not result.finished and result.poll():
                texts.append(result.outputs[0].text_diff)
        assert "".join(texts) == result.outputs[0].text == "one two "
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("stop", "END")
        assert tokens_of(result) == list(b"one two END")
        assert executor.aborted == [result.request_id]
        assert executor.stats().in_flight == 1  # the engine has it still
        executor.deliver([Output(result.request_id, finish="cancelled", final=True)])
        assert is_idle(executor) and result.exception(0) is None
        assert executor.stats().late_outputs == 0


def test_c19_logprobs_are_cut_with_their_tokens():
    """What a stop text cuts off has no logarithms either."""
    executor = Immediate(nothing, ByteTokenizer())
    result = executor.generate_async("?", SamplingParams(stop="b", logprobs=0))
    tokens = list(b"abcd")
    logprobs = [[(token, -1.0)] for token in tokens]
    executor.deliver([Output(result.request_id, 0, tokens, logprobs=logprobs)])
    output = result.result(0).outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == ("a", list(b"ab"), [-1.0, -1.0])


def test_c19_a_stop_text_can_be_kept(speaking: GenerationExecutor):
    """If it is asked for, the text ends with what stopped it."""
    params = SamplingParams(max_tokens=40, stop="hij", include_stop_str_in_output=True)
    result = speaking.generate("abc", params)
    assert isinstance(result, GenerationResult)
    assert result.outputs[0].text == "defghij"
    assert result.outputs[0].finish_reason == "stop"


def test_c20_every_sequence_has_its_end(plain: GenerationExecutor):
    """Of n sequences each says how it ended; the request is over when all are."""
    params = SamplingParams(max_tokens=6, n=3)
    result = plain.generate_async([1], params, streaming=True, extra={"end": 4})
    for step in result:
        assert len(step.outputs) == 3
    assert [tokens_of(result, seq) for seq in range(3)] == [
        [2, 3, 4, 5],
        [3, 4, 5, 6],
        [4, 5, 6, 7],
    ]
    assert [each.finish_reason for each in result.outputs] == ["stop"] * 3


def test_c20_one_sequence_stopped_by_a_text_leaves_the_others(speaking: GenerationExecutor):
    """Each of n sequences stops where its own text says so."""
    params = SamplingParams(max_tokens=10, n=3, stop=["f"])
    result = speaking.generate("abc", params)
    assert isinstance(result, GenerationResult)
    assert [each.text for each in result.outputs] == ["de", "e", ""]
    assert [each.finish_reason for each in result.outputs] == ["stop"] * 3


def test_c21_numbers_are_never_used_again():
    """The executor's numbers differ from any other's, and end with an error, not at the begin."""
    one, other = Immediate(nothing), Immediate(nothing)
    numbers = [each.generate_async([1]).request_id for each in (one, other) for _ in range(100)]
    assert len(set(numbers)) == 200
    ids = Ids(5)
    ids._counter = iter(range(3))
    one._ids = ids
    kept = [one.generate_async([1]) for _ in range(3)]
    with pytest.raises(OverflowError):
        one.generate_async([1])
    assert len(kept) == 3


def test_c21_a_users_own_id_may_come_twice(plain: GenerationExecutor):
    """Two requests of one user id are two requests; one request object may be sent twice."""
    request = plain.request([1], short(), user_id="mine")
    results = [plain.submit(request), plain.submit(request)]
    assert [each.user_id for each in results] == ["mine", "mine"]
    assert results[0].request_id != results[1].request_id
    assert [tokens_of(each.result(PATIENCE_S)) for each in results] == [[2, 3, 4, 5]] * 2
