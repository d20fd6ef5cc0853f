# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, hang or do not start: one error for everybody, at once, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorserve.clock import monotonic_s
from actorserve.errors import EngineDeadError
from actorserve.state.restart import Restart
from tests.generation.groups import PATIENCE_S, Group, at_home, journal, run_group

AT_ONCE_S = 0.5
RUDE_MODULE = "tests.generation.rude_rank"
TRAP = Restart(first_s=0.0, base_s=0.0, max_s=0.0, deaths_before_ready=3)


@pytest.fixture(scope="module", autouse=True)
def home() -> Iterator[None]:
    """Have one loop for the whole file."""
    with at_home():
        yield


async def died(group: Group) -> EngineDeadError:
    """Wait for the first death; return its error."""
    await group.until(lambda: group.deaths)
    return group.deaths[0][0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("all_reduce", [False, True])
def test_c8_any_rank_s_death_is_the_group_s(size: int, is_last: bool, all_reduce: bool):
    """C8: killed amid a stream, rank 0 or another, everybody hears of it in half a second."""
    rank = size - 1 if is_last else 0

    async def test(group: Group) -> None:
        group.submit(1, 1, 1_000_000)
        await group.until(lambda: 1 in group.outputs)
        began_s = monotonic_s()
        pid = group.kill(rank)
        error = await died(group)
        assert monotonic_s() - began_s < AT_ONCE_S
        assert (error.rank, error.pid) == (rank, pid)
        assert "killed by SIGKILL" in error.reason
        assert f"rank {rank}" in str(error)
        assert str(pid) in str(error)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            group.submit(2, 1, 1)
        assert [last for _, last in group.deaths] == [True]

    run_group(test, size=size, options={"all_reduce": all_reduce})


def test_c8_death_while_idle():
    """C8: a follower that sleeps is missed as soon."""

    async def test(group: Group) -> None:
        began_s = monotonic_s()
        group.kill(1)
        assert (await died(group)).rank == 1
        assert monotonic_s() - began_s < AT_ONCE_S

    run_group(test)


@pytest.mark.parametrize("rank", [0, 1])
def test_c8_death_while_loading(rank: int):
    """C8: killed at load, the start fails with the rank's name, and the others end."""

    async def test(group: Group) -> None:
        starting = asyncio.ensure_future(group.group.start())
        await asyncio.wait([starting], timeout=0.05)
        while None in group.group.pids or not group.group.pids:
            await asyncio.wait([starting], timeout=0.05)
        began_s = monotonic_s()
        pid = group.kill(rank)
        with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
            await starting
        assert monotonic_s() - began_s < 3  # with the end of the other, which hangs in its load
        assert (caught.value.rank, caught.value.pid) == (rank, pid)

    run_group(test, is_started=False, options={"hang_load": 1})


@pytest.mark.parametrize("point", ["spawn.entering", "rank.loading", "rank.loaded"])
@pytest.mark.parametrize(("action", "reason"), [("kill", "SIGKILL"), ("exit0", "code 0")])
def test_c8_death_at_each_point_of_a_start(point: str, action: str, reason: str):
    """C8: wherever in its start a rank dies, somebody is told why."""

    async def test(group: Group) -> None:
        with contextlib.suppress(EngineDeadError):
            await group.group.start()
            await died(group)
        assert group.group.error is not None
        assert reason in group.group.error.reason

    run_group(test, is_started=False, env={"ACTORSERVE_FAULT": f"{point}:{action}"})


@pytest.mark.parametrize("rank", [0, 1])
def test_c8_death_at_shutdown(rank: int):
    """C8: killed while it closes its engine, the close ends in time and leaves nothing."""

    async def test(group: Group) -> None:
        closing = asyncio.ensure_future(group.group.close())
        await asyncio.wait([closing], timeout=0.2)
        group.kill(rank)
        began_s = monotonic_s()
        await closing
        assert monotonic_s() - began_s < 5

    run_group(test, options={"close_s": 20.0})


def test_c11_a_close_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch):
    """C11: engines that do not close are killed; closing twice is once."""
    monkeypatch.setattr("actorserve.actors.generation.group.CLOSE_S", 0.3)

    async def test(group: Group) -> None:
        began_s = monotonic_s()
        await asyncio.gather(group.group.close(), group.group.close(drain_s=50))
        assert monotonic_s() - began_s < 5
        await group.group.close()

    run_group(test, options={"close_s": 50.0})


