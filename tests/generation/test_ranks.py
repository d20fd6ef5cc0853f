# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks: one order on all, tokens as of one, calls in two phases, an end in order."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from actorserve.clock import monotonic_s
from actorserve.errors import EngineDeadError
from actorserve.wire.generation import Abort, Call, IterationStats
from tests.generation.groups import Group, Home, at_home, journal, run_group


@pytest.fixture(scope="module", autouse=True)
def home() -> Iterator[None]:
    """Have one loop for the whole file."""
    with at_home():
        yield


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tokens_are_those_of_one_rank(size: int):
    """Whatever the number of ranks that compute them together."""

    async def test(group: Group) -> None:
        for number in range(1, 20):
            group.submit(number, 10 * number, 30)
        for number in range(1, 20):
            assert (await group.final(number)).finish == "length"
            assert group.tokens(number) == [10 * number + i for i in range(1, 31)]

    run_group(test, size=size, options={"all_reduce": True})


def test_c23_all_ranks_see_one_order(tmp_path: Path):
    """C23: requests and aborts that come at random reach every rank in the same steps."""

    async def test(group: Group) -> None:
        group.submit(100, 1, 1_000_000)
        await group.until(lambda: 100 in group.outputs)
        for number in range(1, 60):
            group.submit(number, number, 5 + number % 17)
            if number % 3 == 0:
                group.group.send(Abort([number - 1, number + 1000]))
            if number % 5 == 0:
                await asyncio.sleep(0.001)
        group.group.send(Abort([100]))
        for number in (*range(1, 60), 100):
            await group.final(number)

    run_group(test, size=3, options={"journal": str(tmp_path), "all_reduce": True})
    lines = journal(tmp_path, 0)
    assert any(line.startswith("abort") and "100" in line for line in lines)
    assert lines[-1] == "close"
    assert journal(tmp_path, 1) == journal(tmp_path, 2) == lines


@pytest.mark.parametrize("size", [1, 2])
def test_c22_a_prompt_longer_than_any_frame(tmp_path: Path, size: int):
    """C22: a million tokens go in pieces, to rank 0 and over the broadcast ring."""

    async def test(group: Group) -> None:
        group.submit(1, 500, 3, prompt=1_000_000)
        group.submit(2, 600, 3)
        await group.final(1)
        await group.final(2)
        assert group.tokens(1) == [501, 502, 503]
        assert group.tokens(2) == [601, 602, 603]

    run_group(test, size=size, options={"journal": str(tmp_path)})
    for rank in range(size):
        assert "add 1 500 1000000" in journal(tmp_path, rank)


@pytest.mark.parametrize("length", [100, 50_000])
def test_logits_arrive_as_arrays(length: int):
    """Small ones inline, large ones through shared memory, which comes back when they die."""

    async def test(group: Group) -> None:
        group.submit(1, 7, 3)
        await group.final(1)
        for token, output in zip((8, 9, 10), group.outputs[1]):
            assert output.arrays is not None
            array = output.arrays["generation_logits"]
            assert array.dtype == np.float32
            assert array.shape == (1, length)
            assert (array == token).all()
            assert not array.flags.writeable
        held = group.group._ground.exchange.stats().held_blocks
        assert held == (3 if length > 1024 else 0)
        group.outputs.clear()
        group.messages.clear()
        del array, output
        assert group.group._ground.exchange.stats().held_blocks == 0

    run_group(test, size=1, options={"logits": length})


def test_logits_outlive_their_group():
    """Whoever keeps them can read them when the rank is long gone."""
    kept: list[np.ndarray] = []

    async def test(group: Group) -> None:
        group.submit(1, 7, 1)
        await group.final(1)
        arrays = group.outputs[1][0].arrays
        assert arrays is not None
        kept.append(arrays["generation_logits"])

    run_group(test, size=1, options={"logits": 50_000})
    assert (kept[0] == 8).all()


def test_a_request_that_the_engine_refuses_fails_alone():
    """On every rank alike, and the others go on."""

    async def test(group: Group) -> None:
        group.submit(1, 100, 50)
        group.submit(2, 999_999, 50)
        refused = await group.final(2)
        assert (refused.finish, refused.error) == ("error", "no token 999999")
        await group.final(1)
        assert group.tokens(1) == list(range(101, 151))
        assert group.deaths == []

    run_group(test, options={"all_reduce": True})


# --- calls ----------------------------------------------------------------------------------------


def test_a_call_is_prepared_everywhere_before_it_is_done(tmp_path: Path):
    """All ranks prepare, then all commit; the answer is rank 0's."""

    async def test(group: Group) -> None:
        group.group.send(Call(5, "tune", [1, "x"]))
        await group.until(lambda: 5 in group.calls)
        assert group.calls[5].error is None
        assert group.calls[5].result == {"method": "tune", "args": [1, "x"], "rank": 0}

    run_group(test, size=3, options={"journal": str(tmp_path)})
    for rank in range(3):
        assert journal(tmp_path, rank) == ["start", "prepare tune", "call tune", "close"]


