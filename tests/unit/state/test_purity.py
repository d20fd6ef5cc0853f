# SPDX-License-Identifier: Apache-2.0
"""The room of pure machines stays pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import actorserve.state

ROOM = Path(actorserve.state.__file__).parent
ALLOWED = {
    "__future__",
    "bisect",
    "collections",
    "enum",
    "heapq",
    "math",
    "msgspec",
    "typing",
    "actorserve.errors",
    "actorserve.state",
}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_module_imports_neither_clock_nor_io(path: Path) -> None:
    """A machine gets its time and chance with its events, and touches nothing outside."""
    for name in _imports(path):
        parts = name.split(".")
        assert {name, ".".join(parts[:2]), parts[0]} & ALLOWED, f"{path.name} imports {name}"
