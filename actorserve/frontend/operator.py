# SPDX-License-Identifier: Apache-2.0
"""What an operator asks a running server for: `actorserve status`. Standard library HTTP only."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from pathlib import Path

import msgspec

from actorserve.actors.instance import InstanceStats
from actorserve.actors.model_version import VersionStats
from actorserve.actors.supervisor import SupervisorStats
from actorserve.errors import ConfigError, Unavailable
from actorserve.frontend.colour import is_coloured, painted
from actorserve.frontend.probe import host_and_port, reason_of
from actorserve.frontend.screen import Screen
from actorserve.frontend.table import aligned, cut

PATH = "/v2/actorserve/status"
HEADINGS = ("INSTANCE", "STATE", "PID", "RESTARTS", "BATCHES", "QUEUED", "OK", "FAILED", "REASON")


def read_token(name: str) -> str:
    """Return the operator's token. Raises ConfigError for a file that holds none."""
    if not name:
        return ""
    try:
        token = Path(name).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--admin-token-file '{name}': {reason}") from None
    if not token:
        raise ConfigError(f"--admin-token-file '{name}' is empty")
    return token


def show_status(
    url: str, *, token: str, is_json: bool, watch_s: float | None, timeout_s: float
) -> int:
    """Print where a server stands, again and again with `watch_s`; returns the exit code.

    A watch ends by Ctrl-C, which is no failure: 0. Raises Unavailable where no server answers;
    a watch that has begun says so and goes on.
    """
    screen = Screen(sys.stdout, is_json=is_json)
    if watch_s is None:
        print(_text(_fetch(url, token, timeout_s), is_json=is_json, width=screen.width))
        return 0
    pause = threading.Event()
    try:
        body = _fetch(url, token, timeout_s)
        while True:
            screen.show(_text(body, is_json=is_json, width=screen.width))
            pause.wait(watch_s)
            body = _next(url, token, timeout_s, screen, pause, watch_s)
    except KeyboardInterrupt:
        screen.end()
        return 0


def _next(
    url: str, token: str, timeout_s: float, screen: Screen, pause: threading.Event, watch_s: float
) -> bytes:
    """Fetch until a server answers; a restart is when people look."""
    while True:
        try:
            return _fetch(url, token, timeout_s)
        except Unavailable as error:
            screen.complain(error.message)
            pause.wait(watch_s)


def _text(body: bytes, *, is_json: bool, width: int | None) -> str:
    if is_json:
        return body.decode()
    return status_text(body, is_coloured=is_coloured(sys.stdout), width=width)


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


def status_text(body: bytes, *, is_coloured: bool = False, width: int | None = None) -> str:
    """Return a status document as a table for people.

    Where its lines would be longer than `width`, reasons stand below their rows, cut to it.
    """
    stats = msgspec.json.decode(body, type=SupervisorStats)
    rows: list[tuple[str, ...]] = [HEADINGS]
    notes = []
    for model in stats.models:
        for version in model.versions:
            rows += _version_rows(version)
        if not model.versions:
            rows.append((model.name, model.state, "-", *[""] * 5, _first_line(model.reason)))
        elif model.reason:
            notes.append(f"{model.name}: the last load failed: {_first_line(model.reason)}")
    head = "ready" if stats.is_ready else "not ready"
    if is_coloured:
        head = painted(head)
    memory = "none needed yet"
    arena = stats.exchange.arena
    if arena.segment_bytes:
        memory = f"{arena.used_bytes >> 20} of {arena.segment_bytes >> 20} MiB in use"
    table = _table(rows, is_coloured=is_coloured, width=width)
    return "\n".join([f"{head}; shared memory: {memory}", "", table, *notes])


def _table(rows: list[tuple[str, ...]], *, is_coloured: bool, width: int | None) -> str:
    state_column = 1 if is_coloured else None
    if width is None or max(map(len, aligned(rows).splitlines())) <= width:
        return aligned(rows, state_column=state_column)
    short = aligned([row[:-1] for row in rows], state_column=state_column, width=width)
    lines = []
    for row, line in zip(rows, short.splitlines()):
        lines.append(line)
        if row[-1] and row is not HEADINGS:
            lines.append(cut(f"    {row[-1]}", width))
    return "\n".join(lines)


def _version_rows(version: VersionStats) -> list[tuple[str, ...]]:
    """Return a row for each instance; what is counted for the version stands in the first."""
    scheduler = version.scheduler
    counts = tuple(map(str, (scheduler.queued, scheduler.succeeded, scheduler.failed)))
    rows: list[tuple[str, ...]] = []
    for number, each in enumerate(version.instances):
        rows.append(
            (
                f"{each.name} v{version.version}",
                each.state,
                str(each.pid or "-"),
                str(each.restarts),
                str(each.executed_batches),
                *(counts if number == 0 else ("", "", "")),
                _reason(each),
            )
        )
    return rows


def _reason(instance: InstanceStats) -> str:
    """Say why an instance is down, or how its last process ended where it is up again."""
    is_up = instance.state in ("RUNNING", "STARTING")
    if instance.last_exit and is_up and not instance.reason.startswith("not ready"):
        return f"died {age_text(instance.last_exit_age_s)} ago: {_first_line(instance.last_exit)}"
    return _first_line(instance.reason)


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def age_text(seconds: float) -> str:
    """Return a time span in its largest unit: 4 s, 3 min, 2 h, 5 d."""
    for limit_s, unit_s, unit in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return f"{int(seconds // 86400)} d"
