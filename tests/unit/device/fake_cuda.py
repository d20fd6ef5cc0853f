# SPDX-License-Identifier: Apache-2.0
"""The cuda driver's tests without a GPU: build the fake library, and run a test in a fork.

cuda-bindings loads the library once in a process, and no fork of a process that used it can: so a
test with CUDA runs in a fork of pytest, which loads the fake under the real one's name before
cuda-bindings asks for it, and its reports come back by a file. pytest itself never calls it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import math
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from actorserve.device.driver import DeviceDriver

SOURCE = Path(__file__).parent / "fakecuda" / "fakecuda.c"
ENVIRONMENT = {"FAKECUDA_DEVICES": "2", "FAKECUDA_GRANULARITY": "4096"}
"""Slabs as small as the emulated driver's, so that the same numbers are right for both."""

_folder: tempfile.TemporaryDirectory[str] | None = None


def what_is_missing() -> str:
    """Return why there can be no fake here, or nothing."""
    if shutil.which("gcc") is None:
        return "no gcc to build the fake libcuda with"
    if importlib.util.find_spec("cuda") is None:
        return "cuda-bindings is not installed; it needs Python 3.11"
    return ""


@functools.lru_cache(maxsize=1)
def build() -> Path:
    """Build the library, once for this pytest; return where it lies, for LD_LIBRARY_PATH."""
    global _folder
    _folder = tempfile.TemporaryDirectory(prefix="actorserve-fakecuda-")
    target = Path(_folder.name) / "libcuda.so.1"
    flags = (
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wno-misleading-indentation",
    )
    subprocess.run(
        ["gcc", *flags, f"-Wl,-soname,{target.name}", "-o", target, SOURCE, "-lpthread"],
        check=True,
        timeout=120,
    )
    return target.parent


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """Load the fake, so that cuda-bindings finds it loaded; return it for its own functions."""
    found = ctypes.CDLL(str(build() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    found.fakecuda_limit.argtypes = [ctypes.c_uint64]
    found.fakecuda_used.restype = ctypes.c_uint64
    return found


def make_cuda(*, devices: int = 2, capacity_bytes: int = 1 << 40, delay_s: float = 0.0) -> Any:
    """Make a driver on the fake. What is said of the device holds for the whole process."""
    from actorserve.device.cuda import CudaDriver

    assert devices <= 2
    fake = library()
    driver: DeviceDriver = CudaDriver()
    fake.fakecuda_limit(capacity_bytes)
    if delay_s:
        fake.fakecuda_delay(-1 if math.isinf(delay_s) else int(delay_s * 1000))
    return driver


def wants_fork(item: pytest.Item) -> bool:
    """Tell whether a test is one with CUDA, which could run here."""
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("driver_kind") == "cuda" and not what_is_missing()


def forget_what_is_lost() -> None:
    """Close what the fake has open: of a lost device, nothing can be closed but by the end."""
    for path in Path("/proc/self/fd").iterdir():
        try:
            if str(path.readlink()).startswith("/memfd:fakecuda"):
                os.close(int(path.name))
        except OSError:
            continue


def run_in_fork(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test in a fork and report as if it had run here."""
    import cuda.bindings.driver  # noqa: F401 (once here, and not in every fork)

    build()
    hook = item.config.hook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with tempfile.TemporaryFile() as file:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _be_the_fork(item, file.fileno())
        status = os.waitpid(pid, 0)[1]
        file.seek(0)
        text = file.read()
    for each in json.loads(text) if text else [_died(item, status)]:
        report = each
        if isinstance(each, dict):
            report = hook.pytest_report_from_serializable(config=item.config, data=each)
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what ended with this test, ends here too
    return True


def _be_the_fork(item: pytest.Item, fd: int) -> None:
    try:
        os.environ.update(ENVIRONMENT)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        library()
        # The module as the next item: this test's own fixtures end here, wider ones are pytest's.
        reports = runtestprotocol(item, log=False, nextitem=item.parent)  # type: ignore[arg-type]
        serialize = item.config.hook.pytest_report_to_serializable
        data = [serialize(config=item.config, report=report) for report in reports]
        os.write(fd, json.dumps(data).encode())
    finally:
        os._exit(0)


def _died(item: pytest.Item, status: int) -> pytest.TestReport:
    text = f"the fork of the test died: wait status {status}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
