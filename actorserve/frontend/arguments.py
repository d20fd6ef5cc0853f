# SPDX-License-Identifier: Apache-2.0
"""What can be typed after `actorserve`: commands, flags, and the help that teaches them.

Completion (completion.py) is written from this parser, and the options of `start` come from
config.py's table, so that each is stated once. Imports only what is quick to import.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import os
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from actorserve import __version__
from actorserve.config import OPTIONS, Option

USAGE = 2
HELP_WIDTH = 100

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


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """End with the message and what to do."""
        self.exit(USAGE, f"{self.prog}: {message} (try '{self.prog} --help')\n")

    def refuse(self, kind: str, given: str, known: Sequence[str]) -> NoReturn:
        """End because of a word that is not known, and say which one may be meant."""
        near = difflib.get_close_matches(given.partition("=")[0], known, 1, 0.75)
        self.error(f"unknown {kind}: {given}" + (f"; did you mean {near[0]}?" if near else ""))

    def flags(self) -> list[str]:
        """Return the flags that its help lists."""
        shown = [each for each in self._actions if each.help != argparse.SUPPRESS]
        return [name for each in shown for name in each.option_strings]


def make_parser() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(
        prog="actorserve",
        usage="%(prog)s COMMAND ...",
        **_texts(
            "Serve Triton Python models, each instance in a process of its own, and lose nothing "
            "when one of them dies.",
            "actorserve new repo/my_model              write a model to start from",
            "actorserve check repo/ --dry-run          try it",
            "actorserve start repo/ --http-port 8000   serve it",
            "",
            "'actorserve COMMAND --help' says more about a command.",
        ),
    )
    parser.add_argument("--version", action="version", version=f"actorserve {__version__}")
    # The metavar is two longer than the longest name, which argparse would break a line for.
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND [...]", title="commands", prog=parser.prog
    )
    parser.set_defaults(parser=parser, commands=commands)
    _add_start(commands)
    _add_check(commands)
    _add_status(commands)
    _add_health(commands)
    _add_chat(commands)
    _add_new(commands)
    _add_completion(commands)
    return parser


_Commands = Any  # argparse gives its type no public name


def _texts(description: str, *examples: str) -> dict[str, Any]:
    """Return what a help says before and after its list of arguments."""
    width = min(HELP_WIDTH, shutil.get_terminal_size((HELP_WIDTH, 24)).columns) - 2
    layout = functools.partial(argparse.RawDescriptionHelpFormatter, width=width)
    return {
        "description": textwrap.fill(description, width, break_on_hyphens=False),
        "epilog": "\n".join(["examples:", *(f"  {line}".rstrip() for line in examples)]),
        "formatter_class": layout,
        "allow_abbrev": False,
    }


def _add(
    commands: _Commands,
    name: str,
    summary: str,
    description: str,
    *examples: str,
    **more: Any,
) -> Parser:
    """Add a command; `summary` is its line in the list of commands."""
    parser: Parser = commands.add_parser(
        name, help=summary, **_texts(description, *examples), **more
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_start(commands: _Commands) -> None:
    start = _add(
        commands,
        "start",
        "serve a model repository",
        "Serve the models of one or more repositories over HTTP until SIGTERM or Ctrl-C, then "
        "let accepted requests end. Options carry tritonserver's names where it has them; every "
        "one may also be set by a variable: --http-port is ACTORSERVE_HTTP_PORT.",
        "actorserve start repo/",
        "actorserve start repo/ --http-port 9000 --exit-on-error=false",
        "actorserve start repo/ --model-control-mode=explicit --load-model=my_model",
        usage="%(prog)s REPOSITORY ... [options]",
    )
    start.add_argument("repository", nargs="*", metavar="REPOSITORY", help="a model repository")
    groups: dict[str, Any] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = start.add_argument_group(option.group)
        _add_option(groups[option.group], option)
    for flag in IGNORED_FLAGS:
        start.add_argument(
            f"--{flag}", dest="ignored", action=_Ignored, nargs="?", help=argparse.SUPPRESS
        )


def _add_check(commands: _Commands) -> None:
    check = _add(
        commands,
        "check",
        "say what would load, and what would not and why",
        "Look at the models of a repository without serving them: configuration, versions and "
        "files. A dry run also runs their code: each model is initialized, answers the "
        "model_warmup samples of its config.pbtxt, and is finalized. The exit code is 1 where a "
        "model or a sample failed.",
        "actorserve check repo/",
        "actorserve check repo/ --dry-run --timeout-s 60",
        "actorserve check repo/ --dry-run --verbose 2>check.log",
    )
    check.add_argument("repository", nargs="+", metavar="REPOSITORY", help="a model repository")
    check.add_argument(
        "--backend-directory", metavar="DIR", default="", help="holds Python-based backends"
    )
    check.add_argument(
        "--dry-run", action="store_true", help="initialize every model and send its samples, too"
    )
    check.add_argument(
        "--timeout-s",
        type=_timeout,
        default=300.0,
        metavar="S",
        help="a dry run gives a model up that is not initialized by then, or does not answer a "
        "sample (default: 300)",
    )
    check.add_argument(
        "--verbose", action="store_true", help="show the log of a dry run, and what models print"
    )


def _add_status(commands: _Commands) -> None:
    status = _add(
        commands,
        "status",
        "show models, stubs, queues and restarts of a running server",
        "Ask a running server where it stands: each instance with its state, process, restarts "
        "and counts, and how its last process ended. From another machine this needs the token "
        "of the server's --admin-token-file.",
        "actorserve status",
        "actorserve status --watch",
        "actorserve status --url http://127.0.0.1:9000 --json",
    )
    _add_url(status)
    status.add_argument("--json", action="store_true", help="print the document as it is")
    status.add_argument(
        "--watch",
        type=_timeout,
        nargs="?",
        const=2.0,
        metavar="S",
        help="show it again every S seconds (2, if none are given) until Ctrl-C",
    )
    status.add_argument("--admin-token-file", metavar="FILE", help="holds the operator's token")


def _add_health(commands: _Commands) -> None:
    health = _add(
        commands,
        "health",
        "ask a running server whether it is ready",
        "Ask a running server over HTTP whether every model that should serve does; for container "
        "and service managers. The exit code is 0 for yes and 1 for no.",
        "actorserve health",
        "actorserve health --live --timeout-s 1",
        "HEALTHCHECK CMD actorserve health --url http://127.0.0.1:8000",
    )
    _add_url(health)
    health.add_argument("--live", action="store_true", help="ask only whether it is live")


def _add_url(parser: argparse.ArgumentParser) -> None:
    # A container sets the variable once, for `start` and for its probes.
    port = os.environ.get("ACTORSERVE_HTTP_PORT") or "8000"
    parser.add_argument(
        "--url",
        default=f"http://127.0.0.1:{port}",
        help="the server (default: %(default)s; the port is that of ACTORSERVE_HTTP_PORT)",
    )
    parser.add_argument(
        "--timeout-s",
        type=_timeout,
        default=5.0,
        metavar="S",
        help="how long to wait for its answer (default: 5)",
    )


def _add_chat(commands: _Commands) -> None:
    chat = _add(
        commands,
        "chat",
        "talk to a model that generates text",
        "Talk to a model of the backend 'generation': of a repository, which is loaded for as "
        "long as the conversation lasts, or of a running server. Ctrl-C ends an answer, Ctrl-D the "
        "conversation. Without a terminal each line of standard input is a question.",
        "actorserve chat repo/ --model smollm2",
        "actorserve chat --url http://127.0.0.1:8000 --max-tokens 100",
        "echo 'What is an actor?' | actorserve chat repo/ --temperature 0",
    )
    chat.add_argument("repository", nargs="*", metavar="REPOSITORY", help="a model repository")
    chat.add_argument(
        "--model", default="", metavar="NAME", help="the model, where there are several"
    )
    chat.add_argument("--url", default="", help="a running server, in place of a repository")
    chat.add_argument(
        "--system", default="", metavar="TEXT", help="what the model is told before anything else"
    )
    chat.add_argument("--max-tokens", type=_count, metavar="N", help="the most tokens of an answer")
    chat.add_argument(
        "--temperature",
        type=_temperature,
        default=0.7,
        metavar="T",
        help="how freely tokens are chosen; 0 takes the most probable one (default: 0.7)",
    )
    chat.add_argument(
        "--timeout-s",
        type=_timeout,
        default=300.0,
        metavar="S",
        help="how long a running server may say nothing (default: 300)",
    )


def _add_new(commands: _Commands) -> None:
    new = _add(
        commands,
        "new",
        "write a new model that works",
        "Write a model's folder to start from: config.pbtxt, which says what clients send and "
        "get, and 1/model.py, which answers them. Nothing that is there is overwritten. The "
        "folder's name is the model's: letters, digits, '_', '-' and '.'.",
        "actorserve new repo/my_model",
        "actorserve check repo/ --dry-run",
    )
    new.add_argument("folder", metavar="REPOSITORY/MODEL", help="the folder to make")


def _add_completion(commands: _Commands) -> None:
    completion = _add(
        commands,
        "completion",
        "print what makes a shell complete commands and flags",
        "Print a script that lets a shell complete this command: its commands, flags, files and "
        "values. Let the shell read it whenever it starts.",
        "echo 'source <(actorserve completion bash)' >> ~/.bashrc",
        "echo 'source <(actorserve completion zsh)' >> ~/.zshrc      # after compinit",
        "actorserve completion fish > ~/.config/fish/completions/actorserve.fish",
    )
    completion.add_argument("shell", choices=["bash", "zsh", "fish"], help="bash, zsh or fish")


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


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:12]) < 1 << 31):
        raise argparse.ArgumentTypeError(f"expected a number of tokens, 1 or more, got {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 2, got {text!r}")
    return value


def _add_option(group: Any, option: Option) -> None:
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
    group.add_argument(option.flag, *option.aliases, **arguments)
