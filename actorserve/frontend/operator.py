# SPDX-License-Identifier: Apache-2.0
"""What an operator asks a running server for: `actorserve status`. Standard library HTTP only."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from pathlib import Path

import msgspec

from actorserve.actors.check import Finding
from actorserve.actors.supervisor import SupervisorStats
from actorserve.errors import ConfigError, Unavailable
from actorserve.frontend.probe import host_and_port, reason_of
from actorserve.frontend.table import aligned

PATH = "/v2/actorserve/status"
CLEAR = "\x1b[H\x1b[2J"


def read_token(name: str) -> str:
    """Return the operator's token. Raises ConfigError for a file that holds none."""
    if not name:
        return ""
    try:
        token = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--admin-token-file '{name}': {error}") from None
    if not token:
        raise ConfigError(f"--admin-token-file '{name}' is empty")
    return token


def show_status(
    url: str, *, token: str, is_json: bool, watch_s: float | None, timeout_s: float
) -> int:
    """Print where a server stands, again and again with `watch_s`; returns the exit code."""
    pause = threading.Event()
    while True:
        body = _fetch(url, token, timeout_s)
        text = body.decode() if is_json else status_text(body)
        clear = CLEAR if watch_s is not None and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
        if watch_s is None:
            return 0
        try:
            pause.wait(watch_s)
        except KeyboardInterrupt:
            return 0


def _fetch(url: str, token: str, timeout_s: float) -> bytes:
    host, port = host_and_port(url)
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", PATH, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no server answers at {url}: {reason_of(error)}") from None
    finally:
        connection.close()
    if response.status != 200:
        try:
            reason = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            reason = f"HTTP status {response.status}"
        raise Unavailable(f"{url}: {reason}")
    return body


def status_text(body: bytes) -> str:
    """Return a status document as tables for people."""
    stats = msgspec.json.decode(body, type=SupervisorStats)
    rows = [("INSTANCE", "STATE", "PID", "RESTARTS", "BATCHES", "QUEUED", "OK", "FAILED", "REASON")]
    for model in stats.models:
        for version in model.versions:
            scheduler = version.scheduler
            for number, each in enumerate(version.instances):
                counts = (scheduler.queued, scheduler.succeeded, scheduler.failed)
                shown = map(str, counts) if number == 0 else ("", "", "")
                reason = "" if each.state == "RUNNING" else each.reason.splitlines()[0]
                rows.append(
                    (
                        f"{each.name} v{version.version}",
                        each.state,
                        str(each.pid or "-"),
                        str(each.restarts),
                        str(each.executed_batches),
                        *shown,
                        reason,
                    )
                )
        if not model.versions:
            reason = model.reason.splitlines()[0] if model.reason else ""
            rows.append((model.name, model.state, "-", "", "", "", "", "", reason))
    arena = stats.exchange.arena
    head = "ready" if stats.is_ready else "not ready"
    memory = "none needed yet"
    if arena.segment_bytes:
        memory = f"{arena.used_bytes >> 20} of {arena.segment_bytes >> 20} MiB in use"
    return f"{head}; shared memory: {memory}\n\n{aligned(rows)}"


def findings_text(findings: list[Finding]) -> str:
    """Return what `check` found as a table, with problems and warnings below."""
    rows = [("MODEL", "VERSIONS", "WOULD LOAD")]
    notes = []
    for each in findings:
        rows.append((each.model, each.versions, "no" if each.problem else "yes"))
        if each.problem:
            notes.append(f"{each.model}: " + each.problem.strip().replace("\n", "\n    "))
        notes += [f"warning: {warning}" for warning in each.warnings]
    if not findings:
        return "There are no models."
    return "\n".join([aligned(rows), *(["", *notes] if notes else [])])
