# SPDX-License-Identifier: Apache-2.0
"""Inference over HTTP: the server as its users start it, the load from another process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from benchmarks import http_load, server
from benchmarks.http_load import Post
from benchmarks.sampling import (
    OURS,
    Contender,
    Effort,
    Figures,
    Findings,
    reason_of,
    take_turns,
)
from benchmarks.server import Server

MODELS = Path(__file__).with_name("models")
CLIENTS = 8
WARM_UP_S = 1.0


SMALL = ("http-4b-8", "http-4b-p99", "http-4b-cpu")


def small(effort: Effort) -> Findings:
    """Measure requests of 4 bytes, ours and mosec's."""
    findings = Findings()
    seconds = 1.0 if effort.is_quick else 3.0
    with contextlib.ExitStack() as stack:
        contenders = []
        for label, (start, post) in _servers(4).items():
            if effort.is_alone and label != OURS:
                continue
            try:
                served = stack.enter_context(start())
                http_load.load(served.port, post, CLIENTS, WARM_UP_S)
            except Exception as error:
                findings.lack(SMALL, label, reason_of(error))
                continue
            contenders.append(Contender(label, SMALL, partial(_small_turn, served, post, seconds)))
        take_turns(findings, contenders, effort)
    return findings


def _servers(
    nbytes: int,
) -> dict[str, tuple[Callable[[], AbstractContextManager[Server]], Post]]:
    return {
        OURS: (partial(server.actorserve, MODELS), http_load.identity_v2(nbytes)),
        "mosec": (server.mosec, http_load.identity_raw(nbytes)),
    }


def _small_turn(served: Server, post: Post, seconds: float) -> Figures:
    before_s = served.cpu_s()
    outcome = http_load.load(served.port, post, CLIENTS, seconds)
    return {
        "http-4b-8": outcome.per_s,
        "http-4b-p99": outcome.p99_us,
        "http-4b-cpu": (served.cpu_s() - before_s) / outcome.requests * 1e6,
    }


def large(effort: Effort) -> Findings:
    """Measure requests of 1 MiB and 16 MiB."""
    findings = Findings()
    seconds = 1.0 if effort.is_quick else 2.5
    with server.actorserve(MODELS) as served:
        contenders = [
            Contender(OURS, (row,), partial(_large_turn, served, row, nbytes, seconds))
            for row, nbytes in (("http-1m-8", 1 << 20), ("http-16m-8", 16 << 20))
        ]
        take_turns(findings, contenders, effort)
    return findings


def _large_turn(served: Server, row: str, nbytes: int, seconds: float) -> Figures:
    post = http_load.identity_v2(nbytes)
    return {row: http_load.load(served.port, post, CLIENTS, seconds).per_s}
