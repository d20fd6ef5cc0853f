# SPDX-License-Identifier: Apache-2.0
"""Run one section in a process of its own, and make sure that nothing of it is left.

The section leads a session, so that its group can be killed whatever happened; temporary files
lie in a folder that is removed. What it found comes back in a file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.machine import ROOT
from benchmarks.rows import Section
from benchmarks.sampling import OURS, Effort, Findings, reason_of

END_S = 20.0


def run(section: Section, effort: Effort) -> Findings:
    """Return what the section found; where it failed, its rows lack our figure with the reason."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found = Path(folder) / "findings.json"
        reason = _run_process(section, effort, Path(folder), found)
        findings = Findings()
        if found.exists():
            findings = msgspec.json.decode(found.read_bytes(), type=Findings)
    if reason:
        findings.lack([row.name for row in section.rows], OURS, reason)
    return findings


def _run_process(section: Section, effort: Effort, folder: Path, found: Path) -> str:
    """Run it to its end; return what went wrong, or nothing."""
    arguments = [section.entry, str(found), msgspec.json.encode(effort).decode()]
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    log = folder / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.section", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            start_new_session=True,
        )
        limit_s = section.limit_s
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"no result within {limit_s:g} s"
        finally:
            _end(process)
    if code == 0:
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"ended with {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the section and its group; servers that it started get the time to end their own."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: list[str]) -> int:
    """Be the section: `module:function FILE EFFORT`, the effort as JSON."""
    entry, found, effort = arguments
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # `finally` blocks run
    module, _, function = entry.partition(":")
    measure: Callable[[Effort], Findings] = getattr(importlib.import_module(module), function)
    try:
        findings = measure(msgspec.json.decode(effort, type=Effort))
    except Exception as error:
        traceback.print_exc()
        print(reason_of(error), file=sys.stderr)  # the last line is what the table shows
        return 1
    Path(found).write_bytes(msgspec.json.encode(findings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
