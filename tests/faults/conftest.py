# SPDX-License-Identifier: Apache-2.0
"""An embedded server to hurt; the row numbers in test names are the fault matrix's."""

from __future__ import annotations

import asyncio
import secrets
import select
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from actorserve import Supervisor
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from tests.faults.harness import TAG, Gate, Harness, marked_processes, write_model
from tests.faults.host import Host
from tests.server.conftest import start_server  # noqa: F401 (a fixture)


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of the long runs."""
    config.addinivalue_line("markers", "chaos: kills at random for minutes; run with `-m chaos`")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long runs out, visibly, unless the expression of -m speaks of them."""
    if "chaos" in (config.option.markexpr or ""):
        return
    long_runs = [item for item in items if item.get_closest_marker("chaos")]
    if long_runs:
        config.hook.pytest_deselected(items=long_runs)
        items[:] = [item for item in items if item not in long_runs]


@pytest.fixture(autouse=True)
def nothing_lives_on(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a process, also one that has lost its parents on the way."""
    monkeypatch.setenv(TAG, secrets.token_hex(8))
    yield
    deadline_s = monotonic_s() + 5
    while left := marked_processes():
        assert monotonic_s() < deadline_s, f"left behind: {left}"
        select.select([], [], [], 0.005)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with a bystander that has to serve whatever happens to the others."""
    path = tmp_path / "repository"
    path.mkdir()
    write_model(path, "bystander")
    return path


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that grows by a byte with each `note()` of a model."""
    path = tmp_path / "notes"
    path.touch()
    monkeypatch.setenv("NOTES", str(path))
    return path


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Return the gate of this test's models."""
    return Gate(tmp_path, monkeypatch)


@pytest.fixture
def embed(repository: Path, tmp_path: Path) -> Iterator[Callable[..., Host]]:
    """Return `embed(program, prefix=())`: start a process that embeds a server, see HOST_HEAD."""
    hosts: list[Host] = []

    def start(program: str, prefix: Sequence[str] = ()) -> Host:
        folder = tmp_path / f"host-{len(hosts)}"
        folder.mkdir()
        hosts.append(Host(folder, repository, program, prefix))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Callable[..., None]:
    """Return `serve(test, **settings)`: run `test(server)` against an embedded server.

    After the test a good request has to succeed, nothing of the arena may be in use, and the
    server has to end in order.
    """

    def run(test: Callable[[Harness], Awaitable[None]], **settings: Any) -> None:
        settings.setdefault("restart_backoff_s", (0.0, 0.0))
        settings.setdefault("crash_dir", str(tmp_path / "crashes"))

        async def main() -> None:
            server = Supervisor(repository, Settings(**settings))
            await server.start()
            try:
                harness = Harness(server)
                await test(harness)
                await harness.infer("bystander", [1.0])
                await harness.until(lambda: server.stats().exchange.held_blocks == 0)
                assert server.stats().exchange.arena.used_bytes == 0
                assert server.stats().exchange.live_views == 0
                assert server.is_live()
            finally:
                await asyncio.wait_for(server.stop(grace_s=5), 20)

        asyncio.run(main())

    return run
