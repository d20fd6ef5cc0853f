# SPDX-License-Identifier: Apache-2.0
"""Archives of environments: unpacked once, by a child, kept as long as they are of use."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorserve.errors import BootError, Unavailable
from actorserve.process.environment_store import PREFIX


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own temporary folder, children's too."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    return path


@pytest.fixture
def run(run_plain: Any) -> Callable[[Callable[[], Any]], None]:
    """Return what runs a coroutine function to its end, its loop's own threads included."""

    def run_all(main: Callable[[], Any]) -> None:
        async def whole() -> None:
            try:
                await main()
            finally:
                await asyncio.get_running_loop().shutdown_default_executor()

        run_plain(whole)

    return run_all


def write_archive(path: Path, word: str = "one", **scripts: str) -> Path:
    """Write an archive that has all that is looked for, and a word."""
    content = path.with_name("content")
    (content / "bin").mkdir(parents=True, exist_ok=True)
    (content / "bin" / "activate").write_text("")
    for name, text in {"python": "#!/bin/sh\nexec /bin/sh $*\n", **scripts}.items():
        (content / "bin" / name).write_text(text)
        (content / "bin" / name).chmod(0o755)
    (content / "word").write_text(word)
    fresh = path.with_name("fresh")
    with tarfile.open(fresh, "w:gz", compresslevel=1) as tar:
        tar.add(content, ".")
    fresh.replace(path)
    return path


def left(place: Path) -> list[str]:
    """Return the folders of unpacked archives that are there."""
    return sorted(path.name for path in place.glob(f"{PREFIX}*/*"))


def test_many_at_once_unpack_once(kit: Any, run: Any, place: Path, tmp_path: Path) -> None:
    """The same folder for all, private, also by way of a link, and gone with the Spawner."""
    archive = write_archive(tmp_path / "env.tar.gz")
    (tmp_path / "link.tgz").symlink_to(archive)

    async def main() -> None:
        async with kit.Bench() as bench:
            ways = [archive, tmp_path / "link.tgz"] * 4
            found = await asyncio.gather(*[bench.spawner.unpacked(way) for way in ways])
            assert len({each.path for each in found}) == 1
            path = found[0].path
            assert (path / "word").read_text() == "one"
            assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o700
            assert path.parent.parent == place
            assert (await bench.spawner.unpacked(archive)).path == path
            said = [text for _, text in bench.log if "unpacked" in text]
            assert len(said) == 1 and str(archive) in said[0]
        assert list(place.iterdir()) == []

    run(main)


def test_changed_archive_is_unpacked_anew(kit: Any, run: Any, place: Path, tmp_path: Path) -> None:
    """Beside the old folder, which stays while it is held and goes then."""
    archive = write_archive(tmp_path / "env.tar.gz")

    async def main() -> None:
        async with kit.Bench() as bench:
            old = await bench.spawner.unpacked(archive)
            write_archive(archive, "two")
            new = await bench.spawner.unpacked(archive)
            words = [(each.path / "word").read_text() for each in (old, new)]
            assert words == ["one", "two"]
            assert left(place) == ["1-env", "3-env"]
            del old
            gc.collect()
            await kit.until(lambda: left(place) == ["3-env"])
            del new
            gc.collect()
            again = await bench.spawner.unpacked(archive)
            assert (again.path / "word").read_text() == "two"
            assert left(place) == ["3-env"]

    run(main)


def test_emptied_folder_is_made_again(kit: Any, run: Any, place: Path, tmp_path: Path) -> None:
    """Whoever cleans temporary folders does not break the next load."""
    archive = write_archive(tmp_path / "env.tar.gz")

    async def main() -> None:
        async with kit.Bench() as bench:
            first = await bench.spawner.unpacked(archive)
            (first.path / "bin" / "python").unlink()
            again = await bench.spawner.unpacked(archive)
            assert (again.path / "bin" / "python").exists()

    run(main)


def test_conda_unpack_runs_once_in_place(kit: Any, run: Any, place: Path, tmp_path: Path) -> None:
    """With the environment's own interpreter; where it fails, that is a warning."""
    note = 'echo "$0" >> "$(dirname "$0")/ran"\n'
    good = write_archive(tmp_path / "good.tar.gz", **{"conda-unpack": note})
    bad = write_archive(tmp_path / "bad.tar.gz", **{"conda-unpack": "echo no luck; exit 3\n"})

    async def main() -> None:
        async with kit.Bench() as bench:
            path = (await bench.spawner.unpacked(good)).path
            assert (path / "bin" / "ran").read_text() == f"{path}/bin/conda-unpack\n"
            await bench.spawner.unpacked(bad)
            warnings = [text for level, text in bench.log if level == 1]
            assert warnings == [f"'{bad}': bin/conda-unpack failed with code 3: no luck"]

    run(main)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("bin/activate", "bin/activate does not exist. The Python environment should contain an"),
        ("bin/python", "there is no bin/python in it"),
    ],
)
def test_what_is_no_environment_is_refused(
    kit: Any, run: Any, place: Path, tmp_path: Path, missing: str, expected: str
) -> None:
    """With the text that is known for it; nothing of it stays."""
    whole = write_archive(tmp_path / "env.tar.gz")
    archive = tmp_path / "less.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(whole.with_name("content"), ".", filter=_without(missing))

    async def main() -> None:
        async with kit.Bench() as bench:
            for _ in range(2):
                with pytest.raises(BootError, match=expected):
                    await bench.spawner.unpacked(archive)
            await kit.until(lambda: left(place) == [])

    run(main)


