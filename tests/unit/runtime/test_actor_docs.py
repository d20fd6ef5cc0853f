# SPDX-License-Identifier: Apache-2.0
"""Every block of docs/actors.md is run, and writes what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "actors.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE.read_text())


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs_as_written(number: int, tmp_path: Path):
    """As a script of its own, without a warning."""
    code, expected = BLOCKS[number]
    script = tmp_path / f"block_{number}.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert expected, "each block shows what it writes"
    assert done.stdout == expected


def test_the_page_has_all_its_blocks():
    """None is written so that the pattern would pass over it."""
    assert len(BLOCKS) == PAGE.read_text().count("```python") > 5
