# SPDX-License-Identifier: Apache-2.0
"""Unpack a tar archive so that nothing of it can land, or lead, outside its folder.

    member ─► parts of its name ─► may it stand there? ─► a file, folder or link of our own making

What holds here: nothing is ever written through a link, because a member below one is refused;
links are relative and end inside, judged by the links of the archive and not by the disk, when
they come and again when all are known (a later link may bend an earlier one). Owners, special
bits and devices are not taken over. The folder belongs to this process alone.

Python's own `data` filter has to agree, where this Python has it; its versions differ and some
could be fooled, so it is not relied on. The standard library alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

Parts = tuple[str, ...]

_COPY_BYTES = 1 << 20
_BLOCK_BYTES = 512
_MOST_LINKS = 40
_OUTSIDE = "leads out of the archive"
_NONE = "it is no tar archive (.tar, .tar.gz, .tgz, .tar.bz2 or .tar.xz), or a damaged one"


class ArchiveError(Exception):
    """The archive cannot be unpacked; the text says why, and names the member."""


def is_archive(path: Path) -> bool:
    """Whether this file begins as a tar archive does, compressed or not. Raises OSError."""
    try:
        with tarfile.open(path, "r:*"):
            return True
    except (tarfile.TarError, EOFError, ValueError):
        return False
    except OSError as error:
        if error.errno is not None:
            raise
        return False  # a damaged head of a compressed file


def unpack(file: IO[bytes], folder: Path) -> int:
    """Unpack the archive that is open as `file` into the empty `folder`; returns the members.

    Raises ArchiveError, or OSError where the folder takes no more. What was unpacked until then
    is left to the caller.
    """
    unpacker = _Unpacker(folder)
    try:
        with _open(file) as archive:
            count = 0
            while (member := archive.next()) is not None:
                unpacker.add(archive, member)
                archive.members = []  # type: ignore[attr-defined]  # they are not needed again
                count += 1
            _check_end(archive)
    except ArchiveError:
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise ArchiveError(f"it is damaged: {error}") from None
    except Exception as error:  # tarfile, zlib, lzma and struct have errors of their own
        raise ArchiveError(f"it is damaged: {type(error).__name__}: {error}") from None
    unpacker.check_links()
    return count


def _open(file: IO[bytes]) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=file, mode="r:*")
    except (tarfile.ReadError, EOFError):
        raise ArchiveError(_NONE) from None


def shown(name: str) -> str:
    """Return a member's name as it can be printed."""
    return "'" + name.encode("utf-8", "backslashreplace").decode() + "'"


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise ArchiveError unless the end mark stands where the reading ended, and read the rest.

    The reader takes whatever is no member for the end, bytes that were hit by a fault too. The
    checksum of a compressed archive stands at its very end.
    """
    file: Any = archive.fileobj
    file.seek(archive.offset)
    block = file.read(_BLOCK_BYTES)
    if len(block) < _BLOCK_BYTES:
        raise ArchiveError("it ends too early")
    if block.strip(b"\0"):
        raise ArchiveError(f"it is damaged at byte {archive.offset}")
    while file.read(_COPY_BYTES):
        pass


def _refusal(member: tarfile.TarInfo, why: str) -> ArchiveError:
    return ArchiveError(f"its member {shown(member.name)} {why}")


class _Unpacker:
    """What was unpacked so far: the folders that are surely ones, and the links."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: set[Parts] = {()}
        self._links: dict[Parts, tuple[str, tarfile.TarInfo]] = {}

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Unpack one member."""
        parts = _parts(member)
        make = self._maker(archive, member, parts)
        _ask_python(member, self._folder)
        try:
            if not parts:
                return
            self._make_folder(member, parts[:-1])
            if make is None:
                self._make_folder(member, parts)
            else:
                self._clear(member, parts)
                make(self._path(parts))
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EEXIST):
                raise _refusal(member, f"cannot be made: {error.strerror}") from None
            raise

    def _maker(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, parts: Parts
    ) -> Callable[[Path], None] | None:
        """Return what makes the member where nothing stands yet; None for a folder."""
        if member.isdir():
            return None
        if not parts:
            raise _refusal(member, "is no folder")
        if member.isreg():
            return lambda path: _write(archive, member, path)
        if member.issym():
            if _leads_out(self._links, parts, member.linkname):
                raise _refusal(member, f"is a link to {shown(member.linkname)}, which {_OUTSIDE}")
            return lambda path: self._link(member, parts, path)
        if member.islnk():
            return self._twin(member)
        raise _refusal(member, "is neither a file nor a folder nor a link")

    def _twin(self, member: tarfile.TarInfo) -> Callable[[Path], None]:
        """Return what makes a hard link; it must name a file that came before it."""
        target = _parts(member, member.linkname)
        known = any(target[:length] in self._links for length in range(len(target) + 1))
        source = self._path(target)
        if known or not source.is_file():
            raise _refusal(
                member,
                f"is a hard link to {shown(member.linkname)}, which is no file that came before it",
            )
        return lambda path: os.link(source, path, follow_symlinks=False)

    def _link(self, member: tarfile.TarInfo, parts: Parts, path: Path) -> None:
        path.symlink_to(member.linkname)
        self._links[parts] = (member.linkname, member)

    def _path(self, parts: Parts) -> Path:
        return self._folder.joinpath(*parts)

    def _make_folder(self, member: tarfile.TarInfo, parts: Parts) -> None:
        """Make a folder and those above it. Raises ArchiveError where a link stands in the way."""
        if parts in self._folders:
            return
        self._make_folder(member, parts[:-1])
        if parts in self._links:
            raise _refusal(member, f"would be written through the link {shown('/'.join(parts))}")
        self._path(parts).mkdir(mode=0o755, exist_ok=True)
        self._folders.add(parts)

    def _clear(self, member: tarfile.TarInfo, parts: Parts) -> None:
        """Let the last member of a name win; a folder stays."""
        if parts in self._folders:
            raise _refusal(member, "is there twice, once as a folder")
        self._path(parts).unlink(missing_ok=True)
        self._links.pop(parts, None)

    def check_links(self) -> None:
        """Raise ArchiveError for a link that leads out, now that all links are known."""
        for parts, (target, member) in self._links.items():
            if _leads_out(self._links, parts, target):
                raise _refusal(member, f"is a link to {shown(target)}, which {_OUTSIDE}")


def _parts(member: tarfile.TarInfo, name: str | None = None) -> Parts:
    """Return the parts of a member's name, or of what it is a hard link to."""
    text = member.name if name is None else name
    what = "" if name is None else f"is a hard link to {shown(name)}, which "
    if text.startswith("/"):
        raise _refusal(member, f"{what}has an absolute name")
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _refusal(member, f"{what}{_OUTSIDE}")
    return tuple(parts)


