# SPDX-License-Identifier: Apache-2.0
"""The model repository on disk: which models there are, their configuration and versions.

    <repository>/<model>/config.pbtxt
    <repository>/<model>/<version>/model.py

Reads only, and blocks as long as the disk does; nothing is kept between calls, so that each load
sees the disk as it is. Directories may be symbolic links (repositories are often assembled from
them); a name never leads out of its repository, because names with separators or a leading dot
are refused before they become a path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from actorserve.actors.fingerprint import Stamp, stamps
from actorserve.errors import ConfigError, InvalidArgument, NotFound
from actorserve.triton.config_completion import complete
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.text_format import parse_model_config

CONFIG_FILE = "config.pbtxt"
MODEL_FILE = "model.py"
CONFIG_MAX_BYTES = 16 << 20
NAME_MAX_BYTES = 255

_VERSION = re.compile(r"[1-9][0-9]*|0")
_BAD_IN_NAME = re.compile(r"[\x00-\x1f\x7f/\\;|&$`<>()\[\]{}\"'*?~#!]")


class ModelEntry(msgspec.Struct, frozen=True):
    """A model directory. `problem` says why it cannot be loaded at all, whatever it holds.

    One that `is_private` came with a load request and goes with what was loaded from it.
    """

    name: str
    path: Path
    problem: str | None = None
    is_private: bool = False


class ModelSource(msgspec.Struct, frozen=True):
    """What is on disk of one model: its configuration, completed, and its numbered versions.

    `stamps` tells later whether its files are still the same (fingerprint.py); `given` is the
    configuration as it was written.
    """

    entry: ModelEntry
    config: ModelConfig
    versions: tuple[int, ...]
    stamps: dict[str, Stamp] = {}
    given: ModelConfig | None = None
    has_model_file: bool = True

    def completed(self, gpu_count: int) -> ModelConfig:
        """Return the configuration, completed where there are so many GPUs."""
        if self.given is None or not gpu_count:
            return self.config
        name, has_model_py = self.entry.name, self.has_model_file
        return complete(self.given, name, has_model_py=has_model_py, gpu_count=gpu_count)


def check_model_name(name: str) -> None:
    """Raise InvalidArgument for a name that must not become a path."""
    if not name:
        raise InvalidArgument("model name must not be empty")
    try:
        nbytes = len(name.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"model name {name!r} is no text: it holds half a character"
        ) from None
    if nbytes > NAME_MAX_BYTES:
        raise InvalidArgument(f"model name is longer than {NAME_MAX_BYTES} bytes")
    bad = _BAD_IN_NAME.search(name)
    if bad is not None:
        raise InvalidArgument(f"model name {name!r} contains the character {bad.group()!r}")
    if name.startswith("."):
        raise InvalidArgument(f"model name {name!r} must not begin with a dot")


class Repository:
    """One or more repository directories, seen as one."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        # Named twice, by a flag and a variable perhaps, a repository is still one.
        self.paths: Sequence[Path] = list(dict.fromkeys(Path(path).absolute() for path in paths))
        if not self.paths:
            raise InvalidArgument("at least one model repository is needed")

    def check(self) -> None:
        """Raise NotFound where a repository is no readable directory."""
        for path in self.paths:
            if not path.is_dir():
                raise NotFound(f"model repository '{path}' is not a directory")
            if (path / CONFIG_FILE).is_file():
                raise NotFound(
                    f"'{path}' is a model, not a repository of models: name the directory that "
                    f"it is in, '{path.absolute().parent}'"
                )
            try:
                next(path.iterdir(), None)
            except OSError as error:
                reason = error.strerror
                raise NotFound(f"model repository '{path}' is not readable: {reason}") from None

    def scan(self) -> dict[str, ModelEntry]:
        """Return every model directory by name, in alphabetical order."""
        found: dict[str, ModelEntry] = {}
        for root in self.paths:
            try:
                children = sorted(root.iterdir())
            except OSError:
                continue
            for child in children:
                if child.name.startswith(".") or not _is_folder(child):
                    continue
                found[child.name] = _entry(child, found.get(child.name))
        return dict(sorted(found.items()))

    def find(self, name: str) -> ModelEntry:
        """Return one model's directory. Raises InvalidArgument or NotFound."""
        check_model_name(name)
        entry = self.scan().get(name)
        if entry is None:
            raise NotFound(f"failed to load '{name}', failed to poll from model repository")
        return entry

    def look(self) -> dict[str, dict[str, Stamp] | None] | None:
        """Return how every model's directory looks, by name; None for one that has a problem.

        None altogether while a repository cannot be read: nobody knows then what is in it.
        """
        for path in self.paths:
            try:
                next(path.iterdir(), None)
            except OSError:
                return None
        found: dict[str, dict[str, Stamp] | None] = {}
        for name, entry in self.scan().items():
            try:
                problem = entry.problem
                found[name] = stamps(entry.path, checked=CONFIG_FILE) if problem is None else None
            except OSError:
                continue
        return found

    def read(self, entry: ModelEntry, override: ModelConfig | None = None) -> ModelSource:
        """Read a model's configuration and versions. Raises ConfigError with file and place.

        `override` counts instead of the configuration on disk.
        """
        if entry.problem is not None:
            raise ConfigError(entry.problem)
        versions = _versions(entry.path)
        has_model_file = any((entry.path / str(v) / MODEL_FILE).is_file() for v in versions)
        given = _read_config(entry.path) if override is None else override
        config = complete(given, entry.name, has_model_py=has_model_file)
        try:
            looks = stamps(entry.path)
            return ModelSource(entry, config, versions, looks, given, has_model_file)
        except OSError as error:
            raise ConfigError(f"cannot read '{entry.path}': {error.strerror}") from None


def _is_folder(path: Path) -> bool:
    """Whether a model may lie there; what cannot be looked at is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _entry(path: Path, earlier: ModelEntry | None) -> ModelEntry:
    if earlier is not None:
        return ModelEntry(path.name, path, "model appears in two or more repositories")
    try:
        check_model_name(path.name)
    except InvalidArgument as error:
        return ModelEntry(path.name, path, error.message)
    return ModelEntry(path.name, path)


def _versions(path: Path) -> tuple[int, ...]:
    """Return the numbered version directories: decimal, without sign, space or leading zero."""
    try:
        names = [child.name for child in path.iterdir() if child.is_dir()]
    except OSError as error:
        raise ConfigError(f"cannot read '{path}': {error.strerror}") from None
    return tuple(sorted(int(name) for name in names if _VERSION.fullmatch(name)))


def _read_config(path: Path) -> ModelConfig:
    file = path / CONFIG_FILE
    if file.exists() and not file.is_file():
        raise ConfigError(f"'{file}' is no regular file")
    try:
        with file.open("rb") as stream:
            data = stream.read(CONFIG_MAX_BYTES + 1)
    except FileNotFoundError:
        return ModelConfig()
    except OSError as error:
        raise ConfigError(f"cannot read '{file}': {error.strerror}") from None
    if len(data) > CONFIG_MAX_BYTES:
        raise ConfigError(f"'{file}' is longer than {CONFIG_MAX_BYTES} bytes")
    return parse_model_config(data, str(file))
