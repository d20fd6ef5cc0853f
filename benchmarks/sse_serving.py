# SPDX-License-Identifier: Apache-2.0
"""Streams over HTTP: server-sent events of a decoupled model, counted in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks import server
from benchmarks.sampling import (
    OURS,
    CannotRun,
    Contender,
    Effort,
    Figures,
    Findings,
    take_turns,
)
from benchmarks.server import Server

MODELS = Path(__file__).with_name("stream_models")
PATH = "/v2/models/count/generate_stream"
EVENTS_A_STREAM = 10_000


def streams(effort: Effort) -> Findings:
    """Measure events per second of 1 stream and of 64."""
    findings = Findings()
    with server.actorserve(MODELS) as served:
        contenders = [
            Contender(OURS, (f"sse-{count}",), partial(_turn, served, count, effort))
            for count in (1, 64)
        ]
        take_turns(findings, contenders, effort)
    return findings


def _turn(served: Server, count: int, effort: Effort) -> Figures:
    seconds = 1.0 if effort.is_quick else 3.0
    body = json.dumps({"COUNT": EVENTS_A_STREAM})
    command = [sys.executable, "-m", "benchmarks.sse_client", str(served.port), PATH, body]
    done = subprocess.run(
        [*command, str(count), str(seconds)],
        check=False,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    if done.returncode:
        raise CannotRun(f"the client of the streams: {done.stderr.strip()[-200:]}")
    found = json.loads(done.stdout)
    return {f"sse-{count}": found["events"] / found["seconds"]}
