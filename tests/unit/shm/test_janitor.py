# SPDX-License-Identifier: Apache-2.0
"""Tests of the janitor: it removes what nobody holds, and nothing else."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
from pathlib import Path

import pytest

from actorserve.shm import segment
from actorserve.shm.janitor import sweep
from actorserve.shm.segment import Segment


def _leave(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(b"x")
    return path


def test_orphan_is_removed(tmp_path: Path) -> None:
    """A name that nobody holds goes, and is reported."""
    path = _leave(tmp_path, "actorserve-1")
    assert sweep(str(tmp_path)) == ["actorserve-1"]
    assert not path.exists()
    assert sweep(str(tmp_path)) == []


def test_held_segment_stays_until_its_holder_is_killed(tmp_path: Path, fork) -> None:
    """A lock that any living process holds protects the name, whoever made it."""
    path = _leave(tmp_path, "actorserve-1")
    reader, writer = os.pipe()

    def holder() -> None:
        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_SH)
        os.write(writer, b"x")
        signal.pause()

    child = fork(holder)
    os.read(reader, 1)
    assert sweep(str(tmp_path)) == []
    assert path.exists()
    child.kill()
    assert sweep(str(tmp_path)) == ["actorserve-1"]
    os.close(reader)
    os.close(writer)


def test_strangers_are_left_alone(tmp_path: Path) -> None:
    """Other names, links, folders and fifos stay, even with our prefix."""
    _leave(tmp_path, "psm_1234")
    _leave(tmp_path, "target")
    (tmp_path / "actorserve-link").symlink_to(tmp_path / "target")
    (tmp_path / "actorserve-folder").mkdir()
    os.mkfifo(tmp_path / "actorserve-fifo")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert sweep(str(tmp_path)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_name_that_vanishes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two janitors, or a janitor and an owner, may race for the same name."""
    paths = [_leave(tmp_path, f"actorserve-{number}") for number in range(3)]
    real_flock = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        paths[1].unlink(missing_ok=True)
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert sweep(str(tmp_path)) == ["actorserve-0", "actorserve-2"]


def test_name_that_was_given_to_another_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the file whose lock was taken is removed."""
    path = _leave(tmp_path, "actorserve-1")
    real_flock = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        path.rename(tmp_path / "old")
        _leave(tmp_path, "actorserve-1")
        real_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert sweep(str(tmp_path)) == []
    assert path.exists()


def test_missing_folder_has_nothing_to_sweep(tmp_path: Path) -> None:
    """Without /dev/shm there is nothing to do."""
    assert sweep(str(tmp_path / "missing")) == []


def test_other_users_segments_stay(tmp_path: Path, fork) -> None:
    """What may not be opened or unlinked is skipped without an error."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    closed = _leave(tmp_path, "actorserve-closed")
    closed.chmod(0o600)
    readable = _leave(tmp_path, "actorserve-readable")
    readable.chmod(0o644)

    def stranger() -> None:
        os.setresuid(65534, 65534, 65534)
        assert sweep(str(tmp_path)) == []

    assert fork(stranger).wait() == 0
    assert closed.exists()
    assert readable.exists()


def test_creator_killed_with_its_name_in_place_leaves_work_for_the_janitor(fork) -> None:
    """Row 51: a kill between create and unlink leaves a name, which the next start removes."""
    name = segment.NAME_PREFIX + secrets.token_hex(12)

    def creator() -> None:
        segment._NamedMemory(name, 4096)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(fork(creator).wait()) == signal.SIGKILL
    assert name in sweep()


def test_creator_whose_name_was_swept_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A janitor that comes between open and lock takes the name, which is not needed."""
    monkeypatch.setattr(segment, "_chosen", "shm")
    real_dup = os.dup

    def dup(fd: int) -> int:
        assert len(sweep()) == 1
        return real_dup(fd)

    monkeypatch.setattr(os, "dup", dup)
    made = Segment.create(1)
    made.buffer[0] = 1
    made.close()


def test_creators_killed_at_random_moments_leave_nothing_after_a_sweep(
    fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is killed whenever, one sweep cleans up."""
    monkeypatch.setattr(segment, "_chosen", "shm")
    reader, writer = os.pipe()

    def creator() -> None:
        os.write(writer, b"x")
        while True:
            Segment.create(1).close()

    for _ in range(20):
        child = fork(creator)
        os.read(reader, 1)
        child.kill()
    sweep()
    assert not list(Path("/dev/shm").glob("actorserve-*"))
    os.close(reader)
    os.close(writer)
