# SPDX-License-Identifier: Apache-2.0
"""The executor over processes: what clients see of ranks that serve, die, come back and end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import select
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorserve.actors.generation import (
    EngineDeadError,
    EngineSpec,
    ExecutorConfig,
    GenerationExecutor,
    GenerationRequest,
    RequestError,
    SamplingParams,
)
from actorserve.actors.generation.group_life import RANK_MODULE
from actorserve.actors.generation.proxy import GenerationProxy
from actorserve.clock import monotonic_s
from actorserve.errors import Cancelled, InvalidArgument, TooLarge, Unavailable
from actorserve.runtime.child import Spawner
from actorserve.state.restart import Restart
from tests.conftest import wait_until
from tests.generation.groups import ENGINES

AT_ONCE_S = 0.5
AT_ONCE = Restart(first_s=0.0, base_s=0.0, max_s=0.0)


def tokens(count: int) -> SamplingParams:
    """Return parameters for so many tokens."""
    return SamplingParams(max_tokens=count)


def made(ranks: int = 2, *, engine: str = "Counting", **options: Any) -> GenerationProxy:
    """Return an executor; `config` is its configuration, the rest the engine's options."""
    config = options.pop("config", ExecutorConfig())
    executor = GenerationExecutor.create(
        EngineSpec(f"{ENGINES}:{engine}", options), config, model_world_size=ranks
    )
    assert isinstance(executor, GenerationProxy)
    return executor


def pid_of(executor: GenerationProxy, rank: int) -> int:
    """Return a rank's process; between two lives there is none for a moment."""

    def pids() -> list[int | None]:
        stats = executor.group_stats()
        return [] if stats is None else [each.pid for each in stats.ranks]

    wait_until(lambda: len(pids()) > rank and pids()[rank] is not None)
    found = [*pids(), *[None] * rank][rank]
    assert found is not None
    return found


def state_of(executor: GenerationProxy) -> str:
    """Return what the group is doing."""
    stats = executor.group_stats()
    return "" if stats is None else stats.state


@pytest.fixture(scope="module")
def shared() -> Iterator[GenerationProxy]:
    """Return an executor of two ranks for tests that leave it as it was."""
    executor = made(all_reduce=True)
    yield executor
    executor.shutdown()


# --- serving --------------------------------------------------------------------------------------


def test_answers_come_to_any_thread_and_loop(shared: GenerationProxy):
    """A batch, streams in a loop, and threads at once: each gets its own answer."""
    results = shared.generate([[10], [20]], tokens(5))
    assert isinstance(results, list)
    assert [each.outputs[0].token_ids for each in results] == [
        [11, 12, 13, 14, 15],
        [*range(21, 26)],
    ]

    async def stream(first: int) -> list[int]:
        seen: list[int] = []
        async for result in shared.generate_async([first], tokens(50), streaming=True):
            seen += result.outputs[0].token_ids_diff
        return seen

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(stream(100 * number) for number in range(20)))

    found: list[Any] = []

    def work(first: int) -> None:
        for turn in range(20):
            result = shared.generate([first + turn], tokens(3))
            assert not isinstance(result, list)
            found.append(result.outputs[0].token_ids == [first + turn + i for i in (1, 2, 3)])

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    streams = asyncio.run(main())
    for thread in threads:
        thread.join()
    assert streams == [[100 * number + i for i in range(1, 51)] for number in range(20)]
    assert found == [True] * 80
    assert shared.stats().in_flight == 0


def test_a_request_s_error_is_its_own(shared: GenerationProxy):
    """What the engine refuses fails alone and stays failed."""
    good = shared.generate_async([1], tokens(30))
    bad = shared.generate_async([999_999], tokens(3))
    for _ in range(2):
        with pytest.raises(RequestError, match="no token 999999"):
            bad.result(20)
    assert good.result(20).outputs[0].token_ids == list(range(2, 32))


def test_c22_what_is_too_large_fails_alone(
    shared: GenerationProxy, monkeypatch: pytest.MonkeyPatch
):
    """C22: pieces carry what no frame could; beyond the limit it is that request's error."""
    result = shared.generate([7] * 500_000, tokens(2))
    assert not isinstance(result, list)
    assert result.outputs[0].token_ids == [8, 9]
    monkeypatch.setattr("actorserve.runtime.fragments.LARGEST_BYTES", 600_000)
    good = shared.generate_async([1], tokens(3))
    bad = shared.generate_async([7] * 700_000, tokens(2))
    with pytest.raises(TooLarge):
        bad.result(20)
    assert good.result(20).outputs[0].token_ids == [2, 3, 4]


