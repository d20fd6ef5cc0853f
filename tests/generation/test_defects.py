# SPDX-License-Identifier: Apache-2.0
"""What TensorRT-LLM's executor once did wrong, D1 to D22: none of it can happen here."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    GenerationExecutor,
    GenerationResult,
    LoRARequest,
    RequestError,
    SamplingParams,
)
from actorserve.clock import monotonic_s
from actorserve.errors import (
    Cancelled,
    DeadlineExceeded,
    Full,
    InvalidArgument,
    Unavailable,
)
from tests.conftest import wait_until
from tests.generation.asking import LONG, PATIENCE_S, short, tokens_of
from tests.generation.conftest import Make
from tests.generation.immediate import Immediate, nothing


def test_d1_a_single_early_answer_is_delivered():
    """An answer that comes before `submit` returns needs no other one to be seen."""
    executor = Immediate()
    result = executor.generate_async([1], short())
    assert result.done()
    assert tokens_of(result.result(timeout=0)) == [0, 1, 2, 3]


def test_d1_a_single_request_is_answered(plain: GenerationExecutor):
    """One request alone, and nothing after it, gets its answer."""
    assert tokens_of(plain.generate_async([7], short()).result(PATIENCE_S)) == [8, 9, 10, 11]


def test_d2_an_early_answer_is_delivered_once():
    """No token of an early answer appears twice."""
    executor = Immediate()
    result = executor.generate_async([1], short(), streaming=True)
    seen = [token for step in result for token in step.outputs[0].token_ids_diff]
    assert seen == tokens_of(result) == [0, 1, 2, 3]


def test_d2_no_token_comes_twice(plain: GenerationExecutor):
    """Neither does one of any other answer."""
    for start in range(20):
        result = plain.generate_async([start], short(3), streaming=True)
        seen = [token for step in result for token in step.outputs[0].token_ids_diff]
        assert seen == [start + 1, start + 2, start + 3]


def test_d3_what_is_finished_is_forgotten():
    """An early answer's entry leaves the table as every other does."""
    executor = Immediate()
    results = [executor.generate_async([1], short()) for _ in range(3)]
    assert all(result.done() for result in results)
    assert executor.stats().in_flight == 0


def test_d3_nothing_is_kept_of_what_is_finished(plain: GenerationExecutor):
    """A result that nobody holds is collected at once."""
    for _ in range(10):
        plain.generate([3], short())
    assert plain.stats().in_flight == 0
    gc.collect()
    alive = [each for each in gc.get_objects() if type(each) is GenerationResult]
    assert not [each for each in alive if each._executor is plain]


def test_d4_an_error_of_a_request_is_its_end(plain: GenerationExecutor):
    """It is done, and says the same error again, at once, whatever it is asked."""
    result = plain.generate_async([1], short(), extra={"error": "no luck", "error_at": 2})
    errors = []
    for _ in range(3):
        with pytest.raises(RequestError, match="no luck") as caught:
            result.result(PATIENCE_S)
        errors.append(caught.value)
    assert errors[0] is errors[1] is errors[2] is result.exception(0)
    assert result.done() and not result.running() and result.finished and not result.cancelled()
    assert tokens_of(result) == [2, 3]
    with pytest.raises(RequestError):
        next(result)
    assert plain.stats().in_flight == 0


def test_d5_an_error_is_raised_where_it_belongs(plain: GenerationExecutor):
    """The next request after an error is not told of it."""
    failed = plain.generate_async([1], short(), extra={"error": "mine"})
    assert isinstance(failed.exception(PATIENCE_S), RequestError)
    for _ in range(5):
        assert len(tokens_of(plain.generate_async([1], short()).result(PATIENCE_S))) == 4


