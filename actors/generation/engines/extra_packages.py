# SPDX-License-Identifier: Apache-2.0
"""Packages that only one engine needs: imported when it is used, with a word on how to get them."""

from __future__ import annotations

import importlib
from typing import Any

from actorserve.errors import Unsupported

__all__ = ["extra_package"]


def extra_package(name: str, engine: str, install: str) -> Any:
    """Import a package. Raises Unsupported, which says what to install, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unsupported(
            f"engine {engine!r} needs the package {name!r} ({error}); install it: {install}"
        ) from error