# --- engines that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_c10_a_load_that_fails_shows_the_rank_s_traceback(rank: int):
    """C10: the rank, its process, the error and where it was raised; the others end."""

    async def test(group: Group) -> None:
        began_s = monotonic_s()
        with pytest.raises(EngineDeadError) as caught:
            await group.group.start()
        assert monotonic_s() - began_s < 5
        error = caught.value
        assert error.rank == rank
        assert error.pid is not None
        assert f"RuntimeError: no weights on rank {rank}" in error.reason
        assert "in start" in error.traceback
        assert "rank_engines.py" in str(error)

    run_group(test, is_started=False, options={"fail_load": rank}, restart=TRAP)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [("NoStart", "this engine exits"), ("nothing.like_it:Engine", "nothing")],
)
def test_c10_an_engine_that_cannot_be_made_is_a_reason(engine: str, reason: str):
    """C10: also one that exits, and one that does not exist."""

    async def test(group: Group) -> None:
        with pytest.raises(EngineDeadError, match=reason):
            await group.group.start()

    run_group(test, engine, is_started=False)


def test_c10_a_load_that_takes_too_long_fails_in_time():
    """C10: the error names the rank that is late and the time it had."""

    async def test(group: Group) -> None:
        began_s = monotonic_s()
        with pytest.raises(EngineDeadError, match=r"not loaded within 0.5 s \(ranks: 1\)"):
            await group.group.start()
        assert monotonic_s() - began_s < 5

    run_group(test, is_started=False, options={"hang_load": 1}, load_timeout_s=0.5)


def test_a_start_that_is_cancelled_leaves_nothing():
    """Whoever gives up while ranks load gets rid of them."""

    async def test(group: Group) -> None:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(group.group.start(), 0.3)

    run_group(test, is_started=False, options={"hang_load": 0})


@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_that_raises_is_dead_with_its_traceback(rank: int):
    """What no request is to blame for ends the group: everybody hears the error itself."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 100)
        error = await died(group)
        assert error.rank == rank
        assert f"RuntimeError: rank {rank} ran out of luck" in error.reason
        assert "in poll" in error.traceback

    run_group(test, options={"fail_poll": rank, "all_reduce": True})


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("rude", "reason"),
    [
        ("garbage", "broke the wire"),
        ("arrays", "broke the wire"),
        ("pieces", "broke the wire"),
        ("handle", "broke the wire"),
        ("hello", "broke the wire"),
        ("hang up", "killed by SIGKILL|exited with code"),
        ("leave", "exited with code 0"),
    ],
)
def test_a_rank_that_breaks_the_rules_is_dead(
    monkeypatch: pytest.MonkeyPatch, rude: str, reason: str, rank: int
):
    """Whatever it sends: an error that names it, and no harm to the parent."""
    monkeypatch.setattr("actorserve.actors.generation.group_life.RANK_MODULE", RUDE_MODULE)

    async def test(group: Group) -> None:
        group.submit(1, 1, 1)
        error = await died(group)
        assert error.rank == rank
        assert re.search(reason, error.reason)

    run_group(test, options={"rude": rude, "rank": rank})


# --- ranks that stand still -----------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_hangs_in_a_step_is_to_blame(rank: int):
    """All wait for it in a collective; the error names it and not those who wait."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 100)
        began_s = monotonic_s()
        error = await died(group)
        assert 0.4 < monotonic_s() - began_s < 5
        assert error.rank == rank
        assert "stands still" in error.reason

    run_group(test, size=3, options={"hang_poll": rank, "all_reduce": True}, hang_timeout_s=0.5)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_stopped_rank_is_a_dead_one(is_idle: bool):
    """SIGSTOP to a follower, busy or not: the group does not wait for it for ever."""

    async def test(group: Group) -> None:
        if not is_idle:
            group.submit(1, 1, 1_000_000)
            await group.until(lambda: 1 in group.outputs)
        group.kill(1, signal.SIGSTOP)
        error = await died(group)
        assert error.rank == 1
        assert "stopped" in error.reason or "stands still" in error.reason

    run_group(test, hang_timeout_s=0.5)


