# SPDX-License-Identifier: Apache-2.0
"""The `actorserve` command: arguments to calls, no logic.

    actorserve start repo/ [options]   serve a model repository until SIGTERM or SIGINT
    actorserve check repo/             what would load, and what would not and why
    actorserve status                  models, stubs, queues and restarts of a running server
    actorserve health                  exit code 0 if a server is ready (or --live), 1 if not
    actorserve chat repo/              talk to a model that generates text
    actorserve new repo/my_model       write a new model that works
    actorserve completion bash         print what makes a shell complete all of this

Exit codes: 0 done, 1 failed (a model did not load, the server is not ready), 2 wrong usage,
130 interrupted by Ctrl-C (a watch ends with 0: that is how it ends).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from actorserve.config import OPTIONS, settings_from
from actorserve.errors import ActorserveError, ConfigError, NotFound
from actorserve.frontend.arguments import USAGE, Parser, make_parser

FAILED = 1
INTERRUPTED = 130  # what a shell makes of SIGINT
NOBODY_READS = 141  # and of SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        code = _main(sys.argv[1:] if arguments is None else arguments)
        if sys.__stdout__ is not None:  # a process may be started without one
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does; nor may the interpreter's end complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    return code


def _main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    chosen = _parse(parser, arguments)
    if chosen.command is None:
        parser.print_help()
        return USAGE
    try:
        return RUN[chosen.command](chosen)
    except ActorserveError as error:
        print(f"actorserve {chosen.command}: {error.message}", file=sys.stderr)
        return USAGE if isinstance(error, (ConfigError, NotFound)) else FAILED
    except KeyboardInterrupt:
        print(f"actorserve {chosen.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse; what is not known ends the process with one line and exit code 2."""
    commands = list(parser.get_default("commands").choices)
    first = next((each for each in arguments if not each.startswith("-")), None)
    if first is not None and first not in commands:
        if Path(first).is_dir():
            parser.error(f"unknown command: {first}; did you mean 'actorserve start {first}'?")
        parser.refuse("command", first, commands)
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen.parser.refuse("argument", unknown[0], chosen.parser.flags())
    return chosen


def _start(chosen: argparse.Namespace) -> int:
    flags = {
        option.field: value
        for option in OPTIONS
        if (value := getattr(chosen, option.field)) is not None
    }
    repositories = [*chosen.repository, *flags.get("model_repository", [])]
    if repositories:
        flags["model_repository"] = repositories
    settings = settings_from(flags)
    if not settings.model_repository:
        raise ConfigError("name a model repository, as in 'actorserve start repo/'")
    try:
        from actorserve.frontend import serve
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("actorserve"):
            raise
        raise ConfigError(
            f"this needs the package '{error.name}': pip install 'actorserve[serve]'"
        ) from None
    return serve.run(settings, getattr(chosen, "ignored", None) or [])


def _health(chosen: argparse.Namespace) -> int:
    from actorserve.frontend.probe import probe

    return probe(chosen.url, is_live_enough=chosen.live, timeout_s=chosen.timeout_s)


def _check(chosen: argparse.Namespace) -> int:
    from actorserve.actors.check import check, dry_run
    from actorserve.config import Settings
    from actorserve.frontend.colour import is_coloured
    from actorserve.frontend.findings import Progress, findings_text

    settings = Settings(
        model_repository=tuple(chosen.repository), backend_directory=chosen.backend_directory
    )
    findings = check(settings)
    if chosen.dry_run:
        with Progress(len(findings), is_wanted=not chosen.verbose) as progress:
            findings = dry_run(
                settings,
                findings,
                timeout_s=chosen.timeout_s,
                shows_log=chosen.verbose,
                on_progress=progress,
            )
    print(findings_text(findings, is_coloured=is_coloured(sys.stdout)))
    if all(finding.is_ok for finding in findings):
        return 0
    if chosen.dry_run and not chosen.verbose:
        print("--verbose shows what the models print.")
    return FAILED


def _status(chosen: argparse.Namespace) -> int:
    from actorserve.frontend.operator import read_token, show_status

    return show_status(
        chosen.url,
        token=read_token(chosen.admin_token_file or ""),
        is_json=chosen.json,
        watch_s=chosen.watch,
        timeout_s=chosen.timeout_s,
    )


def _chat(chosen: argparse.Namespace) -> int:
    from actorserve.frontend.chat import run
    from actorserve.frontend.chat_source import Manner

    return run(
        chosen.repository,
        url=chosen.url,
        model=chosen.model,
        system=chosen.system,
        manner=Manner(chosen.max_tokens, chosen.temperature),
        timeout_s=chosen.timeout_s,
    )


def _new(chosen: argparse.Namespace) -> int:
    from actorserve.template import write_model

    folder = Path(chosen.folder)
    for path in write_model(folder):
        print(f"wrote {path}")
    repository = shlex.quote(str(folder.parent))
    print("\nTry:")
    print(f"  actorserve check {repository} --dry-run")
    print(f"  actorserve start {repository}")
    return 0


def _completion(chosen: argparse.Namespace) -> int:
    from actorserve.frontend.completion import completion_script

    print(completion_script(make_parser(), chosen.shell), end="")
    return 0


RUN: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "start": _start,
    "check": _check,
    "status": _status,
    "health": _health,
    "chat": _chat,
    "new": _new,
    "completion": _completion,
}
