# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: they run, and whatever they cannot measure has a row that says why."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.actor_peers import PYKKA, XOSCAR, pykka_actor, xoscar_actor
from benchmarks.report import Result
from benchmarks.sampling import Contender, Effort, Figures, Findings, take_turns

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_row_of_the_actors_has_a_figure(tmp_path: Path) -> None:
    """A quick run of the actors' rows, without peers, measures every one of them."""
    found = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--quick", "--alone"]
    done = subprocess.run(
        [*command, "--only", "actors", "--json", str(found)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = msgspec.json.decode(found.read_bytes(), type=Result).rows
    assert len(rows) > 20
    assert not {row.name: row.ours.reason for row in rows if row.ours.reason}
    assert all(value > 0 for row in rows for value in row.ours.values)
    assert not [row.name for row in rows if row.ours.median is None or row.beside]


@pytest.mark.parametrize("label", [PYKKA, XOSCAR])
def test_missing_peer_has_a_row_that_says_so(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cannot be imported is a reason in its rows, not an error."""
    monkeypatch.setitem(sys.modules, label.lower(), None)

    async def start_xoscar() -> None:
        async with xoscar_actor(is_process=False):
            pass

    def turn() -> Figures:
        if label == XOSCAR:
            asyncio.run(start_xoscar())
        else:
            with pykka_actor():
                pass
        return {"a row": 1.0}

    findings = Findings()
    take_turns(findings, [Contender(label, ("a row",), turn)], Effort(is_quick=True))
    assert findings.reasons == {"a row": {label: f"{label} is not installed"}}
    assert not findings.values


def test_alone_leaves_the_peers_out() -> None:
    """With --alone nobody else has a turn."""

    def turn() -> Figures:
        raise AssertionError("a peer was measured")

    findings = Findings()
    take_turns(findings, [Contender("a peer", ("a row",), turn)], Effort(is_alone=True))
    assert not findings.values
    assert not findings.reasons


def test_name_of_no_row_is_refused() -> None:
    """A name chosen with --only that begins no row's name is wrong usage."""
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--only", "actor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "no such row: actor" in done.stderr
