# SPDX-License-Identifier: Apache-2.0
"""The examples of the framework: one command each, short, and right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def run(name: str, *arguments: str, cwd: Path | None = None) -> list[str]:
    """Run an example and return the lines that it writes."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=cwd,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_the_word_count_pool_counts(tmp_path: Path):
    """Files over two processes, added up."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("the quick the lazy\n" * number + "The end\n")
    lines = run("wordcount.py", *[str(path) for path in sorted(tmp_path.glob("*.txt"))])
    assert lines[:2] == ["    25  the", "    10  quick"]


def test_the_crawler_follows_links_and_keeps_its_rate(tmp_path: Path):
    """Each page once, links to nowhere and circles included."""
    (tmp_path / "a.md").write_text("[b](b.md) [c](sub/c.md#part) [gone](gone.md) [me](a.md)")
    (tmp_path / "b.md").write_text("[a](a.md) [web](https://example.org)")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.md").write_text("[d](d.md)")
    (tmp_path / "sub" / "d.md").write_text("nothing")
    assert run("crawler.py", "a.md", cwd=tmp_path) == ["a.md", "b.md", "sub/c.md", "sub/d.md"]


def test_the_pipeline_brings_every_image_through():
    """Arrays of 8 MB through two processes, in their order."""
    assert run("pipeline.py") == ["0.0 1.0 2.0 3.0 4.0 5.0 6.0 7.0"]


@pytest.mark.parametrize("name", ["wordcount.py", "crawler.py", "pipeline.py"])
def test_an_example_is_short(name: str):
    """Under forty lines."""
    assert len((EXAMPLES / name).read_text().splitlines()) < 40