def test_a_slow_follower_is_not_a_dead_one():
    """Steps that take their time are no stall as long as they go on."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 12)
        await group.final(1)
        assert group.deaths == []

    run_group(test, options={"poll_s": 0.15}, hang_timeout_s=1.0)


# --- another life ---------------------------------------------------------------------------------


def test_a_group_is_restarted_with_another_epoch():
    """Everything of the old life has failed; the new one has new processes and works."""

    async def test(group: Group) -> None:
        group.submit(1, 1, 1_000_000)
        await group.until(lambda: 1 in group.outputs)
        for life in (2, 3):
            before = group.group.pids
            group.kill(life % 2)
            await group.until(lambda life=life: len(group.lives) == life - 1)
            assert group.lives[-1][1] == life
            assert not set(before) & set(group.group.pids)
            assert [last for _, last in group.deaths] == [False] * (life - 1)
            group.submit(10 * life, 5, 3)
            await group.final(10 * life)
            assert group.tokens(10 * life) == [6, 7, 8]
        assert group.group.stats().epoch == 3
        assert group.group.stats().deaths == 2

    run_group(test, options={"all_reduce": True}, restart=TRAP)


def test_a_group_that_cannot_come_back_is_dead_for_good(tmp_path: Path):
    """An engine that does not load again ends the restarts: with its own error."""

    async def test(group: Group) -> None:
        (tmp_path / "gone").touch()
        group.kill(0)
        await group.until(lambda: group.deaths and group.deaths[-1][1])
        assert "no weights any more" in group.deaths[-1][0].reason
        assert group.lives == []
        with pytest.raises(EngineDeadError, match="no weights any more"):
            group.submit(1, 1, 1)

    run_group(test, "Once", options={"journal": str(tmp_path)}, restart=TRAP)


def test_closing_during_a_restart_ends_it():
    """A group that waits for its next life closes at once."""

    async def test(group: Group) -> None:
        group.kill(0)
        await died(group)
        began_s = monotonic_s()
        await group.group.close()
        assert monotonic_s() - began_s < 5
        assert group.group.stats().state == "closed"

    run_group(test, restart=Restart(first_s=30.0))


# --- the parent -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["run", "hang"])
def test_c9_no_rank_outlives_its_parent(what: str):
    """C9: SIGKILL to the parent; all ranks are gone in half a second, whatever they do."""
    program = [sys.executable, "-m", "tests.generation.orphan_host", what]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert select.select([host.stdout], [], [], PATIENCE_S)[0]
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2
        fds = [os.pidfd_open(pid) for pid in pids]
        host.kill()
        deadline_s = monotonic_s() + AT_ONCE_S
        for fd in fds:
            assert select.select([fd], [], [], max(0.0, deadline_s - monotonic_s()))[0]
            os.close(fd)


def test_followers_of_a_dead_group_close_their_engines(tmp_path: Path):
    """A rank that is well when another dies has a second to let go of what it holds."""

    async def test(group: Group) -> None:
        group.kill(0)
        await died(group)

    run_group(test, options={"journal": str(tmp_path)})
    assert journal(tmp_path, 1)[-1] == "close"
