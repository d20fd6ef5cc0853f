# SPDX-License-Identifier: Apache-2.0
"""Children in interpreters of other environments, from this Python and from others."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorserve.errors import BootError
from actorserve.process.boot import PeerGone
from actorserve.process.spawn import SpawnSpec


def interpreter(version: str) -> str | None:
    """An interpreter of this version on this machine, if there is one."""
    for found in Path.home().glob(f".pyenv/versions/{version}.*/bin/python"):
        return str(found)
    found_in_path = shutil.which(f"python{version}")
    if found_in_path and ".pyenv/shims" not in found_in_path:
        return found_in_path
    return None


@pytest.fixture(scope="module", autouse=True)
def private_folder(warm) -> None:
    """Make the folder of the file's Spawner before a test counts what it opened."""

    async def main(bench) -> None:
        bench.spawner._folder.path()

    warm(main)


@pytest.fixture(scope="module")
def empty_venv(tmp_path_factory) -> str:
    """A venv of this Python without any package."""
    folder = tmp_path_factory.mktemp("empty venv")
    venv.create(folder, with_pip=False, symlinks=True)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def full_venv(tmp_path_factory) -> Iterator[str]:
    """A venv of this Python that sees the packages of the tests' own environment."""
    folder = tmp_path_factory.mktemp("full venv")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(folder / "bin" / "python")


def test_child_of_a_venv_runs_there(kit, warm, full_venv, tmp_path):
    """It has its own prefix, sees the package through the private folder, and is like a fork."""

    async def main(bench) -> None:
        watched = await bench.spawn(
            "describe",
            "a_long_model_name_0_0",
            python=full_venv,
            env={"FLAVOUR": "own"},
            cwd=str(tmp_path),
        )
        facts = json.loads(await watched.line("facts "))
        assert (await watched.end()).code == 0
        prefix = str(Path(full_venv).parent.parent)
        assert facts["prefix"] == facts["env"]["VIRTUAL_ENV"] == prefix
        assert facts["argv"] == ["a_long_model_name_0_0"]
        assert facts["comm"] == "a_long_mode_0_0"
        assert facts["cwd"] == str(tmp_path)
        assert facts["path"][0] == kit.HERE
        assert "actorserve-path-" in facts["path"][1]
        assert not any(path in ("", "/") or path.endswith("process") for path in facts["path"][1:])
        assert facts["leads_group"]
        assert facts["mask"] == []
        assert not facts["sigint_ignored"]
        # 0 1 2, two guards, boot socket, supervisor's pidfd, and the listing itself
        assert len(facts["fds"]) == 8

    warm(main)


def test_child_of_a_venv_talks_and_dies_like_any_other(kit, warm, full_venv):
    """Messages, signals, status and output are those of a forked child."""

    async def main(bench) -> None:
        watched = await bench.spawn(python=full_venv)
        assert await watched.ask() == 7
        os.kill(watched.child.pid, signal.SIGTERM)
        os.kill(watched.child.pid, signal.SIGINT)
        assert await watched.ask() == 7
        watched.child.signal(signal.SIGSEGV)
        assert (await watched.end()).signal == signal.SIGSEGV
        assert "Fatal Python error: Segmentation fault" in watched.text

    warm(main)


def test_stop_signals_while_the_interpreter_starts_are_survived(kit, warm, full_venv):
    """Row 20: between the exec and its own handlers a child is as deaf as before."""

    async def main(bench) -> None:
        watched = await bench.spawn(python=full_venv)
        while not watched.lines:
            watched.child.signal(signal.SIGTERM)
            watched.child.signal(signal.SIGINT)
            await asyncio.sleep(0.005)
        assert await watched.ask() == 7

    warm(main)


async def refusal(kit, bench, python: str) -> str:
    """Spawn with this interpreter; the reason that it gives for not starting."""
    probe = kit.Watched()
    reasons: list[str] = []

    def on_exit(exit_) -> None:
        try:
            while probe.child.boot.recv_nowait() is not None:
                pass
        except (BootError, PeerGone) as error:
            reasons.append(f"{type(error).__name__}: {error}")
        probe.on_exit(exit_)

    spec = SpawnSpec("child_entries:echo", "probe_0_0", python=python, sys_path=[kit.HERE])
    probe.child = await bench.spawner.spawn(spec, on_exit, probe.on_output)
    assert (await probe.end()).code == 1
    assert reasons[0].removeprefix("BootError: ") in probe.text
    return reasons[0]


def test_missing_packages_are_named(kit, warm, empty_venv):
    """An environment without numpy and msgspec says so, and where, as a boot error."""

    async def main(bench) -> None:
        reason = await refusal(kit, bench, empty_venv)
        assert reason.startswith(f"BootError: the interpreter {empty_venv} (Python 3.")
        assert "cannot import numpy and msgspec: install numpy and msgspec" in reason

    warm(main)


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7", "3.8", "3.9"])
def test_old_python_is_named(kit, warm, version):
    """A Python below 3.10 gives its version as the reason, however old it is."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")

    async def main(bench) -> None:
        reason = await refusal(kit, bench, python)
        assert reason.startswith("BootError: the interpreter ")
        assert f"is Python {version}." in reason
        assert reason.endswith("a stub needs Python 3.10 or newer")

    warm(main)


def test_program_that_is_no_python_is_a_boot_error_or_a_death(kit, warm, tmp_path):
    """A file that cannot be executed is named; a program that is no Python just ends."""
    fake = tmp_path / "python"
    fake.write_bytes(b"\x7fELF no program")
    fake.chmod(0o755)

    async def main(bench) -> None:
        reason = await refusal(kit, bench, str(fake))
        assert "BootError: probe_0_0 could not be set up: [Errno 8] Exec format error" in reason
        watched = await bench.spawn(python="/bin/false")
        assert (await watched.end()).code == 1

    warm(main)


def test_private_folder_goes_with_the_spawner(kit, run_plain, full_venv):
    """The folder is there while the Spawner is, and not a moment longer."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn("describe", python=full_venv)
            facts = json.loads(await watched.line("facts "))
            folder = Path(facts["env"]["PYTHONPATH"])
            assert [entry.name for entry in folder.iterdir()] == ["actorserve"]
        assert not folder.exists()

    run_plain(main)


@pytest.mark.parametrize("version", ["3.10", "3.13"])
@pytest.mark.slow
def test_other_python_serves(kit, warm, tmp_path, version):
    """A venv of another Python with numpy and msgspec runs children next to ours."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    folder = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    own = str(folder / "bin" / "python")
    installed = subprocess.run(
        [own, "-m", "pip", "install", "-q", "numpy", "msgspec"], capture_output=True, check=False
    )
    if installed.returncode:
        pytest.skip("numpy and msgspec cannot be installed here (offline?)")

    async def main(bench) -> None:
        watched = await bench.spawn("describe", python=own)
        facts = json.loads(await watched.line("facts "))
        assert facts["version"] == [int(part) for part in version.split(".")]
        assert await (await bench.spawn(python=own)).ask() == 7
        assert await (await bench.spawn()).ask() == 7

    warm(main)


def test_this_interpreter_freshly_started(warm):
    """Naming our own interpreter gives a child that is no fork of the zygote."""

    async def main(bench) -> None:
        watched = await bench.spawn("describe", python=sys.executable)
        facts = json.loads(await watched.line("facts "))
        assert facts["executable"] == sys.executable
        assert facts["main"].endswith("foreign.py")

    warm(main)
