# SPDX-License-Identifier: Apache-2.0
"""Import a model: the names that it imports, its file, its class.

A model is `<repository>/<model>/<version>/<file>.py` and is imported as `<version>.<file>`, so
that the version's folder is a package (`from . import sibling`); both folders are on sys.path, so
that `import sibling` works too. One process imports one model.

The file of a Python-based backend is `<backends>/<name>/model.py`. Its folder is a package as
well, but never by its own name, which may be that of the very library that it wraps, and it alone
is on sys.path. A file of this package itself is imported as the module that it is.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from actorserve.errors import BootError
from actorserve.triton import c_names, pb_utils
from actorserve.triton.model_control import set_model_dir as set_model_dir

MODEL_CLASS = "TritonPythonModel"
_BACKEND = "triton_backend_"


_ROOT = Path(__file__).parents[1]
SHIMS = str(Path(__file__).parent / "shims")


def install() -> None:
    """Make the model API importable under the names that models use, in children of ours too."""
    if SHIMS not in sys.path:
        sys.path.append(SHIMS)  # multiprocessing's spawn hands sys.path on to its children
    sys.modules["triton_python_backend_utils"] = pb_utils
    sys.modules["c_python_backend_utils"] = c_names


def load_model_module(model_path: str) -> ModuleType:
    """Import the model's file and return its module.

    Raises BootError where there is no such file, and whatever the file itself raises.
    """
    path = Path(model_path)
    if path.suffix != ".py":
        raise BootError(f"Model name must end with '.py'. Model name is \"{path.name}\".")
    if not path.is_file():
        raise BootError(f"Python model file not found in '{model_path}'")
    folder = path.parent.absolute()
    own = _own_module(folder / path.name)
    if own:
        return importlib.import_module(own)
    is_version = folder.name.isdecimal()
    package = folder.name if is_version else _BACKEND + folder.name.replace(".", "_")
    for place in (folder, folder.parent) if is_version else (folder,):
        if str(place) not in sys.path:
            sys.path.append(str(place))
    importlib.invalidate_caches()  # a file may be younger than this process's folder listings
    _import_package(package, folder)
    name = f"{package}.{path.stem}"
    # As the real server imports it: the traceback's frames, which clients see, are the same.
    __import__(name)
    return sys.modules[name]


def _own_module(path: Path) -> str:
    """Return the name of the module of this package that a file is; "" for any other file.

    The package may have been found by another path here than where the file was named.
    """
    before, _, after = str(path).rpartition(f"/{_ROOT.name}/")
    own = _ROOT / after
    if not before or not own.is_file() or not own.samefile(path):
        return ""
    return ".".join((_ROOT.name, *Path(after).with_suffix("").parts))


def load_model_class(model_path: str) -> type[Any]:
    """Import the model's file and return its class. Raises as `load_model_module`, or BootError."""
    module = load_model_module(model_path)
    model_class: type[Any] | None = getattr(module, MODEL_CLASS, None)
    if model_class is None:
        raise BootError(
            f"AttributeError: module '{module.__name__}' has no attribute '{MODEL_CLASS}'"
        )
    return model_class


def _import_package(name: str, folder: Path) -> None:
    """Import a model file's folder as a package, from there and nowhere else.

    Left to the import system, `1` might be a folder of that name elsewhere on sys.path.
    """
    package = sys.modules.get(name)
    if package is not None and list(getattr(package, "__path__", ())) == [str(folder)]:
        return
    spec = _package_spec(name, folder)
    if spec is None or spec.submodule_search_locations is None:
        raise BootError(f"'{folder}' cannot be imported as a package")
    package = module_from_spec(spec)
    # A plain list: a namespace package's own path is looked up again whenever sys.path changes.
    package.__path__ = [str(folder)]
    sys.modules[name] = package
    if spec.loader is not None and spec.origin is not None:
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[name]
            raise


def _package_spec(name: str, folder: Path) -> ModuleSpec | None:
    """Return how the folder is imported; by another name than its own where that is asked for."""
    if name == folder.name:
        return PathFinder.find_spec(name, [str(folder.parent)])
    init = folder / "__init__.py"
    if init.is_file():
        return spec_from_file_location(name, init, submodule_search_locations=[str(folder)])
    return ModuleSpec(name, None, is_package=True)
