# SPDX-License-Identifier: Apache-2.0
"""What a model can ask of the server about models, itself included.

Whoever runs the model sets the controller: a stub does so from before `initialize` until
`finalize`. At all other times, and where no stub is, what is asked for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actorserve.errors import ActorserveError, Unavailable
from actorserve.triton.error import TritonModelException, exact_str

_model_dir: str | None = None


def set_model_dir(path: str | None) -> None:
    """Say which folder `get_model_dir` answers with; the stub does it before the import."""
    global _model_dir
    _model_dir = path


def get_model_dir() -> str:
    """Return the absolute path of the running model's version folder."""
    if _model_dir is None:
        raise TritonModelException("get_model_dir is for models that a server runs.")
    return _model_dir


class Controller(Protocol):
    """Asks the server; any thread may use it. All methods wait, and raise ActorserveError."""

    def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload a model; returns when it serves."""

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Have a model take no new requests."""

    def is_ready(self, name: str, version: str) -> bool:
        """Whether a version is ready; "" is the highest one."""


_controller: Controller | None = None


def set_controller(controller: Controller | None) -> None:
    """Let models control models with this from now on; None refuses."""
    global _controller
    _controller = controller


def _current() -> Controller:
    if _controller is None:
        raise Unavailable(
            "a model that a server runs can do this in initialize and execute, "
            "not in auto_complete_config and finalize"
        )
    return _controller


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, and wait until it serves.

    `config` is JSON that counts instead of the model's own configuration; `files`
    ("file:1/model.py") are then all that the model's directory holds. Raises TritonModelException.
    """
    name, config = exact_str(model_name, "model_name"), exact_str(config, "config")
    contents = {}
    for key, content in _dict(files).items():
        if not isinstance(content, bytes):
            raise TypeError(f"the content of '{key}' must be bytes, got {type(content)}")
        contents[exact_str(key, "a name in files")] = content
    try:
        _current().load(name, config, contents)
    except ActorserveError as error:
        raise TritonModelException(f"Failed to load model: {error.message}") from None


def _dict(files: object) -> Mapping[str, bytes]:
    if files is None:
        return {}
    if not isinstance(files, dict):
        raise TypeError(f"files must be a dict, got {type(files)}")
    return files


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model; returns when it takes no new requests, and those it has go on to their end.

    Raises TritonModelException.
    """
    name = exact_str(model_name, "model_name")
    try:
        _current().unload(name, bool(unload_dependents))
    except ActorserveError as error:
        raise TritonModelException(f"Failed to unload model: {error.message}") from None


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Tell whether a version of a model, or the highest one, is ready.

    Raises TritonModelException for a model that is nowhere and a version that is no number.
    """
    name, version = exact_str(model_name, "model_name"), exact_str(model_version, "model_version")
    try:
        return _current().is_ready(name, version)
    except ActorserveError as error:
        raise TritonModelException(f"Failed to check model readiness: {error.message}") from None
