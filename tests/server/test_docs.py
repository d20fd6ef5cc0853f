# SPDX-License-Identifier: Apache-2.0
"""The README and docs/*.md say what is true: their programs run and write what the pages show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
BLOCKS = [
    pytest.param(*block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.findall(page.read_text()), 1)
]
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]*))?\)")


@pytest.mark.parametrize(("code", "expected"), BLOCKS)
def test_a_block_of_a_page_runs_as_written(code: str, expected: str, tmp_path: Path):
    """As a script of its own in the root of the repository, without a warning."""
    script = tmp_path / "block.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = _with_known_exits(done.stdout, expected)
    assert shown == expected, "a page shows all that its program writes"


def _with_known_exits(output: str, expected: str) -> str:
    """Return the output with the exits that a busy machine told too late, as the page has them."""
    lines = output.splitlines(keepends=True)
    for number, wanted in enumerate(expected.splitlines(keepends=True)[: len(lines)]):
        known, unknown, _ = lines[number].partition("exit status unknown")
        if unknown and wanted.startswith(f"{known}killed by "):
            lines[number] = wanted
    return "".join(lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_all_its_blocks(page: Path):
    """None is written so that the pattern would pass over it."""
    text = page.read_text()
    assert len(BLOCK.findall(text)) == text.count("```python")
    assert text.count("```") % 2 == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page: Path):
    """To a file of the repository, and to a heading of it where one is named."""
    for file, heading in LINK.findall(page.read_text()):
        target = (page.parent / file).resolve()
        assert target.exists(), file
        assert target.is_relative_to(ROOT)
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{file}#{heading}"
