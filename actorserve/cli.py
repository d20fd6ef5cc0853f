# SPDX-License-Identifier: Apache-2.0
"""The `actorserve` command: arguments to calls, no logic.

    actorserve start repo/ [options]   serve a model repository until SIGTERM or SIGINT
    actorserve check repo/             what would load, and what would not and why
    actorserve status                  models, stubs, queues and restarts of a running server
    actorserve health                  exit code 0 if a server is ready (or --live), 1 if not
    actorserve new repo/my_model       write a new model that works

Exit codes: 0 done, 1 failed (a model did not load, the server is not ready), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from actorserve import __version__
from actorserve.config import OPTIONS, Option, settings_from
from actorserve.errors import ActorserveError, ConfigError, NotFound

FAILED = 1
USAGE = 2

IGNORED_FLAGS = tuple(
    """
    allow-client-shm allow-gpu-metrics allow-grpc allow-http allow-sagemaker allow-vertex-ai
    buffer-manager-thread-count cache-config cache-directory cuda-memory-pool-byte-size
    cuda-virtual-address-size enable-peer-access grpc-address grpc-header-forward-pattern
    grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
    grpc-http2-min-recv-ping-interval-without-data grpc-infer-allocation-pool-size
    grpc-infer-response-compression-level grpc-infer-thread-count
    grpc-keepalive-permit-without-calls grpc-keepalive-time grpc-keepalive-timeout
    grpc-max-connection-age grpc-max-connection-age-grace grpc-max-response-pool-size grpc-port
    grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key grpc-use-ssl
    grpc-use-ssl-mutual host-policy http-header-forward-pattern http-restricted-api
    http-thread-count min-supported-compute-capability model-config-name model-load-gpu-limit
    model-namespacing pinned-memory-pool-byte-size rate-limit
    rate-limit-resource repoagent-directory response-cache-byte-size
    reuse-grpc-port reuse-http-port trace-config trace-count trace-file trace-level
    trace-log-frequency trace-rate
    """.split()  # noqa: SIM905 (a list of names reads better as text)
)
"""The real server's flags that have no meaning here (yet): accepted, with one warning each."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with the message and what to do."""
        self.exit(USAGE, f"{self.prog}: {message} (try '{self.prog} --help')\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = _make_parser()
    chosen, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen.parser.error(f"unknown argument: {unknown[0]}")
    if chosen.command is None:
        parser.print_help()
        return USAGE
    try:
        return int(chosen.run(chosen))
    except ActorserveError as error:
        print(f"actorserve {chosen.command}: {error.message}", file=sys.stderr)
        return USAGE if isinstance(error, (ConfigError, NotFound)) else FAILED


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="actorserve",
        description="Serve Triton Python models, each instance in a process of its own.",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"actorserve {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    start = commands.add_parser(
        "start",
        help="serve a model repository",
        description="Serve the models of one or more repositories until SIGTERM or SIGINT. "
        "Every option may also be set by a variable: --http-port is ACTORSERVE_HTTP_PORT.",
        allow_abbrev=False,
    )
    start.set_defaults(run=_start, parser=start)
    start.add_argument("repository", nargs="*", metavar="REPOSITORY", help="a model repository")
    for option in OPTIONS:
        _add_option(start, option)
    for flag in IGNORED_FLAGS:
        start.add_argument(
            f"--{flag}", dest="ignored", action=_Ignored, nargs="?", help=argparse.SUPPRESS
        )
    _add_check(commands)
    _add_status(commands)
    _add_health(commands)
    _add_new(commands)
    return parser


_Commands = Any  # argparse gives its type no public name


def _add_check(commands: _Commands) -> None:
    check = commands.add_parser(
        "check",
        help="say what would load, and what would not and why",
        description="Look at the models of a repository without serving them. The exit code is 1 "
        "where one would not load.",
    )
    check.set_defaults(run=_check)
    check.add_argument("repository", nargs="+", metavar="REPOSITORY", help="a model repository")
    check.add_argument(
        "--backend-directory", metavar="DIR", default="", help="holds Python-based backends"
    )
    check.add_argument(
        "--dry-run", action="store_true", help="import and initialize every model once, too"
    )


def _add_status(commands: _Commands) -> None:
    status = commands.add_parser(
        "status",
        help="show models, stubs, queues and restarts of a running server",
        description="Ask a running server where it stands. From another machine this needs the "
        "token of its --admin-token-file.",
    )
    status.set_defaults(run=_status)
    _add_url(status)
    status.add_argument("--json", action="store_true", help="print the document as it is")
    status.add_argument(
        "--watch", type=float, nargs="?", const=2.0, metavar="S", help="repeat every S seconds"
    )
    status.add_argument("--admin-token-file", metavar="FILE", help="holds the operator's token")


def _add_health(commands: _Commands) -> None:
    health = commands.add_parser(
        "health",
        help="ask a running server whether it is ready",
        description="Ask a running server over HTTP; for container and service managers.",
    )
    health.set_defaults(run=_health)
    _add_url(health)
    health.add_argument("--live", action="store_true", help="ask only whether it is live")


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--timeout-s", type=_timeout, default=5.0, help="default: %(default)s")


def _add_new(commands: _Commands) -> None:
    new = commands.add_parser(
        "new",
        help="write a new model that works",
        description="Write a model's folder: config.pbtxt and 1/model.py, to start from.",
    )
    new.set_defaults(run=_new)
    new.add_argument("folder", metavar="REPOSITORY/MODEL", help="the folder to make")


class _Ignored(argparse.Action):
    """Note a flag of the real server that has no meaning here."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append its name once."""
        noted = getattr(namespace, "ignored", None) or []
        if option_string not in noted:
            noted.append(option_string)
        namespace.ignored = noted


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return seconds


def _add_option(parser: argparse.ArgumentParser, option: Option) -> None:
    default = option.default_text
    shown = f" (default: {default})" if default else ""
    arguments: dict[str, Any] = {
        "dest": option.field,
        "metavar": option.metavar,
        "help": option.help.replace("%", "%%") + shown,
    }
    if option.repeatable:
        arguments["action"] = "append"
    if option.metavar == "BOOL":
        arguments.update(nargs="?", const="true", metavar="true|false")
    parser.add_argument(option.flag, *option.aliases, **arguments)


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
    from actorserve.actors.check import check
    from actorserve.config import Settings
    from actorserve.frontend.operator import findings_text

    settings = Settings(
        model_repository=tuple(chosen.repository), backend_directory=chosen.backend_directory
    )
    findings = check(settings, is_dry_run=chosen.dry_run)
    print(findings_text(findings))
    return FAILED if any(finding.problem for finding in findings) else 0


def _status(chosen: argparse.Namespace) -> int:
    from actorserve.frontend.operator import read_token, show_status

    return show_status(
        chosen.url,
        token=read_token(chosen.admin_token_file or ""),
        is_json=chosen.json,
        watch_s=chosen.watch,
        timeout_s=chosen.timeout_s,
    )


def _new(chosen: argparse.Namespace) -> int:
    from actorserve.template import write_model

    folder = Path(chosen.folder)
    for path in write_model(folder):
        print(f"wrote {path}")
    print(f"\nTry:  actorserve check {folder.parent}\n      actorserve start {folder.parent}")
    return 0
