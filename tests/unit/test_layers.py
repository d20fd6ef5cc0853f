# SPDX-License-Identifier: Apache-2.0
"""Each room imports only from rooms below it; read from the source, so that lazy imports count."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "actorserve"

LAYERS = (
    ("__main__",),
    ("cli", "testing"),
    ("frontend",),
    ("actors",),
    ("triton",),
    ("runtime",),
    ("device",),
    ("process",),
    ("shm",),
    ("state",),
    ("wire",),
    ("errors", "config", "clock", "ids", "fault", "forking", "template"),
)
RANK = {room: len(LAYERS) - height for height, rooms in enumerate(LAYERS) for room in rooms}
BELOW_THE_SERVER = {"wire", "state", "runtime", "triton", *LAYERS[-1]}
"""What the model server stands on: the public names of these, and never what is below them."""
FORBIDDEN_IN_STATE = {"os", "time", "socket", "multiprocessing", "asyncio", "threading", "select"}


def _imports(source: str) -> list[str]:
    """Return every module that a source names in an import, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found.append(module)
            if module == "actorserve":
                found += [f"actorserve.{alias.name}" for alias in node.names]
    return found


def _room(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "actorserve" or len(parts) < 2 or parts[1] not in RANK:
        return None
    return parts[1]


def violations(path: str, source: str) -> list[str]:
    """Return what a file at `path` (relative to the package) imports and may not."""
    own = Path(path).parts[0].removesuffix(".py")
    if own in ("__init__", *LAYERS[-1]):
        return []
    found = []
    for module in _imports(source):
        room = _room(module)
        if room is not None and room != own and RANK[room] >= RANK[own]:
            found.append(f"{path} imports {module}")
        if own == "actors" and room not in (None, "actors", *BELOW_THE_SERVER):
            found.append(f"{path} imports {module}, which runtime/ keeps to itself")
        if own == "state" and module.split(".")[0] in FORBIDDEN_IN_STATE:
            found.append(f"{path} imports {module}, but machines are pure")
        if module.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
            found.append(f"{path} imports {module}, but nothing is ever unpickled")
    return found


def _sources() -> list[Path]:
    actors = (PACKAGE / "actors").glob("**/*.py")  # a link, which rglob does not follow
    return sorted({*PACKAGE.rglob("*.py"), *actors})


def test_every_room_has_a_layer():
    """A new folder or file at the top needs a place in the picture."""
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _sources()}
    assert rooms - {"__init__"} <= set(RANK)


def test_rooms_import_only_what_lies_below():
    """No arrow runs upwards or sideways."""
    found = []
    for path in _sources():
        found += violations(str(path.relative_to(PACKAGE)), path.read_text())
    assert found == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("shm/lane.py", "from actorserve.process import spawn"),
        ("wire/codec.py", "import actorserve.state.request"),
        ("process/zygote.py", "def f():\n    from actorserve.actors.stub import main"),
        ("runtime/channel.py", "from actorserve import triton"),
        ("state/health.py", "import time"),
        ("frontend/serve.py", "from actorserve.cli import main"),
        ("wire/codec.py", "import pickle"),
        ("actors/instance.py", "from actorserve.shm.arena import Arena"),
        ("actors/instance.py", "def f():\n    from actorserve.process import spawn"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str):
    """The check bites."""
    assert violations(path, source) != []
