# SPDX-License-Identifier: Apache-2.0
"""What a stub costs while nobody asks it anything: memory, CPU, threads of the supervisor."""

from __future__ import annotations

import statistics
import time

import psutil

from benchmarks import http_load, repository, server, usage
from benchmarks.sampling import OURS, Effort, Findings
from benchmarks.server import Server

MANY_INSTANCES = 8
IDLE_INSTANCES = 4
SETTLE_S = 2.0
IDLE_S = 5.0
MIB = 1 << 20


def footprint(effort: Effort) -> Findings:
    """Look at servers with 1, 8 and 4 instances that have answered a few requests."""
    findings = Findings()
    for _ in range(effort.pick(1, 2)):
        _look_at_many(findings)
    _look_at_idle(findings, effort)
    return findings


def _look_at_many(findings: Findings) -> None:
    with server.actorserve(repository.of_instances(1)) as served:
        _ask(served)
        alone = psutil.Process(served.pid)
        threads_with_1, uss_with_1 = alone.num_threads(), alone.memory_full_info().uss
    with server.actorserve(repository.of_instances(MANY_INSTANCES)) as served:
        _ask(served)
        many = psutil.Process(served.pid)
        findings.add("threads", OURS, many.num_threads())
        findings.add("threads", "with 1 instance", threads_with_1)
        memory = [psutil.Process(pid).memory_full_info() for pid in _stubs(served)]
        findings.add("memory-stub", OURS, statistics.median(each.uss for each in memory) / MIB)
        shared = statistics.median(each.pss for each in memory) / MIB
        findings.add("memory-stub", "its PSS, shared pages by share", shared)
        growth = (many.memory_full_info().uss - uss_with_1) / (MANY_INSTANCES - 1) / MIB
        findings.add("memory-stub", "supervisor's growth for it", growth)


def _look_at_idle(findings: Findings, effort: Effort) -> None:
    """Measure the CPU of everything that belongs to the server while nothing happens."""
    with server.actorserve(repository.of_instances(IDLE_INSTANCES)) as served:
        _ask(served)
        time.sleep(SETTLE_S)
        for _ in range(effort.pick(1, 2)):
            used = _used_percent(usage.tree_of(served.pid))
            findings.add("idle-cpu", OURS, sum(used.values()))
            findings.add("idle-cpu", "of it the supervisor", used[served.pid])


def _used_percent(pids: list[int]) -> dict[int, float]:
    """Return how much of one core each process uses while we sleep."""
    before_s = {pid: usage.cpu_s(pid) for pid in pids}
    start_s = time.monotonic()
    time.sleep(IDLE_S)
    elapsed_s = time.monotonic() - start_s
    return {pid: (usage.cpu_s(pid) - before_s[pid]) / elapsed_s * 100 for pid in pids}


def _ask(served: Server) -> None:
    """Let every stub answer a few requests."""
    http_load.load(served.port, http_load.identity_v2(4), 2 * MANY_INSTANCES, 1.0)


def _stubs(served: Server) -> list[int]:
    """Return the pids of the stubs: the zygote's children."""
    children = psutil.Process(served.pid).children()
    return [stub.pid for zygote in children for stub in zygote.children()]