@pytest.mark.parametrize("rank", [0, 1])
def test_c24_a_call_that_one_rank_cannot_do_is_done_by_none(tmp_path: Path, rank: int):
    """C24: what every rank has prepared is rolled back, and the engine goes on."""

    async def test(group: Group) -> None:
        group.group.send(Call(1, "sleep", []))
        await group.until(lambda: 1 in group.calls)
        assert f"rank {rank} cannot sleep" in (group.calls[1].error or "")
        group.submit(1, 10, 3)
        await group.final(1)
        assert group.tokens(1) == [11, 12, 13]

    run_group(test, options={"journal": str(tmp_path), "fail_prepare": rank})
    for each in range(2):
        lines = journal(tmp_path, each)
        assert lines[1:3] == ["prepare sleep", "rollback sleep"]
        assert "call sleep" not in lines


def test_ranks_that_differ_after_a_call_are_a_dead_group():
    """One that committed and one that could not have no common state any more."""

    async def test(group: Group) -> None:
        group.group.send(Call(1, "sleep", []))
        await group.until(lambda: group.deaths)
        error, is_last = group.deaths[0]
        assert is_last
        assert "rank 1 could not sleep after all" in str(error)

    run_group(test, options={"fail_commit": 1})


def test_a_call_s_result_that_cannot_travel_is_its_error():
    """An object is no plain data; the engine goes on."""

    async def test(group: Group) -> None:
        group.group.send(Call(1, "odd", []))
        await group.until(lambda: 1 in group.calls)
        assert "cannot be sent" in (group.calls[1].error or "")
        assert group.deaths == []

    run_group(test, size=1)


# --- the rest -------------------------------------------------------------------------------------


def test_statistics_come_in_messages_and_stand_on_the_page():
    """Every iteration has a snapshot; the latest can be read without any message."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 40)
        await group.final(1)

        def snapshots() -> list[dict]:
            return [
                each
                for message in group.messages
                if isinstance(message, IterationStats)
                for each in message.snapshots
            ]

        await group.until(lambda: len(snapshots()) == 40)
        assert [each["iter"] for each in snapshots()] == list(range(40))
        latest = group.group.latest_stats()
        assert latest is not None
        assert latest == snapshots()[-1]
        assert latest["polls"] == 40

    run_group(test)


def test_an_engine_with_a_thread_of_its_own_is_waited_for_by_descriptor():
    """Its outputs wake rank 0, which otherwise sleeps."""

    async def test(group: Group) -> None:
        for number in range(1, 6):
            group.submit(number, 100 * number, 20)
        for number in range(1, 6):
            await group.final(number)
            assert group.tokens(number) == [100 * number + i for i in range(1, 21)]

    run_group(test, "Threaded", size=1, options={"poll_s": 0.001})


def test_ranks_in_another_interpreter():
    """Executed afresh, with an environment of their own."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 5)
        await group.final(1)
        assert group.tokens(1) == [2, 3, 4, 5, 6]
        environment = Path(f"/proc/{group.group.pids[1]}/environ").read_bytes()
        assert b"OMP_NUM_THREADS=1" in environment

    own = Home()  # it keeps a folder for other interpreters
    run_group(
        test,
        home=own,
        options={"all_reduce": True},
        python=sys.executable,
        env={"OMP_NUM_THREADS": "1"},
    )
    own.close()


def test_close_lets_what_runs_be_cancelled_or_drained():
    """Without drain a final "cancelled" comes at once; with it, all tokens do."""

    async def cancel(group: Group) -> None:
        group.submit(1, 1, 10_000)
        await group.until(lambda: 1 in group.outputs)
        began_s = monotonic_s()
        await group.group.close()
        assert monotonic_s() - began_s < 5
        assert (await group.final(1)).finish == "cancelled"

    async def drain(group: Group) -> None:
        group.submit(1, 1, 300)
        await group.until(lambda: 1 in group.outputs)
        await group.group.close(drain_s=30)
        assert (await group.final(1)).finish == "length"
        assert len(group.tokens(1)) == 300
        with pytest.raises(EngineDeadError if group.deaths else Exception, match="clos"):
            group.submit(2, 1, 1)

    async def drain_in_vain(group: Group) -> None:
        group.submit(1, 1, 1_000_000)
        await group.until(lambda: 1 in group.outputs)
        await group.group.close(drain_s=0.2)
        assert (await group.final(1)).finish == "cancelled"

    for test in (cancel, drain, drain_in_vain):
        run_group(test, options={"poll_s": 0.001})


def cpu_s(pid: int) -> float:
    """Return what a process has used, exactly: ticks would charge 10 ms for each of its beats."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


def test_c25_idle_ranks_use_no_cpu():
    """C25: ranks that wait for requests sleep; only their beats cost a little."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 5)
        await group.final(1)
        shares = []
        for _ in range(4):  # threads of BLAS look for work for 100 ms before they sleep
            before_s = sum(map(cpu_s, group.group.pids))
            began_s = monotonic_s()
            await asyncio.sleep(1)
            used_s = sum(map(cpu_s, group.group.pids)) - before_s
            shares.append(used_s / (monotonic_s() - began_s))
        assert max(shares[1:]) < 0.05

    run_group(test, options={"all_reduce": True})


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_group_lives_in_any_loop_of_any_thread(kind: str):
    """Also in uvloop, and off the main thread."""
    if kind == "uvloop":
        loop = pytest.importorskip("uvloop").new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    finished = []

    async def test(group: Group) -> None:
        group.submit(1, 1, 50)
        await group.final(1)
        finished.append(group.tokens(1))

    def live() -> None:
        own = Home(loop)
        run_group(test, home=own)
        own.close()

    thread = threading.Thread(target=live)
    thread.start()
    thread.join(40)
    assert finished == [list(range(2, 52))]
