# SPDX-License-Identifier: Apache-2.0
"""What users install: the wheel, built from the source, in an environment without this source."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.server.harness import EXAMPLES, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("build", "setuptools", "wheel", "pip"))),
        reason="build, setuptools, wheel or pip is not installed",
    ),
]

ROOT = Path(__file__).parents[2]
SOURCES = ("actors", "actorserve", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
CORE = ("numpy", "numpy.libs", "msgspec", "psutil")
EMBED = """
import asyncio, sys
import numpy as np
from actorserve import Supervisor

async def main():
    async with Supervisor(sys.argv[1]) as server:
        a = np.ones(4, np.float32)
        print((await server.infer("add_sub", {"INPUT0": a, "INPUT1": a}))["OUTPUT0"].tolist())

asyncio.run(main())
"""


def run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end without this source in its way."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Build sdist and wheel of a copy of the source; returns their folder."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    flags = ("--no-isolation", "--skip-dependency-check")
    run(sys.executable, "-m", "build", *flags, source, cwd=source)
    return source / "dist"


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    """Return the wheel."""
    (wheel,) = dist.glob("*.whl")
    return wheel


def _environment(folder: Path, wheel: Path) -> Path:
    """Make a venv with the wheel and nothing else; returns it."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=folder.parent)
    return folder


def _site(environment: Path) -> Path:
    return next((environment / "lib").glob("python3*")) / "site-packages"


@pytest.fixture(scope="module")
def full(wheel, tmp_path_factory) -> Path:
    """Return a venv with the wheel that also finds the packages of the running one."""
    environment = _environment(tmp_path_factory.mktemp("full") / "env", wheel)
    (_site(environment) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """Return a venv as `pip install actorserve` makes it: the core's packages, no extras."""
    environment = _environment(tmp_path_factory.mktemp("bare") / "env", wheel)
    ours = Path(sysconfig.get_path("purelib"))
    for name in CORE:
        if (ours / name).exists():
            (_site(environment) / name).symlink_to(ours / name)
    return environment


# --- what is in them -----------------------------------------------------------------------------


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    """Every module of the source, one top-level package, the command, the licence."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"{wheel.name.rpartition('-py3')[0]}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
        assert (
            "actorserve = actorserve.cli:main" in archive.read(f"{info}/entry_points.txt").decode()
        )
    assert {name.split("/")[0] for name in names} == {"actorserve", info}
    sources = {f"actorserve/{p.relative_to(ROOT / 'actorserve')}" for p in _modules("actorserve")}
    sources |= {f"actorserve/{p.relative_to(ROOT)}" for p in _modules("actors")}
    assert sources <= names
    assert "actorserve/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    assert "Requires-Python: >=3.10" in metadata
    required = {line for line in metadata.splitlines() if line.startswith("Requires-Dist: ")}
    core = {line.split()[1].rstrip(">=0123456789.") for line in required if "extra ==" not in line}
    assert core == {"numpy", "msgspec", "psutil"}


def _modules(room: str) -> list[Path]:
    return [path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts]


def test_the_sdist_makes_the_same_wheel(dist, wheel, tmp_path):
    """What is not in the sdist cannot be in the wheel that others build of it."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    flags = ("--no-isolation", "--skip-dependency-check", "--wheel")
    run(sys.executable, "-m", "build", *flags, source, cwd=tmp_path)
    (again,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert sorted(one.namelist()) == sorted(other.namelist())


# --- installed -----------------------------------------------------------------------------------


def test_the_server_is_importable_from_anywhere(full, tmp_path):
    """As actorserve.actors; importing the package loads none of it."""
    python = full / "bin" / "python"
    code = (
        "import sys, actorserve; "
        "assert not any(m.startswith('actorserve.') for m in sys.modules), sys.modules; "
        "import actorserve.actors.supervisor as s; print(s.__file__)"
    )
    place = run(python, "-c", code, cwd=tmp_path).stdout.strip()
    assert place == str(_site(full) / "actorserve" / "actors" / "supervisor.py")


def test_a_top_level_import_of_the_folder_fails(full, tmp_path):
    """`import actors` in the source says how; in an environment there is no such package."""
    python = full / "bin" / "python"
    done = run(python, "-c", "import actors", cwd=ROOT, code=1)
    text = "ImportError: import this package as 'actorserve.actors', not as 'actors'"
    assert text in done.stderr
    done = run(python, "-c", "import actors", cwd=tmp_path, code=1)
    assert "ModuleNotFoundError" in done.stderr


def test_the_installed_command_serves(full, tmp_path):
    """From another folder: start, infer, stop."""
    command = full / "bin" / "actorserve"
    assert run(command, "--version", cwd=tmp_path).stdout.startswith("actorserve ")
    ready, log = tmp_path / "ready", tmp_path / "log"
    arguments = ["--http-port=0", "--metrics-port=0", f"--ready-file={ready}"]
    arguments.append(f"--crash-dir={tmp_path / 'crashes'}")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [command, "start", EXAMPLES, *arguments], cwd=tmp_path, stderr=stream, stdout=stream
        )
    server = Server(process, ready, log)
    try:
        server.wait_ready()
        ones = ("FP32", [4], [1, 1, 1, 1])
        status, outputs = server.infer("add_sub", {"INPUT0": ones, "INPUT1": ones})
        assert (status, outputs["OUTPUT0"]) == (200, [2, 2, 2, 2])
        assert run(command, "health", f"--url={server.address}", cwd=tmp_path).stdout == "ready\n"
        assert str(ROOT / "actorserve") not in server.log()
    finally:
        assert server.stop() == 0


# --- without extras ------------------------------------------------------------------------------


def test_start_says_what_to_install(bare, tmp_path):
    """Exit code 2 and one line, where the extras are missing."""
    command = bare / "bin" / "actorserve"
    done = run(command, "start", EXAMPLES, cwd=tmp_path, code=2)
    assert done.stderr == (
        "actorserve start: this needs the package 'uvicorn': pip install 'actorserve[serve]'\n"
    )
    assert run(command, "start", "--help", cwd=tmp_path).stdout
    assert run(command, "health", "--url=127.0.0.1:9", cwd=tmp_path, code=1).stderr


def test_embedding_needs_no_extras(bare, tmp_path):
    """The core alone runs models."""
    done = run(bare / "bin" / "python", "-c", EMBED, EXAMPLES, cwd=tmp_path)
    assert done.stdout == "[2.0, 2.0, 2.0, 2.0]\n"
