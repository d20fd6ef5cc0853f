# SPDX-License-Identifier: Apache-2.0
"""An engine that is written in the program itself, in processes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from actorserve.actors.generation import ExecutorConfig, GenerationExecutor, SamplingParams
from tests.generation.rank_engines import Counting

class Mine(Counting):
    pass

def main():
    with GenerationExecutor.create("__main__:Mine") as executor:
        print(executor.generate([1], SamplingParams(max_tokens=3)).outputs[0].token_ids)
"""
GUARDED = PROGRAM + '\nif __name__ == "__main__":\n    main()\n'
ROOT = Path(__file__).parents[2]


def _run(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )


@pytest.mark.parametrize("way", ["path", "module"])
def test_an_engine_of_the_program_itself_is_found(tmp_path: Path, way: str) -> None:
    """As a script, or run with -m: the ranks import the program as a module."""
    path = tmp_path / "program.py"
    path.write_text(GUARDED)
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runpy; "
    script += "runpy.run_module('program', run_name='__main__', alter_sys=True)"
    done = _run(str(path)) if way == "path" else _run("-c", script)
    assert done.stdout == "[2, 3, 4]\n", done.stderr


def test_a_program_without_a_guard_does_not_start_itself_for_ever(tmp_path: Path) -> None:
    """The rank refuses, and says what to do."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM + "\nmain()\n")
    done = _run(str(path))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "engine 'program:Mine': its module starts an executor when it is imported; put what the"
        " program does under: if __name__ == '__main__':"
    )


def test_an_engine_that_no_process_can_import_is_refused() -> None:
    """What was typed in is no module."""
    done = _run("-", text=PROGRAM + "\nmain()\n")
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "engine '__main__:Mine': a process of its own cannot import it" in said
    assert "put Mine into one and name it 'module:Mine', or use ExecutorConfig(worker=" in said
