# SPDX-License-Identifier: Apache-2.0
"""What children of other interpreters are started with."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

import actorserve
from actorserve.errors import BootError, InvalidArgument
from actorserve.process.environment import (
    PackageFolder,
    check_interpreter,
    child_environment,
    foreign_environment,
)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A private folder, made under the test's own temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = PackageFolder()
    yield folder
    folder.close()


def test_folder_holds_the_package_alone(folder):
    """It is made once, private, with one link in it, and gone after close."""
    path = folder.path()
    assert folder.path() == path
    assert [entry.name for entry in path.iterdir()] == ["actorserve"]
    assert (path / "actorserve").resolve() == Path(actorserve.__file__).resolve().parent
    assert path.stat().st_mode & 0o777 == 0o700
    folder.close()
    folder.close()
    assert not path.exists()
    assert Path(actorserve.__file__).exists()


def test_abandoned_folder_is_swept_and_a_used_one_stays(folder, kit):
    """Row 51: what a killed supervisor left is removed by the next, what is in use is not."""
    pid = kit.forked(lambda: (PackageFolder().path(), os.kill(os.getpid(), signal.SIGKILL)))
    os.waitpid(pid, 0)
    (abandoned,) = _folders()
    used = folder.path()
    assert not abandoned.exists()
    other = PackageFolder()
    assert _folders() != [other.path()]
    assert used.exists()
    other.close()


def _folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("actorserve-path-*"))


def test_disowned_folder_stays(folder):
    """A fork of the owner forgets the folder without removing it."""
    path = folder.path()
    folder.disown()
    folder.close()
    assert path.exists()
    assert folder.path() != path  # and sweeps the first, which nobody holds now
    assert not path.exists()


def test_child_gets_the_environment_of_now(monkeypatch):
    """The host's variables of this moment, with the spec's over them."""
    monkeypatch.setenv("FLAVOUR", "host")
    os.environb[b"BYTES"] = b"\xff"
    try:
        environment = child_environment({"FLAVOUR": "own", "NEW": "ü"})
    finally:
        del os.environb[b"BYTES"]
    assert environment[b"FLAVOUR"] == b"own"
    assert environment[b"NEW"] == "ü".encode()
    assert environment[b"BYTES"] == b"\xff"
    assert environment[b"PATH"] == os.environb[b"PATH"]


@pytest.mark.parametrize("extra", [{"": "x"}, {"A=B": "x"}, {"A\0": "x"}, {"A": "\0"}])
def test_impossible_variable_is_refused(extra):
    """Names and values that no environment holds are the caller's error."""
    with pytest.raises(InvalidArgument, match="environment variable"):
        child_environment(extra)


@pytest.mark.parametrize(
    ("marker", "variable"), [("pyvenv.cfg", b"VIRTUAL_ENV"), ("conda-meta", b"CONDA_PREFIX")]
)
def test_foreign_interpreter_is_activated(monkeypatch, tmp_path, marker, variable):
    """A venv or conda environment around it is named and first in PATH; ours is forgotten."""
    for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.setenv(name, "/ours")
    if marker == "conda-meta":
        (tmp_path / marker).mkdir()
    else:
        (tmp_path / marker).write_text("")
    python = str(tmp_path / "bin" / "python")
    environment = foreign_environment(python, {"PYTHONPATH": "/theirs"}, Path("/folder"))
    assert environment[b"PYTHONPATH"] == b"/folder:/theirs"
    assert environment[variable] == os.fsencode(tmp_path)
    assert environment[b"PATH"].split(b":")[0] == os.fsencode(tmp_path / "bin")
    assert b"PYTHONHOME" not in environment
    assert b"/ours" not in environment.values()


def test_libraries_of_an_environment_come_first(monkeypatch, tmp_path):
    """Before the host's, where it has any; the system's own need no naming."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/host")
    python = tmp_path / "bin" / "python"
    assert foreign_environment(str(python), {}, tmp_path)[b"LD_LIBRARY_PATH"] == b"/host"
    (tmp_path / "lib").mkdir()
    first = os.fsencode(tmp_path / "lib")
    given = foreign_environment(str(python), {}, tmp_path)
    assert given[b"LD_LIBRARY_PATH"] == first + b":/host"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert foreign_environment(str(python), {}, tmp_path)[b"LD_LIBRARY_PATH"] == first
    assert b"LD_LIBRARY_PATH" not in foreign_environment("/usr/bin/python3", {}, tmp_path)


@pytest.mark.parametrize("python", ["python3", "/nowhere", "/tmp", os.devnull, __file__])
def test_what_is_no_interpreter_is_refused(python):
    """A relative path, a folder, a file that may not be executed: a boot error each."""
    with pytest.raises(BootError, match="interpreter"):
        check_interpreter(python)


def test_this_interpreter_is_one():
    """Our own executable passes."""
    check_interpreter(sys.executable)