def test_d6_an_invalid_request_ends_itself_only(plain: GenerationExecutor):
    """What an engine refuses fails alone; those before and after are served."""
    before = plain.generate_async([1], short(50))
    refused = plain.generate_async([1], short(), extra={"reject": "not this one"})
    unknown = plain.generate_async([5000], short())
    after = plain.generate_async([2], short())
    with pytest.raises(RequestError, match="not this one"):
        refused.result(PATIENCE_S)
    with pytest.raises(RequestError, match="5000"):
        unknown.result(PATIENCE_S)
    assert len(tokens_of(before.result(PATIENCE_S))) == 50
    assert len(tokens_of(after.result(PATIENCE_S))) == 4


def test_d7_any_number_of_threads_may_submit(plain: GenerationExecutor):
    """Four threads submit at once, and each request gets its own answer."""

    def work(start: int) -> bool:
        results = [plain.generate_async([start + each], short(3)) for each in range(100)]
        return all(
            tokens_of(result.result(PATIENCE_S))
            == [(start + each + step) % 1000 for step in (1, 2, 3)]
            for each, result in enumerate(results)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [0, 200, 400, 600]))


def test_d8_submitting_waits_for_nothing(make: Make):
    """While the model loads, a submit in a loop takes no time; the answer comes when it can."""
    executor = make({"load_s": 1.0}, wait=False)

    async def main() -> float:
        longest_s = 0.0
        results = []
        for _ in range(50):
            began_s = monotonic_s()
            results.append(executor.generate_async([1], short()))
            longest_s = max(longest_s, monotonic_s() - began_s)
        for result in results:
            assert len(tokens_of(await result)) == 4
        return longest_s

    assert asyncio.run(main()) < 0.2  # a load takes five times as long


def test_d9_a_failed_start_is_told_and_can_be_shut_down(make: Make):
    """The error says why; submitting and shutting down return at once."""
    executor = make({"load_error": "no weights here"}, wait=False)
    with pytest.raises(EngineDeadError, match="no weights here") as caught:
        executor.wait_ready(PATIENCE_S)
    assert "scripted.py" in caught.value.traceback
    with pytest.raises(EngineDeadError, match="no weights here"):
        executor.submit(executor.request([1]))
    executor.shutdown()
    executor.shutdown()


def test_d9_what_was_submitted_before_a_failed_start_fails(make: Make):
    """A request that raced the failing start hears of it."""
    executor = make({"load_error": "no weights here", "load_s": 0.1}, wait=False)
    result = executor.generate_async([1], short())
    with pytest.raises(EngineDeadError, match="no weights here"):
        result.result(PATIENCE_S)


def test_d10_shutting_down_while_outputs_come_ends_every_thread(make: Make):
    """No thread is forgotten, however busy it is; the leak check sees to it."""
    executor = make()
    results = [executor.generate_async([1], LONG, streaming=True) for _ in range(20)]
    results[0].result_step(PATIENCE_S)
    executor.shutdown()
    for result in results:
        with pytest.raises((Unavailable, Cancelled)):
            result.result(PATIENCE_S)


def test_d11_a_shutdown_after_a_death_cleans_up_and_another_can_start(make: Make):
    """An engine's death does not keep anything from ending; the next executor works."""
    executor = make({"fail_at": 2})
    with pytest.raises(EngineDeadError, match="iteration 2 failed"):
        executor.generate([1], LONG)
    executor.shutdown()
    executor.shutdown(drain=True)
    with pytest.raises((EngineDeadError, Unavailable)):
        executor.submit(executor.request([1]))
    assert len(tokens_of(make().generate_async([1], short()).result(PATIENCE_S))) == 4


def test_d12_waiting_for_the_first_takes_no_cpu(make: Make):
    """Finished ones come first, each once, and the wait for the others is a sleep."""
    executor = make({"delay_s": 0.05})
    done = executor.generate_async([1], short(1)).result(PATIENCE_S)
    late = executor.generate_async([2], short(10))
    soon = executor.generate_async([3], short(2))
    began_s = time.thread_time()
    order = list(executor.wait_first_completed([late, done, soon, done], PATIENCE_S))
    assert time.thread_time() - began_s < 0.1  # it waits for half a second
    assert order == [done, soon, late]
    assert all(each.finished for each in order)


