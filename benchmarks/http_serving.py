# SPDX-License-Identifier: Apache-2.0
"""Inference over HTTP: the server as its users start it, the load from another process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
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


def small(effort: Effort) -> Findings:
    """Measure requests of 4 bytes, ours and mosec's."""
    findings = Findings()
    rows = ("http-4b-8", "http-4b-p99", "http-4b-cpu")
    seconds = 1.0 if effort.is_quick else 3.0

    def turn(served: Server, post: Post) -> Figures:
        before_s = served.cpu_s()
        outcome = http_load.load(served.port, post, CLIENTS, seconds)
        return {
            "http-4b-8": outcome.per_s,
            "http-4b-p99": outcome.p99_us,
            "http-4b-cpu": (served.cpu_s() - before_s) / outcome.requests * 1e6,
        }

    with contextlib.ExitStack() as stack:
        contenders = []
        for label, start, post in _contenders(4):
            try:
                served = stack.enter_context(start())
                http_load.load(served.port, post, CLIENTS, WARM_UP_S)
            except Exception as error:
                findings.lack(rows, label, reason_of(error))
                continue
            contenders.append(Contender(label, rows, lambda s=served, p=post: turn(s, p)))
        take_turns(findings, contenders, effort.rounds)
    return findings


def _contenders(
    nbytes: int,
) -> list[tuple[str, Callable[[], AbstractContextManager[Server]], Post]]:
    return [
        (OURS, lambda: server.actorserve(MODELS), http_load.identity_v2(nbytes)),
        ("mosec", server.mosec, http_load.identity_raw(nbytes)),
    ]


def large(effort: Effort) -> Findings:
    """Measure requests of 1 MiB and 16 MiB."""
    findings = Findings()
    seconds = 1.0 if effort.is_quick else 2.5

    def turn(served: Server, row: str, post: Post) -> Figures:
        return {row: http_load.load(served.port, post, CLIENTS, seconds).per_s}

    posts = {"http-1m-8": http_load.identity_v2(1 << 20), "http-16m-8": http_load.identity_v2(16 << 20)}
    with server.actorserve(MODELS) as served:
        contenders = [
            Contender(OURS, (row,), lambda row=row, post=post: turn(served, row, post))
            for row, post in posts.items()
        ]
        take_turns(findings, contenders, effort.rounds)
    return findings
