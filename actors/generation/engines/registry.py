# SPDX-License-Identifier: Apache-2.0
"""Engines by name: built in, from an entry point, or "module:Class".

An engine is imported when it is first asked for, so that its libraries cost only who uses it.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from actorserve.errors import InvalidArgument

ENTRY_POINT_GROUP = "actorserve.engines"

_HERE = "actorserve.actors.generation.engines"
BUILT_IN: dict[str, str] = {
    "scripted": f"{_HERE}.scripted:Scripted",
    "tinygpt": f"{_HERE}.tinygpt:TinyGPT",
    "smollm2": f"{_HERE}.smollm2:SmolLM2",
    "llama_cpp": f"{_HERE}.llama_cpp:LlamaCpp",
    "transformers": f"{_HERE}.transformers_engine:Transformers",
}


def engine_names() -> list[str]:
    """Return the names of all engines that are known here without a module's name."""
    return sorted({*BUILT_IN, *(each.name for each in entry_points(group=ENTRY_POINT_GROUP))})


def engine_class(name: str) -> type[Any]:
    """Return the class of an engine.

    Raises InvalidArgument for a name that leads to none; what the engine's module raises while it
    is imported (a missing package, say) is passed on.
    """
    target = BUILT_IN.get(name)
    if target is None:
        for each in entry_points(group=ENTRY_POINT_GROUP):
            if each.name == name:
                target = each.value
    if target is None:
        target = name
    module_name, colon, class_name = target.partition(":")
    if not (module_name and colon and class_name):
        raise InvalidArgument(
            f"there is no engine {name!r}: expected one of {', '.join(engine_names())},"
            " or 'module:Class'"
        )
    return _class_in(module_name, class_name, name)


def _class_in(module_name: str, class_name: str, name: str) -> type[Any]:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it needs is not
        raise InvalidArgument(f"engine {name!r}: there is no module {module_name!r}") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise InvalidArgument(
            f"engine {name!r}: the module {module_name!r} has no class {class_name!r}"
        )
    return found
