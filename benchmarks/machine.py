# SPDX-License-Identifier: Apache-2.0
"""Describe the machine that a result was made on: without it, the figures mean nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

import msgspec

PACKAGES = (
    *("actorserve", "numpy", "msgspec", "uvloop", "uvicorn", "httptools"),
    *("pyzmq", "mosec", "xoscar", "pykka"),
)
ROOT = Path(__file__).resolve().parent.parent


class Machine(msgspec.Struct, frozen=True):
    """What a reader needs to judge the figures. Memory in MiB."""

    cpu_model: str
    cores: int
    memory_mib: int
    kernel: str
    python: str
    tools: list[str]
    packages: dict[str, str]
    commit: str
    shared_memory: str


def describe() -> Machine:
    """Return the description of this machine and of what is installed."""
    from actorserve.shm.segment import backend

    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu_model=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=pages * page_bytes >> 20,
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()} ({_build()})",
        tools=[name for name in ("gcc", "wrk") if shutil.which(name)],
        packages={name: version for name in PACKAGES if (version := _version(name))},
        commit=_commit(),
        shared_memory=backend(),
    )


def load_average() -> float:
    """Return the load average over the last minute: how busy the machine is beside us."""
    return round(os.getloadavg()[0], 2)


def _build() -> str:
    """Say how the interpreter was configured: without optimizations it is a good deal slower."""
    flags = str(sysconfig.get_config_var("CONFIG_ARGS"))
    return f"{'with' if '--enable-optimizations' in flags else 'without'} --enable-optimizations"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit of the working tree, "" where there is none to ask."""
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout.strip()