def _without(name: str) -> Callable[[tarfile.TarInfo], tarfile.TarInfo | None]:
    return lambda info: None if info.name == f"./{name}" else info


def test_folder_around_the_environment_is_named(
    kit: Any, run: Any, place: Path, tmp_path: Path
) -> None:
    """Who packed the folder instead of what is in it is told so."""
    whole = write_archive(tmp_path / "env.tar.gz")
    archive = tmp_path / "around.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(whole.with_name("content"), "my env")

    async def main() -> None:
        async with kit.Bench() as bench:
            with pytest.raises(BootError, match="holds the folder 'my env': pack what is in"):
                await bench.spawner.unpacked(archive)

    run(main)


@pytest.mark.parametrize("kind", ["missing", "pipe", "text", "escape"])
def test_what_cannot_be_unpacked_says_why(
    kit: Any, run: Any, place: Path, tmp_path: Path, kind: str
) -> None:
    """In words for people, with nothing left."""
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "text":
        path.write_text("no archive")
    elif kind == "escape":
        with tarfile.open(path, "w") as tar:
            info = tarfile.TarInfo("bin/python")
            info.type, info.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
            tar.addfile(info)
    expected = {
        "missing": "cannot be read: No such file",
        "pipe": "neither a directory nor a regular file",
        "text": "no tar archive",
        "escape": "'bin/python' is a link to '/usr/bin/python3', which leads out of the archive",
    }[kind]

    async def main() -> None:
        async with kit.Bench() as bench:
            with pytest.raises(BootError, match=expected):
                await bench.spawner.unpacked(path)
            await kit.until(lambda: left(place) == [])

    run(main)


def test_full_disk_says_where_and_leaves_nothing(
    kit: Any, run: Any, place: Path, tmp_path: Path
) -> None:
    """A limit on file sizes stands for the disk's end."""
    archive = write_archive(tmp_path / "env.tar.gz", big="x" * 300_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def main() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            bench = kit.Bench()
            await bench.spawner.start()  # the limit is its zygote's, too
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        try:
            expected = f"cannot be unpacked in '{place}/.*File too large; make room there, or"
            with pytest.raises(BootError, match=expected):
                await bench.spawner.unpacked(archive)
            await kit.until(lambda: left(place) == [])
        finally:
            await bench.spawner.stop()

    run(main)


def test_the_last_who_gives_up_ends_it(
    kit: Any, run: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who waits is enough to keep it going; afterwards nothing is left, and a retry works."""
    archive = write_archive(tmp_path / "env.tar.gz")
    monkeypatch.setenv("ACTORSERVE_FAULT", "unpacker.unpacked:hang")

    async def main() -> None:
        async with kit.Bench() as bench:
            waiters = [asyncio.ensure_future(bench.spawner.unpacked(archive)) for _ in range(2)]
            await kit.until(lambda: len(list(place.glob(f"{PREFIX}*/1-env/word"))) == 1)
            waiters[0].cancel()
            await asyncio.wait([waiters[0]])
            assert waiters[0].cancelled() and bench.spawner.stats().children == 1
            waiters[1].cancel()
            monkeypatch.delenv("ACTORSERVE_FAULT")
            again = await bench.spawner.unpacked(archive)
            assert (again.path / "word").read_text() == "one"
            await kit.until(lambda: left(place) == [again.path.name])
            assert bench.spawner.stats().children == 0

    run(main)


def test_stop_ends_it(
    kit: Any, run: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits gets an error, and everything is gone when stop returns."""
    archive = write_archive(tmp_path / "env.tar.gz")
    monkeypatch.setenv("ACTORSERVE_FAULT", "unpacker.unpacked:hang")

    async def main() -> None:
        async with kit.Bench() as bench:
            waiter = asyncio.ensure_future(bench.spawner.unpacked(archive))
            await kit.until(lambda: len(list(place.glob(f"{PREFIX}*/1-env/word"))) == 1)
        with pytest.raises((BootError, Unavailable)):
            await waiter
        assert list(place.iterdir()) == []
        with pytest.raises(Unavailable, match="stopped"):
            await bench.spawner.unpacked(archive)

    run(main)


def test_dead_unpacker_is_an_error_and_not_a_hang(
    kit: Any, run: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is killed from outside leaves nothing and says how it ended."""
    archive = write_archive(tmp_path / "env.tar.gz")
    monkeypatch.setenv("ACTORSERVE_FAULT", "unpacker.unpacked:kill")

    async def main() -> None:
        async with kit.Bench() as bench:
            with pytest.raises(BootError, match="that unpacked it was killed by SIGKILL"):
                await bench.spawner.unpacked(archive)
            await kit.until(lambda: left(place) == [])

    run(main)


def test_death_of_the_zygote_does_not_matter(
    kit: Any, run: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child goes on, and its word counts where its exit status is unknown."""
    archive = write_archive(tmp_path / "env.tar.gz")
    monkeypatch.setenv("ACTORSERVE_FAULT", "unpacker.unpacked:stop")

    async def main() -> None:
        async with kit.Bench() as bench:
            waiter = asyncio.ensure_future(bench.spawner.unpacked(archive))
            await kit.until(lambda: bench.spawner.stats().children == 1)
            zygote = bench.zygote
            (child,) = [child for child, _ in bench.spawner._brood._children.values()]
            await kit.until(lambda: child.sample().state == "T")
            os.kill(zygote, signal.SIGKILL)
            await bench.next_zygote(zygote)
            child.signal(signal.SIGCONT)
            assert ((await waiter).path / "word").read_text() == "one"

    run(main)
