# SPDX-License-Identifier: Apache-2.0
"""Archives are unpacked as they were packed, and nothing of them lands outside their folder."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorserve.process import archive
from actorserve.process.archive import ArchiveError, is_archive, unpack

COMPRESSIONS = {".tar": "", ".tar.gz": "gz", ".tgz": "gz", ".tar.bz2": "bz2", ".tar.xz": "xz"}


def member(name: str, kind: bytes = tarfile.REGTYPE, **rest: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of an archive with its content, which `content` gives."""
    content: bytes = rest.pop("content", b"")
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(content)
    for attribute, value in rest.items():
        setattr(info, attribute, value)
    return info, content


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    """Return a link, symbolic unless another kind is asked for."""
    return member(name, kind, linkname=target)


def hard(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    """Return a hard link."""
    return link(name, target, tarfile.LNKTYPE)


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    """Return a folder."""
    return member(name, tarfile.DIRTYPE, mode=0o700)


def packed(*members: tuple[tarfile.TarInfo, bytes], compression: str = "") -> bytes:
    """Return an archive."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{compression}") as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return an empty folder beside which nothing may appear."""
    path = tmp_path / "around" / "target"
    path.mkdir(parents=True)
    return path


@pytest.fixture(params=["own check alone", "with Python's"])
def checks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with and without Python's own filter: old patch levels have none."""
    if request.param == "own check alone":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no filter")


@pytest.mark.parametrize(("suffix", "compression"), COMPRESSIONS.items())
def test_every_compression_is_unpacked(
    target: Path, tmp_path: Path, suffix: str, compression: str
) -> None:
    """What is inside tells how it is packed, whatever it is called."""
    file = tmp_path / f"env{suffix}"
    file.write_bytes(packed(member("./bin/tool", content=b"x" * 5000), compression=compression))
    assert is_archive(file)
    with file.open("rb") as stream:
        assert unpack(stream, target) == 1
    assert (target / "bin" / "tool").read_bytes() == b"x" * 5000


def test_members_keep_content_time_and_mode(target: Path) -> None:
    """Times, because compiled modules are checked against them; special and open bits go."""
    count = unpack(
        io.BytesIO(
            packed(
                folder("."),
                folder("lib"),
                member("lib/a", content=b"a", mode=0o644, mtime=1_000_000_000, uid=12345),
                member("bin/tool", content=b"t", mode=0o6777),
                member("lib/closed", mode=0o000),
            )
        ),
        target,
    )
    assert count == 5
    assert (target / "lib" / "a").stat().st_mtime == 1_000_000_000
    assert (target / "lib" / "a").stat().st_uid == os.getuid()
    modes = [(target / name).stat().st_mode & 0o7777 for name in ("lib/a", "bin/tool")]
    assert modes == [0o644, 0o755]
    assert (target / "lib" / "closed").stat().st_mode & 0o7777 == 0o600


@pytest.mark.usefixtures("checks")
def test_links_inside_are_kept(target: Path) -> None:
    """Relative links to files and folders, up and down and by way of others, and hard links."""
    unpack(
        io.BytesIO(
            packed(
                link("lib64", "lib"),
                member("lib/deep/er/a", content=b"a"),
                link("lib/b", "deep/er/a"),
                link("lib/deep/up", "../../lib64/deep/er/a"),
                hard("lib/same", "./lib/deep/er/a"),
                link("nowhere", "missing"),
                link("round", "round"),
            )
        ),
        target,
    )
    for name in ("lib64/b", "lib/b", "lib/deep/up", "lib/same"):
        assert (target / name).read_bytes() == b"a"
    assert (target / "lib64").readlink() == Path("lib")
    assert (target / "lib" / "same").samefile(target / "lib" / "deep" / "er" / "a")
    assert (target / "nowhere").is_symlink()


@pytest.mark.usefixtures("checks")
def test_the_last_of_two_members_of_a_name_wins(target: Path) -> None:
    """As tar has it; what a link pointed to is not written through it."""
    unpack(
        io.BytesIO(
            packed(
                member("kept", content=b"kept"),
                link("a", "kept"),
                member("a", content=b"new"),
                hard("b", "kept"),
                member("b", content=b"other"),
            )
        ),
        target,
    )
    assert (target / "kept").read_bytes() == b"kept"
    assert (target / "a").read_bytes() == b"new"
    assert (target / "b").read_bytes() == b"other"


HOSTILE: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes]], str]] = {
    "absolute name": ([member("/evil", content=b"x")], "'/evil' has an absolute name"),
    "name with dots": ([member("../evil", content=b"x")], r"'../evil' leads out"),
    "dots inside": ([member("a/../../evil", content=b"x")], r"'a/../../evil' leads out"),
    "absolute link": ([link("l", "/etc/passwd")], "'l' is a link to '/etc/passwd'"),
    "link up": ([link("l", "../evil")], r"'l' is a link to '../evil', which leads out"),
    "link up from a folder": ([link("a/l", "../../evil")], r"'a/l' is a link to '../../evil'"),
    "through a link": (
        [link("l", "."), member("l/evil", content=b"x")],
        "'l/evil' would be written through the link 'l'",
    ),
    "folder through a link": ([folder("d"), link("l", "d"), folder("l/x")], "'l/x' would be"),
    "folder over a link": ([folder("d"), link("l", "d"), folder("l")], "'l' would be"),
    "link by way of a link": (
        [link("d", "."), link("e", "d/../evil")],
        r"'e' is a link to 'd/../evil'",
    ),
    "link bent by a later one": (
        [link("e", "d/../evil"), link("d", ".")],
        r"'e' is a link to 'd/../evil'",
    ),
    "hard link up": ([hard("h", "../evil")], r"'h' is a hard link to '../evil'"),
    "absolute hard link": ([hard("h", "/etc/passwd")], "'h' is a hard link to '/etc/passwd'"),
    "hard link through a link": (
        [folder("d"), member("d/a"), link("l", "d"), hard("h", "l/a")],
        "'h' is a hard link to 'l/a'",
    ),
    "hard link to a link": ([link("l", "x"), hard("h", "l")], "'h' is a hard link to 'l'"),
    "hard link to nothing": ([hard("h", "later")], "'h' is a hard link to 'later'"),
    "device": ([member("dev", tarfile.CHRTYPE, devmajor=1, devminor=3)], "'dev' is neither"),
    "block device": ([member("dev", tarfile.BLKTYPE)], "'dev' is neither"),
    "pipe": ([member("pipe", tarfile.FIFOTYPE)], "'pipe' is neither"),
    "unknown kind": ([member("odd", b"Z")], "'odd' is neither"),
    "file for the folder": ([member(".", content=b"x")], "'.' is no folder"),
    "link for the folder": ([link(".", "/etc")], "'.' is no folder"),
    "file over a folder": ([folder("a"), member("a", content=b"x")], "'a' is there twice"),
    "folder over a file": ([member("a"), member("a/b")], "'a/b' cannot be made: File exists"),
    "endless name": ([member("n" * 300)], "cannot be made: File name too long"),
    "no text": ([member("../\udcff")], r"'../\\udcff' leads out"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.usefixtures("checks")
def test_what_leads_out_is_refused_by_name(target: Path, name: str) -> None:
    """Nothing appears beside the folder, whatever the member is."""
    members, expected = HOSTILE[name]
    with pytest.raises(ArchiveError, match=expected):
        unpack(io.BytesIO(packed(*members)), target)
    assert [entry.name for entry in target.parent.iterdir()] == ["target"]
    outside = [path for path in target.rglob("*") if path.is_symlink() and path.exists()]
    assert all(path.resolve().is_relative_to(target) for path in outside)


def test_python_s_own_filter_has_a_say(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it alone refuses is refused as well."""

    def refuse(info: tarfile.TarInfo, path: str) -> None:
        raise tarfile.TarError("not that one")

    monkeypatch.setattr(tarfile, "data_filter", refuse, raising=False)
    with pytest.raises(ArchiveError, match="'a' is refused: not that one"):
        unpack(io.BytesIO(packed(member("a"))), target)


def damaged_members(data: bytes) -> bytes:
    """Return a plain archive whose second header was hit."""
    return data[:1024] + b"?" * 512 + data[1536:]


@pytest.mark.parametrize(
    ("compression", "damage", "expected"),
    [
        ("", lambda data: b"", "no tar archive"),
        ("", lambda data: b"PK\x03\x04" + b"z" * 2000, "no tar archive"),
        ("gz", lambda data: data[:-20], "damaged"),
        ("gz", lambda data: data[:8], "no tar archive|damaged"),
        ("gz", lambda data: data[:100] + b"\0\xff\0\xff" + data[104:], "damaged"),
        ("xz", lambda data: data[:200] + b"\0\xff\0\xff" + data[204:], "damaged"),
        ("bz2", lambda data: data[: len(data) // 2], "damaged"),
        ("", lambda data: data[:1024], "ends too early"),
        ("", lambda data: data[:1400], "damaged|ends too early"),
        ("", damaged_members, "damaged at byte 1024"),
    ],
)
def test_damage_is_said(
    target: Path, compression: str, damage: Callable[[bytes], bytes], expected: str
) -> None:
    """An archive that was cut or hit is never taken for a whole one."""
    whole = packed(
        member("a", content=os.urandom(500)),
        member("b", content=os.urandom(300_000)),
        compression=compression,
    )
    with pytest.raises(ArchiveError, match=expected):
        unpack(io.BytesIO(damage(whole)), target)


def test_full_disk_is_an_os_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the archive's fault, so that the caller can say what to do."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(io.BytesIO(packed(member("a", content=b"x"))), target)


def test_what_is_no_archive_is_told_apart(tmp_path: Path) -> None:
    """Text, an empty file, half a head of gzip."""
    for content in (b"hello", b"", b"\x1f\x8b\x08"):
        (tmp_path / "file").write_bytes(content)
        assert not is_archive(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        is_archive(tmp_path / "missing")
