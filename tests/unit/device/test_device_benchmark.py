# SPDX-License-Identifier: Apache-2.0
"""benchmarks/device.py: what a machine with a GPU will run, over the fake library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.unit.device import fake_cuda

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "device.py"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env={**os.environ, **environment},
    )


@pytest.mark.slow
def test_each_check_holds_and_each_way_has_a_time(tmp_path: Path) -> None:
    """In three processes, without a GPU: the script works, its figures mean nothing here."""
    if fake_cuda.what_is_missing():
        pytest.skip(fake_cuda.what_is_missing())
    found = tmp_path / "result.json"
    done = _run("--json", str(found), LD_LIBRARY_PATH=str(fake_cuda.build()))
    assert done.returncode == 0, done.stdout + done.stderr
    result = msgspec.json.decode(found.read_bytes())
    assert "a fake device" in done.stdout.split("\n")[0]
    assert len(result["checks"]) >= 2
    assert all(right for held in result["checks"].values() for right in held.values())
    assert len(result["times_us"]) == 5
    assert all(min(times) > 0 for times in result["times_us"].values())
    assert not result["supervisor_has_cuda"]


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    """Exit code 2, no stack."""
    done = _run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no device to run on: no CUDA: ")
    assert len(done.stderr.strip().split("\n")) == 1
