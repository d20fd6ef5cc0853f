# SPDX-License-Identifier: Apache-2.0
"""docs/generation.md has the tables that the code has."""

from __future__ import annotations

import runpy
from pathlib import Path

from actorserve.actors.generation.backend import metrics

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_are_those_of_the_code() -> None:
    """`python docs/generate_generation.py` writes them."""
    page = (DOCS / "generation.md").read_text()
    assert runpy.run_path(str(DOCS / "generate_generation.py"))["render"](page) == page


def test_every_metric_is_on_the_page() -> None:
    """By its full name."""
    page = (DOCS / "generation.md").read_text()
    for name in (*metrics.GAUGES, *metrics.COUNTERS, *metrics.HISTOGRAMS):
        assert f"| `actorserve_generation_{name}` |" in page
