# SPDX-License-Identifier: Apache-2.0
"""What polling makes of what it sees, and that a file system that hangs holds nothing up."""

from __future__ import annotations

import asyncio
import threading

import pytest

from actorserve.actors import repository_poll
from actorserve.actors.fingerprint import of_version, outside_versions, stamps
from actorserve.actors.repository_poll import RepositoryPoll, due

A, B = {"x": (1, 1, 1, 0)}, {"x": (2, 1, 1, 0)}


@pytest.mark.parametrize(
    ("known", "last", "now", "expected"),
    [
        ({}, {}, {}, ([], [])),
        ({"m": A}, {"m": A}, {"m": A}, ([], [])),
        ({}, {}, {"m": A}, ([], [])),
        ({}, {"m": A}, {"m": B}, ([], [])),
        ({}, {"m": A}, {"m": A}, (["m"], [])),
        ({"m": A}, {"m": A}, {"m": B}, ([], [])),
        ({"m": A}, {"m": B}, {"m": B}, (["m"], [])),
        ({"m": A}, {"m": B}, {"m": A}, ([], [])),
        ({"m": A}, {"m": A}, {}, ([], [])),
        ({"m": A}, {}, {}, ([], ["m"])),
        ({"m": A}, {}, {"m": B}, ([], [])),
        ({"m": None}, {"m": None}, {"m": None}, ([], [])),
        ({"m": A}, {"m": None}, {"m": None}, (["m"], [])),
        ({"m": None}, {"m": A}, {"m": A}, (["m"], [])),
    ],
)
def test_a_change_counts_when_two_looks_have_seen_it(known, last, now, expected):
    """Added, changed, changed back, deleted, and models with a problem."""
    assert due(known, last, now) == expected


class HangingRepository:
    """A repository whose disk does not answer before `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.looks = 0

    def look(self):
        """Return nothing, late."""
        self.looks += 1
        self.go.wait()
        return {"m": A}


class Loads:
    """Note what is to be loaded."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def begin(self, name: str) -> None:
        """Note a load."""
        self.begun.append(name)


def test_a_disk_that_hangs_is_looked_at_once(monkeypatch):
    """The loop turns, no second thread waits for it, and all is well when it answers."""
    monkeypatch.setattr(repository_poll, "SLOW_LOOK_S", 0.02)
    repository, loads = HangingRepository(), Loads()
    poll = RepositoryPoll(repository, loads, 0.01)  # type: ignore[arg-type]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(poll.run())
        await asyncio.wait([task], timeout=0.3)
        assert repository.looks == 1
        repository.go.set()
        while not loads.begun:
            await asyncio.wait([task], timeout=0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 20))
    assert loads.begun == ["m"]


def test_a_stop_does_not_wait_for_a_disk_that_hangs():
    """Neither does the end of the loop."""
    repository = HangingRepository()
    poll = RepositoryPoll(repository, Loads(), 0.01)  # type: ignore[arg-type]

    async def main() -> None:
        task = asyncio.get_running_loop().create_task(poll.run())
        await asyncio.wait([task], timeout=0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert repository.looks == 1
    repository.go.set()


def test_stamps_tell_what_belongs_to_a_version(tmp_path):
    """Files in any depth; a loop of links ends; a folder that is missing is an error."""
    (tmp_path / "1" / "data").mkdir(parents=True)
    (tmp_path / "1" / "data" / "weights").write_text("w")
    (tmp_path / "1" / "__pycache__").mkdir()
    (tmp_path / "1" / "__pycache__" / "x.pyc").write_text("x")
    (tmp_path / "1" / "again").symlink_to(tmp_path)
    (tmp_path / "labels.txt").write_text("a")
    (tmp_path / "config.pbtxt").write_text("a")
    (tmp_path / "broken").symlink_to("nowhere")
    found = stamps(tmp_path, checked="config.pbtxt")
    assert sorted(found) == ["1/data/weights", "config.pbtxt", "labels.txt"]
    assert [name for name, _ in of_version(found, 1)] == ["1/data/weights"]
    assert [name for name, _ in outside_versions(found, config="config.pbtxt")] == ["labels.txt"]
    assert found["config.pbtxt"][3] != 0
    with pytest.raises(OSError, match="No such file"):
        stamps(tmp_path / "missing")
