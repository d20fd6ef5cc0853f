# SPDX-License-Identifier: Apache-2.0
"""A supervisor that is killed leaves nobody behind, whatever was going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROGRAM = str(Path(__file__).parent / "supervisor_program.py")


class Supervisor:
    """A process that runs a Spawner."""

    def __init__(self, mode: str) -> None:
        self._process = subprocess.Popen([sys.executable, PROGRAM, mode], stdout=subprocess.PIPE)
        self.pid = self._process.pid
        self.facts: dict = {}
        self.exits: list[str] = []
        while "zygote" not in self.facts:
            facts = json.loads(self._process.stdout.readline())
            self.exits += filter(None, [facts.pop("exit", None)])
            self.facts.update(facts)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._process.stdout.close()

    @property
    def pids(self) -> list[int]:
        return [self.facts["zygote"], *self.facts["children"]]


@pytest.fixture
def supervise(kit):
    """Start supervisors; none of them, nor what they started, outlives the test."""
    started: list[Supervisor] = []

    def start(mode: str) -> Supervisor:
        started.append(Supervisor(mode))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.close()
        for pid in supervisor.pids:
            if not kit.is_gone(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "mode",
    [
        "serving",
        "starting",
        "born",
        "importing",
        "stopped zygote",
        "dead zygote",
        "stopped child",
    ],
)
def test_killed_supervisor_leaves_nobody(kit, supervise, mode):
    """Rows 41, 42: zygote and children are gone at once, in every phase, whoever is stopped."""
    supervisor = supervise(mode)
    assert mode == "dead zygote" or not any(kit.is_gone(pid) for pid in supervisor.pids)
    supervisor.kill()
    kit.wait_gone(*supervisor.pids)


@pytest.mark.parametrize("mode", ["host fork", "late host fork", "raw host fork"])
def test_host_fork_keeps_nobody_alive(kit, supervise, mode):
    """Row 40c: what the host forked before or after the children does not keep them alive."""
    supervisor = supervise(mode)
    supervisor.kill()
    kit.wait_gone(*supervisor.pids)
    assert not kit.is_gone(supervisor.facts["fork"])
    os.kill(supervisor.facts["fork"], signal.SIGKILL)
    kit.wait_gone(supervisor.facts["fork"])


@pytest.mark.parametrize("mode", ["late host fork", "raw host fork"])
def test_end_of_a_host_fork_ends_nobody_else(kit, supervise, mode):
    """Row 63: the fork may end as it likes; the children belong to the supervisor."""
    supervisor = supervise(mode)
    os.kill(supervisor.facts["fork"], signal.SIGTERM)
    kit.wait_gone(supervisor.facts["fork"])
    assert not any(kit.is_gone(pid) for pid in supervisor.pids)
    supervisor.kill()
    kit.wait_gone(*supervisor.pids)


def test_grandchildren_die_with_the_supervisor(kit, supervise):
    """Row 41: what a stub started, in its group, is gone as well."""
    supervisor = supervise("grandchildren")
    line = next(text for text in supervisor.facts["lines"] if text.startswith("grandchildren"))
    kept, escaped = (int(pid) for pid in line.split()[1:])
    supervisor.kill()
    kit.wait_gone(*supervisor.pids, kept)
    os.kill(escaped, signal.SIGKILL)


def test_stopped_supervisor_keeps_its_children(kit, supervise):
    """Row 48: silence is not death."""
    supervisor = supervise("serving")
    os.kill(supervisor.pid, signal.SIGSTOP)
    with pytest.raises(AssertionError, match="still alive"):
        kit.wait_gone(*supervisor.pids, timeout_s=0.3)
    assert not any(kit.is_gone(pid) for pid in supervisor.pids)
    os.kill(supervisor.pid, signal.SIGCONT)


def test_supervisor_that_just_exits_leaves_nobody(kit, supervise):
    """Row 64: an interpreter that ends without stop takes all along, without a word or a wait."""
    supervisor = supervise("serving")
    os.kill(supervisor.pid, signal.SIGINT)
    supervisor._process.wait(timeout=10)
    kit.wait_gone(*supervisor.pids)


def test_stop_signals_while_a_zygote_starts_are_survived(kit, supervise):
    """Row 20: a SIGTERM or SIGINT to everybody hits no zygote that has no handler yet."""
    supervisor = supervise("starting")
    zygote = supervisor.facts["zygote"]
    os.kill(zygote, signal.SIGTERM)
    os.kill(zygote, signal.SIGINT)
    with pytest.raises(AssertionError, match="still alive"):
        kit.wait_gone(zygote, timeout_s=0.2)


def test_process_one_reaps_what_a_zygote_left(kit, supervise):
    """Row 61: orphans of a dead zygote that fall to the supervisor are reaped, status known."""
    supervisor = supervise("subreaper")
    assert supervisor.exits == ["killed by SIGSEGV"] * 2
    assert not any(psutil.pid_exists(pid) for pid in supervisor.facts["children"])
