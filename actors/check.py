# SPDX-License-Identifier: Apache-2.0
"""What would load, what would not and why: `actorserve check`, without serving anything.

By itself nothing of a model's code runs: configuration, versions and files are looked at. A dry
run starts the server without a front end, so that every model is imported and initialized once.
"""

from __future__ import annotations

import ast
import asyncio

import msgspec

from actorserve.actors.loader import check_source
from actorserve.actors.repository import ModelSource, Repository
from actorserve.actors.supervisor import Supervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError
from actorserve.triton.version_policy import select_versions


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
    findings = [_look(repository, name) for name in repository.scan()]
    if not is_dry_run:
        return findings
    failures = asyncio.run(_initialize_all(settings))
    return [
        msgspec.structs.replace(each, problem=each.problem or failures.get(each.model, ""))
        for each in findings
    ]


def _look(repository: Repository, name: str) -> Finding:
    entry = repository.scan()[name]
    try:
        source = repository.read(entry)
        versions = ", ".join(map(str, source.versions)) or "-"
    except ActorserveError as error:
        return Finding(name, "-", error.message)
    try:
        warnings = check_source(source)
    except ActorserveError as error:
        return Finding(name, versions, error.message)
    return Finding(name, versions, _syntax_problem(source), tuple(warnings))


def _syntax_problem(source: ModelSource) -> str:
    """Return what is wrong with the text of a model file, or "" for nothing."""
    for version in select_versions(source.config, source.versions):
        path = source.entry.path / str(version) / source.config.default_model_filename
        try:
            ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError, OSError) as error:
            return f"{path}: {type(error).__name__}: {error}"
    return ""


async def _initialize_all(settings: Settings) -> dict[str, str]:
    async with Supervisor(settings.model_repository, settings) as server:
        return server.failures