def test_d12_a_result_that_was_never_sent_here_does_not_hang(plain: GenerationExecutor):
    """One that will not finish ends the wait by its limit."""
    endless = plain.generate_async([1], LONG)
    with pytest.raises(TimeoutError):
        list(plain.wait_first_completed([endless], timeout=0.05))
    assert endless.cancel()


def test_d13_a_timeout_is_a_timeout_error_and_a_whole_budget(make: Make):
    """However many steps come, the budget is for all of them; later one may go on waiting."""
    executor = make({"delay_s": 0.02})
    result = executor.generate_async([1], short(100), streaming=True)
    began_s = monotonic_s()
    with pytest.raises(TimeoutError) as caught:
        result.result(timeout=0.2)
    assert isinstance(caught.value, DeadlineExceeded)
    assert 0.15 < monotonic_s() - began_s < 1.5
    with pytest.raises(TimeoutError):
        result.exception(timeout=0.01)
    assert result.running()
    assert len(tokens_of(result.result(PATIENCE_S))) == 100


def test_d14_no_error_takes_the_place_of_an_answer(plain: GenerationExecutor):
    """Among many errors every good answer has all of its tokens."""
    pairs = [
        (
            plain.generate_async([n], short(5), extra={"error": "bad", "error_at": n % 5}),
            plain.generate_async([n], short(5)),
        )
        for n in range(50)
    ]
    for n, (bad, good) in enumerate(pairs):
        assert tokens_of(good.result(PATIENCE_S)) == [n + 1, n + 2, n + 3, n + 4, n + 5]
        assert str(bad.exception(PATIENCE_S)) == "bad"


def test_d15_a_drain_delivers_everything(make: Make):
    """What was running at a shutdown with drain is complete; nothing overtakes it."""
    executor = make({"delay_s": 0.01})
    results = [executor.generate_async([n], short(20), streaming=True) for n in range(10)]
    results[0].result_step(PATIENCE_S)
    executor.shutdown(drain=True)
    for n, result in enumerate(results):
        assert tokens_of(result.result(0)) == list(range(n + 1, n + 21))
    with pytest.raises(Unavailable):
        executor.submit(executor.request([1]))


def test_d16_unread_statistics_are_bounded_and_counted(make: Make):
    """Of more iterations than are kept the newest stay, and the others are counted."""
    executor = make(stats_kept=10)
    executor.generate([1], short(500))
    wait_until(lambda: executor.stats().snapshots_dropped >= 490)
    kept = [json.loads(executor.get_stats(1))["iter"] for _ in range(10)]
    assert kept == list(range(490, 500))
    assert executor.stats().snapshots_dropped == 490
    with pytest.raises(TimeoutError):
        executor.get_stats(timeout=0.01)


def test_d17_adapters_are_never_ignored(make: Make, tmp_path: Path):
    """An engine without adapters refuses; a path that is not there fails its requests alone."""
    there = LoRARequest("there", 5, str(tmp_path))
    with pytest.raises(InvalidArgument, match="no adapters"):
        make().generate([1], short(), there)
    executor = make({"adapters": True})
    missing = executor.generate_async([1], short(), LoRARequest("gone", 6, "/no/such/path"))
    good = executor.generate_async([1], short(), there)
    with pytest.raises(RequestError, match="/no/such/path"):
        missing.result(PATIENCE_S)
    assert tokens_of(good.result(PATIENCE_S)) == [7, 8, 9, 10]
    with pytest.raises(InvalidArgument, match="adapter 5 is 'there'"):
        executor.generate([1], short(), LoRARequest("other", 5, str(tmp_path)))
    assert executor.adapters == [there]