def test_what_cannot_be_encoded_fails_alone(shared: GenerationProxy):
    """An object in `extra` is no plain data."""
    request = GenerationRequest([1], tokens(2), extra={"x": object()})
    good = shared.generate_async([1], tokens(3))
    bad = shared.submit(request)
    with pytest.raises(InvalidArgument, match="cannot be sent"):
        bad.result(20)
    assert good.result(20).outputs[0].token_ids == [2, 3, 4]
    with pytest.raises(Exception, match="cannot be sent"):
        shared.call("tune", object(), timeout=20)


def test_calls_reach_every_rank(shared: GenerationProxy):
    """And are answered by rank 0; a method of the protocol is refused."""
    assert shared.call("tune", 1, timeout=20) == {"method": "tune", "args": [1], "rank": 0}
    with pytest.raises(RequestError, match="not for calls"):
        shared.call("add", 1, timeout=20)


def test_statistics_are_read_from_shared_memory(shared: GenerationProxy):
    """The latest snapshot is there when the answer is."""
    shared.generate([1], tokens(5))
    latest = shared.latest_stats()
    assert latest is not None
    wait_until(lambda: (shared.latest_stats() or {}).get("running") == 0)
    assert shared.latest_stats()["polls"] >= 5  # type: ignore[index]


def test_cancel_ends_a_request_at_once(shared: GenerationProxy):
    """Its slot is free within an iteration, and others do not notice."""
    endless = shared.generate_async([1], tokens(1_000_000), streaming=True)
    next(endless)
    endless.cancel()
    with pytest.raises(Cancelled):
        endless.result(20)
    wait_until(lambda: shared.stats().in_flight == 0)


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_c8_all_pending_fail_and_stay_failed(rank: int):
    """C8: threads, loops and later access get one error; submits are refused; nothing is left."""
    executor = made(all_reduce=True)
    results = [executor.generate_async([number], tokens(1_000_000)) for number in range(100)]
    streaming = executor.generate_async([1], tokens(1_000_000), streaming=True)
    next(streaming)
    ended: list[float] = []

    def wait() -> None:
        with pytest.raises(EngineDeadError):
            results[0].result(20)
        ended.append(monotonic_s())

    thread = threading.Thread(target=wait)
    thread.start()
    pid = pid_of(executor, rank)
    began_s = monotonic_s()
    os.kill(pid, signal.SIGKILL)
    for result in results:
        with pytest.raises(EngineDeadError, match=f"rank {rank}") as caught:
            result.result(20)
        assert (caught.value.rank, caught.value.pid) == (rank, pid)
    thread.join()
    assert max(monotonic_s(), *ended) - began_s < AT_ONCE_S
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        streaming.result(20)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        executor.generate_async([1], tokens(1))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        executor.check_health()
    assert executor.stats().in_flight == 0
    began_s = monotonic_s()
    executor.shutdown()
    assert monotonic_s() - began_s < 5


def test_c10_a_load_that_fails_is_create_s_error():
    """C10: with rank, process and traceback; requests that waited for it fail with it."""
    with pytest.raises(EngineDeadError, match="no weights on rank 1") as caught:
        made(fail_load=1)
    assert caught.value.rank == 1
    assert "in start" in caught.value.traceback
    proxy = GenerationProxy(EngineSpec(f"{ENGINES}:Counting", {"fail_load": 0}), ExecutorConfig())
    early = proxy.generate_async([1], tokens(1))
    with pytest.raises(EngineDeadError, match="no weights on rank 0"):
        early.result(20)
    with pytest.raises(EngineDeadError, match="no weights on rank 0"):
        proxy.wait_ready(20)
    proxy.shutdown()


def test_requests_wait_for_a_load():
    """Submitting does not wait for the ranks; the answer does."""
    proxy = GenerationProxy(EngineSpec(f"{ENGINES}:Counting"), ExecutorConfig(), 2)
    results = [proxy.generate_async([number], tokens(2)) for number in range(5)]
    results[2].cancel()
    assert results[4].result(20).outputs[0].token_ids == [5, 6]
    with pytest.raises(Cancelled):
        results[2].result(20)
    proxy.shutdown()