def _leads_out(links: dict[Parts, tuple[str, tarfile.TarInfo]], at: Parts, target: str) -> bool:
    """Whether the way of a link, through the other links, ever leaves the archive.

    Links that lead round in circles lead nowhere.
    """
    here = list(at[:-1])
    ahead = [target]
    for _ in range(_MOST_LINKS):
        if not ahead:
            return False
        if ahead[-1].startswith("/"):
            return True
        way = [part for each in reversed(ahead) for part in each.split("/")]
        ahead = []
        for number, part in enumerate(way):
            if part == "..":
                if not here:
                    return True
                here.pop()
            elif part not in ("", "."):
                here.append(part)
                found = links.get(tuple(here))
                if found is not None:
                    here.pop()
                    ahead = ["/".join(way[number + 1 :]), found[0]]
                    break
    return False


def _ask_python(member: tarfile.TarInfo, folder: Path) -> None:
    """Let Python's own filter refuse the member, where there is one."""
    data_filter = getattr(tarfile, "data_filter", None)
    if data_filter is None:
        return
    try:
        data_filter(member, str(folder))
    except tarfile.TarError as error:
        raise _refusal(member, f"is refused: {error}") from None


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Write a regular file with its time, which compiled modules are checked against."""
    source = archive.extractfile(member)
    if source is None:
        raise _refusal(member, "has no content")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with source, open(os.open(path, flags, 0o600), "wb") as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
        os.fchmod(target.fileno(), 0o600 | (member.mode & 0o755))
    time_s = max(0, int(member.mtime))
    os.utime(path, (time_s, time_s))
