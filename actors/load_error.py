# SPDX-License-Identifier: Apache-2.0
"""Why a model cannot be loaded, in the words that clients match on."""

from __future__ import annotations

from collections.abc import Mapping

from actorserve.errors import (
    ActorserveError,
    BootError,
    ConfigError,
    InternalError,
    InvalidArgument,
    NotFound,
)


class NoVersion(ConfigError):
    """There is none of the versions that the model's policy wants."""


class VersionsFailed(BootError):
    """Versions that did not come up, with the reason of each."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(next(iter(reasons.values())))
        self.reasons = dict(reasons)


def public_error(name: str, error: ActorserveError) -> ActorserveError:
    """Return the error that is told to who wanted `name` to be loaded."""
    if isinstance(error, NotFound):
        return error
    if isinstance(error, NoVersion):
        text = f"failed to load '{name}', no version is available: {error.message}"
        return InternalError(text)
    if isinstance(error, VersionsFailed):
        versions = "".join(
            f"version {version} is at UNAVAILABLE state: Internal: {reason};\n"
            for version, reason in error.reasons.items()
        )
        return InvalidArgument(f"load failed for model '{name}': {versions}")
    if isinstance(error, InvalidArgument):
        return InvalidArgument(
            f"failed to load '{name}', failed to poll from model repository: {error.message}"
        )
    return type(error)(f"failed to load '{name}': {error.message}")