def test_d17_loading_an_adapter_keeps_no_submitter_waiting(make: Make, tmp_path: Path):
    """Whoever submits while an adapter loads returns at once."""
    executor = make({"adapters": True, "adapter_s": 0.5})
    began_s = monotonic_s()
    slow = executor.generate_async([1], short(), LoRARequest("slow", 5, str(tmp_path)))
    quick = executor.generate_async([1], short())
    assert monotonic_s() - began_s < 0.4
    assert tokens_of(slow.result(PATIENCE_S)) == [7, 8, 9, 10]
    assert tokens_of(quick.result(PATIENCE_S)) == [2, 3, 4, 5]


def test_d18_beams_are_replaced(plain: GenerationExecutor):
    """A beam that was rewritten is the new one, not the old with the new behind it."""
    params = SamplingParams(max_tokens=5, beam_width=3, logprobs=0)
    result = plain.generate_async([10], params, streaming=True)
    for step in result:
        assert len(step.outputs) == 3
        for beam in step.outputs:
            assert beam.length == len(beam.logprobs) == len(beam.top_logprobs) <= 5
    assert tokens_of(result) == [16, 17, 18, 19, 20]
    assert result.outputs[2].token_ids == [18, 19, 20, 21, 22]


def test_d18_a_stop_text_never_shows(speaking: GenerationExecutor):
    """No partial text has a piece of what the end cuts off."""
    params = SamplingParams(max_tokens=40, stop=["hij", "never"])
    result = speaking.generate_async("abc", params, streaming=True)
    texts = [step.outputs[0].text for step in result]
    assert all("defg".startswith(text) for text in texts)
    assert result.outputs[0].text == "defg"
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].stop_reason == "hij"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_d19_arrays_are_prompts(plain: GenerationExecutor, kind: Any):
    """An array of one dimension is a prompt, one of two is a batch of them."""
    single = plain.generate(np.array([1, 2, 3], kind), short())
    assert isinstance(single, GenerationResult)
    assert tokens_of(single) == [4, 5, 6, 7]
    batch = plain.generate(np.array([[1, 2], [3, 4]], kind), short())
    assert isinstance(batch, list)
    assert [tokens_of(each)[0] for each in batch] == [3, 5]


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [1, "2"], [-1], [1.5], [True], None])
def test_d19_a_wrong_prompt_is_said(plain: GenerationExecutor, prompts: Any):
    """What is no prompt is refused before anything runs."""
    before = plain.stats().submitted
    with pytest.raises(InvalidArgument):
        plain.generate(prompts, short())
    assert plain.stats().submitted == before


def test_d19_too_few_parameters_leave_nothing_running(plain: GenerationExecutor):
    """A batch with a wrong number of parameters, or one wrong among them, is not begun."""
    before = plain.stats().submitted
    with pytest.raises(InvalidArgument, match="2 prompts and 1 sampling_params"):
        plain.generate([[1], [2]], [short()])
    with pytest.raises(InvalidArgument, match="temperature"):
        plain.generate([[1], [2]], [short(), SamplingParams(temperature=-1.0)])
    assert plain.stats().submitted == before


def test_d20_one_result_may_be_waited_for_by_many(plain: GenerationExecutor):
    """Eight threads and a loop wait for one result; all of them get it."""
    result = plain.generate_async([1], short(200), streaming=True)

    async def in_a_loop() -> int:
        return len(tokens_of(await result))

    with ThreadPoolExecutor(9) as pool:
        counts = [pool.submit(lambda: len(tokens_of(result.result(PATIENCE_S)))) for _ in range(8)]
        counts.append(pool.submit(lambda: asyncio.run(in_a_loop())))
        assert [each.result() for each in counts] == [200] * 9


