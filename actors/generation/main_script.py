# SPDX-License-Identifier: Apache-2.0
"""Engines that are written in the program itself: what a rank's process can import them as.

What always holds: while a rank imports an engine's module, that module starts no executor; a
script that has no guard would otherwise start itself for ever.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from actorserve.errors import InvalidArgument

MAIN = "__main__"
_importing: list[str] = []  # the engine whose module this process imports now


def importable_name(name: str) -> str:
    """Return the name of an engine as another process understands it.

    "__main__:X" becomes the name that the program itself has as a module. Raises InvalidArgument
    where it has none: typed in, read from standard input, or in a file that is no module.
    """
    module, _, class_name = name.partition(":")
    if module != MAIN:
        return name
    found = _name_of_main()
    if found is None:
        raise InvalidArgument(
            f"engine {name!r}: a process of its own cannot import it, since the program is no "
            f"module that Python finds: put {class_name} into one and name it 'module:{class_name}'"
            ", or use ExecutorConfig(worker='thread')"
        )
    return f"{found}:{class_name}"


def _name_of_main() -> str | None:
    main = sys.modules[MAIN]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # run with -m
        return str(spec.name)
    if file is None:
        return None
    try:
        found = importlib.util.find_spec(Path(file).stem)
    except (ImportError, ValueError):
        return None
    origin = None if found is None else found.origin
    is_it = origin is not None and Path(origin).exists() and Path(origin).samefile(file)
    return Path(file).stem if is_it else None


@contextmanager
def importing(name: str) -> Iterator[None]:
    """Import an engine's module in a rank."""
    _importing.append(name)
    try:
        yield
    finally:
        _importing.pop()


def check_not_importing() -> None:
    """Raise InvalidArgument if an engine's module is being imported in this rank."""
    if _importing:
        raise InvalidArgument(
            f"engine {_importing[-1]!r}: its module starts an executor when it is imported; put "
            "what the program does under: if __name__ == '__main__':"
        )