def test_restart_serves_again_with_another_epoch():
    """What was pending fails; the next life takes requests without anybody's doing."""
    executor = made(all_reduce=True, config=ExecutorConfig(restart=AT_ONCE))
    pending = executor.generate_async([1], tokens(1_000_000), streaming=True)
    next(pending)
    os.kill(pid_of(executor, 1), signal.SIGKILL)
    with pytest.raises(EngineDeadError) as caught:
        pending.result(20)
    assert caught.value.retry_after_s == 1.0
    wait_until(lambda: executor.error is None and executor.group_stats().epoch == 2)  # type: ignore[union-attr]
    result = executor.generate([5], tokens(3))
    assert not isinstance(result, list)
    assert result.outputs[0].token_ids == [6, 7, 8]
    with pytest.raises(EngineDeadError):
        pending.result(20)
    executor.shutdown()


def test_kills_at_random_never_leave_anybody_waiting():
    """Clients of a group that dies again and again get an answer or its error, always."""
    executor = made(all_reduce=True, config=ExecutorConfig(restart=AT_ONCE))
    random_ = random.Random(1)
    answers: list[int] = []
    is_over = threading.Event()

    def ask(first: int) -> None:
        while not is_over.is_set():
            try:
                result = executor.generate_async([first], tokens(40)).result(20)
            except EngineDeadError:
                is_over.wait(0.01)
                continue
            assert result.outputs[0].token_ids == [first + i for i in range(1, 41)]
            answers.append(first)

    threads = [threading.Thread(target=ask, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        before = len(answers)
        wait_until(lambda before=before: len(answers) > before + 2, 20, "answers")
        select.select([], [], [], random_.random() / 20)
        os.kill(pid_of(executor, random_.randrange(2)), signal.SIGKILL)
    before = len(answers)
    wait_until(lambda: len(answers) > before + 8, 20, "answers")
    is_over.set()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 4
    assert executor.stats().in_flight == 0
    stats = executor.group_stats()
    assert stats is not None
    assert stats.epoch == stats.deaths + 1 > 4
    executor.shutdown()


def test_a_forked_child_owns_nothing_of_it(shared: GenerationProxy):
    """There, requests are refused, a shutdown does nothing, and the parent goes on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with contextlib.suppress(EngineDeadError):
                shared.generate_async([1], tokens(1))
                os._exit(2)
            shared.shutdown()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    result = shared.generate([1], tokens(3))
    assert not isinstance(result, list)
    assert result.outputs[0].token_ids == [2, 3, 4]


# --- the end --------------------------------------------------------------------------------------


def test_c11_shutdown_from_anywhere_ends_everything():
    """C11: twice, from a thread, in a loop, by leaving a block; pending requests fail."""
    with made(1) as executor:
        pending = executor.generate_async([1], tokens(1_000_000))
        thread = threading.Thread(target=executor.shutdown)
        thread.start()
        executor.shutdown()
        thread.join()
        with pytest.raises((Cancelled, Unavailable)):
            pending.result(20)
        with pytest.raises(Unavailable, match="shut down"):
            executor.generate_async([1], tokens(1))

    async def main() -> None:
        async with await GenerationExecutor.acreate(f"{ENGINES}:Counting") as executor:
            assert (await executor.generate_async([1], tokens(1))).outputs[0].token_ids == [2]

    asyncio.run(main())


def test_c11_drain_finishes_what_runs():
    """C11: every token of what was submitted comes, and the processes are gone then."""
    executor = made(poll_s=0.001)
    results = [executor.generate_async([number], tokens(100)) for number in range(5)]
    executor.shutdown(drain=True)
    for number, result in enumerate(results):
        assert result.result(0).outputs[0].token_ids == list(range(number + 1, number + 101))


def test_c11_a_drain_that_takes_too_long_is_cut():
    """C11: at its timeout, what is left fails, and the processes are killed."""
    executor = made(poll_s=0.001)
    pending = executor.generate_async([1], tokens(1_000_000))
    began_s = monotonic_s()
    executor.shutdown(drain=True, timeout=0.3)
    assert 0.2 < monotonic_s() - began_s < 5
    with pytest.raises((Unavailable, Cancelled)):
        pending.result(0)


def test_c11_an_engine_that_does_not_close_is_killed():
    """C11: the shutdown is as long as its timeout allows, and a little."""
    executor = made(close_s=50.0)
    began_s = monotonic_s()
    executor.shutdown(timeout=0.3)
    assert monotonic_s() - began_s < 5


def test_c11_shutdown_while_loading():
    """C11: ranks that still load are ended, and those who wait are told."""
    spec = EngineSpec(f"{ENGINES}:Counting", {"hang_load": 0})
    proxy = GenerationProxy(spec, ExecutorConfig(), 2)
    pending = proxy.generate_async([1], tokens(1))
    wait_until(lambda: proxy.group_stats() is not None)
    began_s = monotonic_s()
    proxy.shutdown(timeout=0.3)
    assert monotonic_s() - began_s < 8
    with pytest.raises(Unavailable):
        pending.result(0)


def test_c11_an_executor_that_is_dropped_ends_by_itself():
    """C11: no thread of its own keeps it alive."""
    executor = made(1)
    weak = weakref.ref(executor)
    pid = pid_of(executor, 0)
    fd = os.pidfd_open(pid)
    del executor
    gc.collect()
    assert weak() is None
    assert select.select([fd], [], [], 10)[0]
    os.close(fd)


def test_c11_a_program_that_forgets_it_ends(tmp_path: Path):
    """C11: the interpreter's end shuts it down, with a request in flight."""
    program = f"""
from actorserve.actors.generation import *
ex = GenerationExecutor.create(EngineSpec("{ENGINES}:Counting"), model_world_size=2)
result = ex.generate_async([1], SamplingParams(max_tokens=1000000))
print(*(rank.pid for rank in ex.group_stats().ranks), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for pid in done.stdout.split():
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists())


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_proxy_in_a_given_loop(kind: str):
    """With the caller's own loop and Spawner, which stay the caller's."""

    async def main() -> None:
        spawner = Spawner(preload=(RANK_MODULE,), log=lambda level, text: None)
        await spawner.start()
        proxy = GenerationProxy(
            EngineSpec(f"{ENGINES}:Counting"), ExecutorConfig(), 2, spawner=spawner, name="llm"
        )
        await proxy.aready(20)
        assert Path(f"/proc/{pid_of(proxy, 1)}/comm").read_text() == "llm rank 1\n"
        result = await proxy.generate_async([1], tokens(3))
        assert result.outputs[0].token_ids == [2, 3, 4]
        if kind == "asyncio":
            await proxy.ashutdown()
        else:
            proxy.shutdown()  # in its own loop it cannot wait for it
            await asyncio.wait([proxy._task])  # type: ignore[list-item]
        assert spawner.stats().children == 0
        await spawner.stop()

    if kind == "uvloop":
        loop = pytest.importorskip("uvloop").new_event_loop()
        loop.run_until_complete(main())
        loop.close()
    else:
        asyncio.run(main())


def test_what_cannot_be_started_is_refused():
    """Before anything is started."""
    with pytest.raises(InvalidArgument, match="1 to 30"):
        GenerationProxy(EngineSpec(f"{ENGINES}:Counting"), ExecutorConfig(), 31)
    with pytest.raises(InvalidArgument, match="cannot be sent to a process"):
        GenerationProxy(EngineSpec(f"{ENGINES}:Counting", {"journal": object()}), ExecutorConfig())


def test_a_request_can_be_cancelled_while_a_shutdown_drains():
    """The engine hears of it, so that the drain has not to wait for the request's own end."""
    executor = GenerationExecutor.create(EngineSpec("scripted", {"delay_s": 0.01}))
    assert isinstance(executor, GenerationProxy)
    result = executor.generate_async([1], tokens(1_000_000), streaming=True)
    result.result_step(30)
    draining = threading.Thread(target=executor.shutdown, args=(True, 60))
    draining.start()
    wait_until(lambda: state_of(executor) == "closing")
    result.cancel()
    assert isinstance(result.exception(30), Cancelled)
    draining.join(30)
    assert not draining.is_alive()


def test_looking_at_a_group_that_dies_and_comes_back_is_harmless():
    """From any thread, whatever becomes of what is looked at meanwhile."""
    executor = made(config=ExecutorConfig(restart=AT_ONCE))
    try:
        os.kill(pid_of(executor, 0), signal.SIGKILL)
        deadline_s = monotonic_s() + 30
        while (stats := executor.group_stats()) and (stats.epoch, stats.state) != (2, "ready"):
            assert monotonic_s() < deadline_s
    finally:
        executor.shutdown()
    assert state_of(executor) == "closed"
