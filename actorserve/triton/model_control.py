# SPDX-License-Identifier: Apache-2.0
"""What a model can ask of the server about models, itself included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from actorserve.triton.error import TritonModelException

_TEXT = "model control from a model is not offered by this version of actorserve."

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


def load_model(
    model_name: str, config: str = "", files: Mapping[str, bytes] | None = None
) -> NoReturn:
    """Load a model: not offered yet."""
    raise TritonModelException(f"Failed to load model: {_TEXT}")


def unload_model(model_name: str, unload_dependents: bool = False) -> NoReturn:
    """Unload a model: not offered yet."""
    raise TritonModelException(f"Failed to unload model: {_TEXT}")


def is_model_ready(model_name: str, model_version: str = "") -> NoReturn:
    """Tell whether a model is ready: not offered yet."""
    raise TritonModelException(f"Failed to check model readiness: {_TEXT}")
