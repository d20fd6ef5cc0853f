# SPDX-License-Identifier: Apache-2.0
"""Archives of Python environments that run wherever they are unpacked, made on the spot."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

LEFT_OUT = shutil.ignore_patterns(
    "test", "tests", "__pycache__", "config-*", "idlelib", "ensurepip", "lib2to3", "site-packages"
)


def make_venv(folder: Path, python: str = sys.executable) -> Path:
    """Make a venv that sees the tests' own packages, with a copy of the interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", "--copies", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (site / "special.py").write_text("WORD = 'one'\n")
    return folder


def pack(folder: Path, archive: Path, compression: str = "gz") -> Path:
    """Pack what is in the folder; the archive is replaced in one step."""
    fresh = archive.with_name(f".{archive.name}")
    level = {"compresslevel": 1} if compression in ("gz", "bz2") else {}
    with tarfile.open(fresh, f"w:{compression}", **level) as tar:  # type: ignore[call-overload]
        tar.add(folder, ".")
    fresh.replace(archive)
    return archive


def interpreter(version: str) -> Path:
    """Return the installation of another Python of this machine; skip where there is none."""
    for found in sorted(Path.home().glob(f".pyenv/versions/{version}.*")):
        if (found / "bin" / f"python{version}").exists():
            return found
    pytest.skip(f"there is no Python {version} to copy here")


def make_prefix(version: str, folder: Path) -> Path:
    """Copy a Python and install what a stub needs, as conda-pack would leave it; skip offline."""
    source = interpreter(version)
    library = f"lib/python{version}"
    shutil.copytree(source / library, folder / library, ignore=LEFT_OUT, symlinks=True)
    for shared in source.glob("lib/libpython3*"):
        shutil.copy2(shared, folder / "lib", follow_symlinks=False)
    (folder / "bin").mkdir()
    shutil.copy2(source / "bin" / f"python{version}", folder / "bin")
    (folder / "bin" / "python").symlink_to(f"python{version}")
    (folder / "bin" / "activate").write_text("")
    (folder / "conda-meta").mkdir()
    installed = subprocess.run(
        [source / "bin" / f"python{version}", "-m", "pip", "install", "-q", "--no-compile"]
        + ["--target", folder / library / "site-packages", "numpy", "msgspec"],
        capture_output=True,
        check=False,
    )
    if installed.returncode:
        pytest.skip("numpy and msgspec cannot be installed here (offline?)")
    return folder