def test_d20_a_listener_that_raises_ends_nothing(make: Make):
    """What somebody's function raises is counted, and reaches no request."""
    executor = make({"kv_events": True})

    def listener(*args: object) -> None:
        raise ValueError("from a listener")

    executor.on_kv_event(listener)
    executor.on_finished(listener)
    assert len(tokens_of(executor.generate_async([1], short()).result(PATIENCE_S))) == 4
    wait_until(lambda: executor.stats().listener_errors >= 2)


def test_d21_no_port_is_used(plain: GenerationExecutor):
    """Neither this process nor one below it has an internet socket."""
    plain.generate([1], short())
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        assert process.net_connections(kind="inet") == []


def test_d22_a_request_can_be_cancelled(plain: GenerationExecutor):
    """Cancelling ends it soon, is idempotent, and says so ever after."""
    result = plain.generate_async([1], LONG, streaming=True)
    result.result_step(PATIENCE_S)
    assert result.cancel()
    with pytest.raises(Cancelled):
        result.result(PATIENCE_S)
    assert result.cancelled() and result.done() and not result.cancel()
    assert result.outputs[0].finish_reason == "cancelled"


def test_d22_a_request_has_a_deadline(make: Make):
    """It ends by itself when its time is over: running, or waiting for room."""
    executor = make({"delay_s": 0.02, "slots": 1})
    running = executor.generate_async([1], LONG, timeout=0.3)
    waiting = executor.generate_async([1], LONG, timeout=0.1)
    for result in (waiting, running):
        with pytest.raises(TimeoutError):
            result.result(PATIENCE_S)
        assert result.outputs[0].finish_reason == "timeout"
    assert tokens_of(waiting) == []
    assert tokens_of(running) != []


def test_d22_the_higher_priority_goes_first(make: Make):
    """Of those that wait for the one slot, the most urgent gets it."""
    executor = make({"delay_s": 0.01, "slots": 1})
    first = executor.generate_async([1], short(10))
    wait_until(lambda: (executor.latest_stats() or {}).get("running") == 1)
    low = executor.generate_async([1], short(3), priority=-1)
    usual = executor.generate_async([1], short(3))
    high = executor.generate_async([1], short(3), priority=5)
    order = list(executor.wait_first_completed([low, usual, high, first], PATIENCE_S))
    assert order == [first, high, usual, low]


def test_d22_the_number_in_flight_is_bounded(make: Make):
    """One more than may be is refused at once, or waits for room."""
    executor = make(max_in_flight=2)
    held = [executor.generate_async([1], LONG) for _ in range(2)]
    with pytest.raises(Full, match="2 requests"):
        executor.generate_async([1], short())
    with pytest.raises(TimeoutError):
        executor.submit_waiting(executor.request([1], short()), timeout=0.05)
    timer = threading.Timer(0.05, held[0].cancel)
    timer.start()
    last = executor.submit_waiting(executor.request([1], short()), PATIENCE_S)
    timer.join()
    assert len(tokens_of(last.result(PATIENCE_S))) == 4
    assert held[1].cancel()


def test_d22_a_dead_engine_is_noticed(make: Make):
    """Everybody who waits hears of it at once, and whoever comes later too."""
    executor = make({"fail_at": 5, "delay_s": 0.01})
    results = [executor.generate_async([n], LONG) for n in range(5)]
    errors = [result.exception(PATIENCE_S) for result in results]
    assert all(isinstance(error, EngineDeadError) for error in errors)
    error = errors[0]
    assert isinstance(error, EngineDeadError)
    assert error.rank == 0 and error.pid and "iteration 5 failed" in error.reason
    with pytest.raises(EngineDeadError):
        executor.check_health()
    with pytest.raises(EngineDeadError):
        executor.generate_async([1], short())


def test_d22_an_answer_that_nobody_waits_for_is_ended():
    """A result whose last reference goes ends its request."""
    executor = Immediate(nothing)
    result = executor.generate_async([1], LONG)
    number = result.request_id
    del result
    gc.collect()
    assert executor.aborted == [number]
