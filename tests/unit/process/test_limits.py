# SPDX-License-Identifier: Apache-2.0
"""A Spawner without descriptors, processes, a log or a folder."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from actorserve.errors import (
    ResourceExhausted,
    Unavailable,
)
from actorserve.process.spawn import Spawner


def test_no_descriptors_left_is_an_error_and_heals(kit, warm):
    """Row 56: at the limit of open files a spawn says so; with room again the next one works."""

    async def main(bench) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for room in range(8):
            with kit.only_free_descriptors(room):
                if room < 7:  # six for the order, one for the pidfd
                    with pytest.raises(ResourceExhausted, match="open files"):
                        await bench.spawn()
                else:
                    assert await (await bench.spawn()).ask() == 7
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
        await kit.until(lambda: not kit.has_more_children(bench.zygote, 1))
        assert await (await bench.spawn()).ask() == 7

    warm(main)


def test_zygote_without_descriptors_is_an_error_and_heals(kit, warm):
    """Row 56: a zygote at its limit fails the spawn, not itself."""

    async def main(bench) -> None:
        zygote = bench.zygote
        used = kit.fds_of(zygote)
        limits = resource.prlimit(zygote, resource.RLIMIT_NOFILE)
        # 3 descriptors come with the order, 1 is the pidfd
        for room in range(4):
            limit = next(n for n in range(10_000) if n - sum(fd < n for fd in used) == room)
            resource.prlimit(zygote, resource.RLIMIT_NOFILE, (limit, limits[1]))
            with pytest.raises(ResourceExhausted, match="zygote has no room"):
                await bench.spawn()
        resource.prlimit(zygote, resource.RLIMIT_NOFILE, limits)
        assert await (await bench.spawn()).ask() == 7
        assert bench.zygote == zygote
        assert len(kit.fds_of(zygote)) == len(used) + 1
        assert not kit.has_more_children(bench.zygote, 1)

    warm(main)


def test_zygote_that_dies_at_the_limit_comes_back_with_room(kit, run_plain):
    """Row 56: without descriptors for the next zygote, it is tried again until there are some."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn()
            with kit.only_free_descriptors(0):
                os.kill(bench.zygote, signal.SIGKILL)
                await kit.until(lambda: any("trying again" in text for _, text in bench.log))
                assert await watched.ask() == 7
            await bench.next_zygote(0)
            assert await (await bench.spawn()).ask() == 7

    run_plain(main)


def test_log_that_fails_stops_nothing(kit, run_plain):
    """Row 57: nobody needs a log to serve."""

    async def main() -> None:
        bench = kit.Bench()

        def log(_level: int, _text: str) -> None:
            raise OSError("the disk is full")

        bench.spawner = Spawner(log=log)
        async with bench:
            zygote = bench.zygote
            os.kill(zygote, signal.SIGKILL)
            await bench.next_zygote(zygote)
            assert await (await bench.spawn()).ask() == 7

    run_plain(main)


def test_host_without_a_folder(kit, warm, tmp_path):
    """A host whose working directory was removed starts children in the root folder."""

    async def main(bench) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        before = Path.cwd()
        os.chdir(gone)
        gone.rmdir()
        try:
            watched = await bench.spawn("describe")
        finally:
            os.chdir(before)
        assert '"cwd": "/"' in await watched.line("facts ")

    warm(main)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
def test_fork_that_fails_is_unavailable_and_heals(kit, run_plain, monkeypatch, tmp_path, code):
    """Row 58: no process to be had is Unavailable; the next try may succeed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_fork.py").write_text(
        "import os\n"
        "real = os.fork\n"
        "def fork():\n"
        "    os.fork = real\n"
        f"    raise OSError({code}, os.strerror({code}))\n"
        "os.fork = fork\n"
    )

    async def main() -> None:
        async with kit.Bench(("failing_fork",)) as bench:
            with pytest.raises(Unavailable, match=os.strerror(code)):
                await bench.spawn()
            assert await (await bench.spawn()).ask() == 7
            assert bench.spawner.stats().failed == 1

    run_plain(main)
