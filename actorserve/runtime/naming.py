# SPDX-License-Identifier: Apache-2.0
"""How a class is named to another process, and found there: "module:qualname".

A script that is run is the module "__main__" in its own process and nowhere else. Another process
loads it from its path under another name, so that what stands under
`if __name__ == "__main__":` does not run again. On the wire its name is "__main__" all the same,
or, where it was run with `python -m`, the name that this made of it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from actorserve.errors import ActorserveError, BootError, InvalidArgument

MAIN = "__main__"
MAIN_ALIAS = "__actorserve_main__"

_names: dict[type, str] = {}
_classes: dict[str, type] = {}
_main_path: str | None = None  # in a process of an actor: the script of its system
_is_loading = False


def name_of(kind: type) -> str:
    """Return the name under which another process finds this class.

    Raises InvalidArgument, in one line, where none can: a class within a function, or one that
    was typed into an interactive session.
    """
    name = _names.get(kind)
    if name is None:
        name = _names[kind] = find_name(kind)
    return name


def find_name(kind: type) -> str:
    """Return what `name_of` does, but look again: after `python -i script.py`, it is none."""
    qualname = kind.__qualname__
    if "<locals>" in qualname:
        raise InvalidArgument(
            f"{qualname} is defined inside a function, where no other process can find it: "
            "define it at the top of a module, or use Loop() or Thread()"
        )
    module = kind.__module__
    if module == MAIN_ALIAS:
        module = MAIN
    if module == MAIN:
        module = _main_module_name() or MAIN
        if module == MAIN and main_path() is None:
            path = getattr(sys.modules.get(MAIN), "__file__", None) or "<stdin>"
            where = "an interactive session" if path.startswith("<") else path
            raise InvalidArgument(
                f"{qualname} is defined in {where}, from which no other process "
                "can load it: put it into a file and import it, or use Loop() or Thread()"
            )
    name = f"{module}:{qualname}"
    if _find(name) is not kind:
        raise InvalidArgument(f"{module} has another {qualname} than this one: which is meant?")
    return name


def resolve(name: str) -> type:
    """Import the class of that name. Raises BootError where there is none, with the reason."""
    found = _classes.get(name)
    if found is None:
        found = _find(name)
        if not isinstance(found, type):
            raise BootError(f"{name} is no class")
        _classes[name] = found
    return found


def _find(name: str) -> Any:
    module_name, _, qualname = name.partition(":")
    found: Any = _module(module_name)
    for part in qualname.split("."):
        found = getattr(found, part, None)
        if found is None:
            if module_name == MAIN and _main_path is not None:
                raise BootError(
                    f"{_main_path} has no {qualname!r} when another process loads it: "
                    "define it at the top of the file, not under its guard or in a session"
                )
            raise BootError(f"module {module_name!r} has no {qualname!r}")
    return found


def _module(name: str) -> ModuleType:
    if name == MAIN:
        return _main_module()
    if name == _main_module_name():
        return sys.modules[MAIN]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise BootError(f"there is no module {error.name!r} in this process") from None
    except ValueError as error:
        raise BootError(f"{name!r} is no name of a module: {error}") from None


# --- the script ----------------------------------------------------------------------------------


def main_path() -> str | None:
    """Return the path of the script that "__main__" names; None in an interactive session."""
    if _main_path is not None:
        return _main_path
    path = getattr(sys.modules.get(MAIN), "__file__", None)
    return str(Path(path).absolute()) if path and Path(path).is_file() else None


def set_main_path(path: str | None) -> None:
    """Say which script "__main__" names from now on: in the process of an actor."""
    global _main_path
    _main_path = path


def check_not_loading() -> None:
    """Refuse to go on in a script that is only being loaded. Raises BootError, in one line."""
    if _is_loading:
        raise BootError(
            f"the process of an actor loads {_main_path} and finds it starting an ActorSystem: "
            'put what the script runs under `if __name__ == "__main__":`'
        )


def _main_module_name() -> str | None:
    """Return the name that `python -m` found this process's main module by."""
    if _main_path is not None:
        return None
    spec = getattr(sys.modules.get(MAIN), "__spec__", None)
    return spec.name if spec is not None else None


def _main_module() -> ModuleType:
    if _main_path is None:
        return sys.modules[MAIN]
    module = sys.modules.get(MAIN_ALIAS)
    return _load(_main_path) if module is None else module


def _load(path: str) -> ModuleType:
    """Run the script under its other name, leaving no compiled file beside it."""
    global _is_loading
    module = ModuleType(MAIN_ALIAS)
    module.__file__ = path
    sys.modules[MAIN_ALIAS] = module
    _is_loading = True
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))
    except BaseException as error:
        del sys.modules[MAIN_ALIAS]
        if isinstance(error, (ActorserveError, Exception)):
            raise
        raise BootError(f"{path} ended while it was being loaded: {error!r}") from None
    finally:
        _is_loading = False
    return module
