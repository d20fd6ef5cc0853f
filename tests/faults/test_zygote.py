# SPDX-License-Identifier: Apache-2.0
"""Row 40b: the zygote dies or stands still; its stubs serve on and those that die come back."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from actorserve.errors import Unavailable
from tests.faults.harness import Harness, stub_pids, write_model


async def until_next_zygote(harness: Harness, pid: int) -> None:
    """Wait for a zygote that is not `pid`."""
    await harness.until(lambda: harness.zygote_pid not in (0, pid))


def test_row_40b_a_dead_zygote_is_replaced_and_costs_nothing(serve, repository):
    """SIGKILL while serving: the same stubs answer all along, nothing is counted against them."""
    write_model(repository, "model", count=2)

    async def test(harness: Harness) -> None:
        before = stub_pids()
        zygote = harness.zygote_pid
        os.kill(zygote, signal.SIGKILL)
        answers = 0
        while harness.zygote_pid in (0, zygote) or not answers:
            assert await harness.outcome("model", [1.0]) == [1.0]
            answers += 1
        assert stub_pids() == before
        assert harness.server.is_ready()
        assert all(each.restarts == 0 for each in harness.instances("model"))
        pid = harness.kill("model")
        await harness.until_restarted("model", pid)

    serve(test)


@pytest.mark.parametrize("order", ["zygote first", "stub first"])
def test_row_40b_a_stub_that_dies_with_its_zygote_comes_back(serve, repository, order):
    """Both SIGKILLed: a new zygote and a new stub within seconds; one restart is counted."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        pid, zygote = harness.instance("model").pid, harness.zygote_pid
        for each in (zygote, pid) if order == "zygote first" else (pid, zygote):
            os.kill(each, signal.SIGKILL)
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert harness.instance("model").restarts == 1
        assert harness.zygote_pid not in (0, zygote)

    serve(test)


def test_row_40b_a_request_at_a_stub_that_dies_without_a_zygote_gets_its_error(
    serve, repository, tmp_path
):
    """Where nobody can tell the exit status, the request still ends, and soon."""
    body = f"""
class TritonPythonModel:
    def execute(self, requests):
        if tensors(requests)[0][0] < 0:
            open({str(tmp_path / "begun")!r}, "w").close()
            threading.Event().wait()
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        task = harness.submit("model", [-1.0])
        await harness.until((tmp_path / "begun").exists)
        pid = harness.instance("model").pid
        os.kill(harness.zygote_pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        error = await asyncio.wait_for(task, 5)
        assert isinstance(error, Unavailable)
        assert "model_0_0" in error.message
        await harness.until_restarted("model", pid)

    serve(test)


def test_row_40b_a_zygote_that_stands_still_is_replaced_when_it_is_needed(serve, repository):
    """SIGSTOP: stubs serve, and a stub that dies meanwhile comes back by a new zygote."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        pid, zygote = harness.instance("model").pid, harness.zygote_pid
        os.kill(zygote, signal.SIGSTOP)
        assert await harness.outcome("model", [1.0]) == [1.0]
        os.kill(pid, signal.SIGKILL)
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert harness.instance("model").restarts == 1
        assert harness.zygote_pid not in (0, zygote)

    serve(test)


def test_row_40b_a_server_stops_although_its_zygote_stands_still(serve, repository):
    """SIGSTOP of the zygote before `stop`: it ends in order and soon (the fixture looks)."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        await harness.outcome("model", [1.0])
        os.kill(harness.zygote_pid, signal.SIGSTOP)

    serve(test)


def test_row_40b_a_model_loads_while_the_zygote_dies(serve, repository):
    """SIGKILL of each new zygote during a load: it loads with the next one."""
    write_model(repository, "model", count=3)

    async def test(harness: Harness) -> None:
        zygote = harness.zygote_pid
        loading = asyncio.ensure_future(harness.server.load("model"))
        await asyncio.sleep(0)
        os.kill(zygote, signal.SIGKILL)
        await until_next_zygote(harness, zygote)
        await loading
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test, model_control_mode="explicit", load_model=("bystander",))


def test_row_40b_zygotes_that_die_with_every_use_are_tried_again(serve, repository):
    """Each zygote is killed as soon as it is up, five times; then the stub comes back."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        zygote = harness.zygote_pid
        os.kill(zygote, signal.SIGSTOP)  # so that the first one cannot make the stub either
        os.kill(pid, signal.SIGKILL)
        for _ in range(5):
            os.kill(zygote, signal.SIGKILL)
            await until_next_zygote(harness, zygote)
            zygote = harness.zygote_pid
        await harness.until_restarted("model", pid, 20)
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


def test_row_40b_zygote_and_stubs_die_fifty_times_under_load(serve, repository):
    """Both at once, in whatever state they are: each request has one outcome and its own data."""
    write_model(repository, "model", count=2)

    async def test(harness: Harness) -> None:
        is_over = False
        outcomes: list[object] = []

        async def client(number: int) -> None:
            turn = 0
            while not is_over:
                turn += 1
                x = np.full(3000, number * 10_000 + turn, np.float32)
                got = await harness.outcome("model", x)
                outcomes.append(got if isinstance(got, Unavailable) else got == x.tolist())

        def blow() -> None:
            keeper = harness.server._node.spawner._keeper
            running = [each for each in harness.instances("model") if each.state == "RUNNING"]
            pids = [each.pid for each in running]
            if keeper.link is not None:
                pids.append(keeper.link.pid)
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

        clients = [asyncio.ensure_future(client(number)) for number in range(4)]
        for _ in range(5):
            for _ in range(10):
                blow()
                await harness.holds(lambda: True, 0.02)
            await harness.until(harness.server.is_ready, 20)
            answers = outcomes.count(True)
            await harness.until(lambda answers=answers: outcomes.count(True) > answers + 10)
        is_over = True
        await asyncio.gather(*clients)
        assert all(each is True or isinstance(each, Unavailable) for each in outcomes)

    serve(test)
