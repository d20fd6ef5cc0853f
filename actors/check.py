# SPDX-License-Identifier: Apache-2.0
"""What would load, what would not and why: `actorserve check`, without serving anything.

By itself nothing of a model's code runs: configuration, versions and files are looked at. A dry
run starts the server without a front end, so that every model is imported and initialized once.
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import msgspec

from actorserve.actors.loader import check_source
from actorserve.actors.repository import Repository
from actorserve.actors.supervisor import Supervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError


class Finding(msgspec.Struct, frozen=True):
    """What was found of one model; an empty `problem` means that it would load."""

    model: str
    versions: str
    problem: str
    warnings: tuple[str, ...] = ()


def check(settings: Settings, *, is_dry_run: bool) -> list[Finding]:
    """Look at every model of the settings' repositories. Raises NotFound for a missing one."""
    repository = Repository(settings.model_repository)
    repository.check()
    findings = [_look(repository, name, settings) for name in repository.scan()]
    if not is_dry_run:
        return findings
    failures = asyncio.run(_initialize_all(settings))
    return [
        msgspec.structs.replace(each, problem=each.problem or failures.get(each.model, ""))
        for each in findings
    ]


def _look(repository: Repository, name: str, settings: Settings) -> Finding:
    entry = repository.scan()[name]
    try:
        source = repository.read(entry)
        versions = ", ".join(map(str, source.versions)) or "-"
    except ActorserveError as error:
        return Finding(name, "-", error.message)
    try:
        warnings, files = check_source(source, settings)
    except ActorserveError as error:
        return Finding(name, versions, error.message)
    return Finding(name, versions, _syntax_problem(files), tuple(warnings))


def _syntax_problem(files: list[Path]) -> str:
    """Return what is wrong with the text of a model file, or "" for nothing."""
    for path in files:
        try:
            ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError, OSError) as error:
            return f"{path}: {type(error).__name__}: {error}"
    return ""


async def _initialize_all(settings: Settings) -> dict[str, str]:
    async with Supervisor(settings.model_repository, settings) as server:
        return server.failures
