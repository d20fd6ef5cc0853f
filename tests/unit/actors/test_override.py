# SPDX-License-Identifier: Apache-2.0
"""What comes with a load request: what is refused, and that nothing of it stays on disk."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile

import pytest

from actorserve.actors.override import PREFIX, PrivateFolders, read_override, sweep
from actorserve.errors import InvalidArgument, ResourceExhausted


@pytest.fixture(autouse=True)
def own_tmp(tmp_path, monkeypatch):
    """Give each test a temporary directory of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_nothing_is_no_override():
    """An empty configuration without files means the repository."""
    assert read_override("m", "", {}) is None


@pytest.mark.parametrize(
    ("config", "files", "reason"),
    [
        ("", {"file:1/model.py": b""}, "files need the model's configuration"),
        ("{", {}, "Invalid config override: "),
        ("[]", {}, "Invalid config override: "),
        ('{"nothing": 1}', {}, "Invalid config override: "),
        ("{}", {"model.py": b""}, "Unrecognized load parameter 'model.py' with type 'BYTES'"),
        ("{}", {"file:": b""}, "expected a relative path"),
        ("{}", {"file:/a": b""}, "expected a relative path"),
        ("{}", {"file:a/": b""}, "expected a relative path"),
        ("{}", {"file:a//b": b""}, "expected a relative path"),
        ("{}", {"file:../a": b""}, "expected a relative path"),
        ("{}", {"file:a/./b": b""}, "expected a relative path"),
        ("{}", {"file:a\0b": b""}, "expected a relative path"),
        ("{}", {"file:" + "a/" * 600 + "b": b""}, "expected a relative path"),
        ("{}", {"file:a": b"", "file:a/b/c": b""}, "is a file and a folder at once"),
    ],
)
def test_bad_requests_are_refused(config, files, reason):
    """Before anything is written."""
    with pytest.raises(InvalidArgument) as caught:
        read_override("m", config, files)
    assert reason in caught.value.message


def test_directories_are_written_and_removed(own_tmp):
    """Each in a folder of its own that nobody else may read; all at the end."""

    async def main() -> None:
        folders = PrivateFolders()
        paths = [await folders.write("m", {"1/a/b": b"x", "c": memoryview(b"y")}) for _ in "12"]
        assert [path.name for path in paths] == ["m", "m"]
        assert paths[0] != paths[1]
        assert (paths[0] / "1" / "a" / "b").read_bytes() == b"x"
        root = paths[0].parent.parent
        assert root.stat().st_mode & 0o777 == 0o700
        await folders.remove(paths[0])
        assert [each.name for each in root.iterdir()] == ["2"]
        assert sweep() == [], "its owner lives"
        await folders.close()
        await folders.close()

    asyncio.run(main())
    assert list(own_tmp.iterdir()) == []


def test_a_disk_that_takes_nothing_is_said(own_tmp):
    """With the model's name and the reason."""

    async def main() -> None:
        folders = PrivateFolders()
        with pytest.raises(ResourceExhausted, match="files of model 'm'.*File name too long"):
            await folders.write("m", {"1/" + "x" * 300: b""})
        await folders.close()

    asyncio.run(main())
    assert list(own_tmp.iterdir()) == []


def test_a_sweep_removes_only_what_nobody_holds(own_tmp):
    """A folder that is locked, a file, a link and other names stay."""
    for name in ("dead", "alive"):
        (own_tmp / (PREFIX + name)).mkdir()
        (own_tmp / (PREFIX + name) / "file").touch()
    (own_tmp / (PREFIX + "file")).touch()
    (own_tmp / "another").mkdir()
    (own_tmp / (PREFIX + "link")).symlink_to(own_tmp / "another")
    fd = os.open(own_tmp / (PREFIX + "alive"), os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert sweep() == [PREFIX + "dead"]
    finally:
        os.close(fd)
    left = sorted(each.name for each in own_tmp.iterdir())
    assert left == sorted(["another", *(PREFIX + name for name in ("alive", "file", "link"))])
