# SPDX-License-Identifier: Apache-2.0
"""Completion as a shell does it: the scripts run in bash, zsh and fish, where they are there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from actorserve.config import OPTIONS
from tests.server.terminal import Terminal

SHOW = "actorserve() { printf '[%s]' \"$@\"; echo ' seen'; }"


def script(shell: str) -> str:
    """Return what the command prints for a shell."""
    command = [sys.executable, "-m", "actorserve", "completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the scripts of all shells, as files."""
    folder = tmp_path_factory.mktemp("scripts")
    found = {}
    for shell in ("bash", "zsh", "fish"):
        found[shell] = folder / f"completion.{shell}"
        found[shell].write_text(script(shell))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files and folders, some with spaces in their names."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "my repo").mkdir(parents=True)
    (folder / "other").mkdir()
    (folder / "a file.txt").touch()
    return folder


def needs(shell: str) -> str:
    """Return where a shell is; skips the test where it is not."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


# --- bash ----------------------------------------------------------------------------------------


def in_bash(scripts: dict[str, Path], *words: str) -> list[str]:
    """Return what bash would offer for the last of these words."""
    program = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        _actorserve
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    bash = needs("bash")
    command = [bash, "--norc", "-uc", program, "bash", str(scripts["bash"]), "actorserve", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("",), "start check status health chat new completion"),
        (("st",), "start status"),
        (("--v",), "--version"),
        (("completion", ""), "bash zsh fish"),
        (("completion", "z"), "zsh"),
        (("start", "--http-p"), "--http-port"),
        (("start", "--no-such"), ""),
        (("start", "--http-port", ""), ""),
        (("start", "--grpc-p"), ""),
        (("check", "my repo", "--d"), "--dry-run"),
        (("status", "--watch", "--j"), "--json"),
        (("chat", "repo", "--m"), "--model --max-tokens"),
        # A value of its own word, after bash's three words for --flag=value, and of one word
        # where = breaks none.
        (("start", "--exit-on-error", ""), "true false"),
        (("start", "--exit-on-error", "f"), "false"),
        (("start", "--exit-on-error", "="), "true false"),
        (("start", "--exit-on-error", "=", "t"), "true"),
        (
            (
                "start",
                "--exit-on-error=t",
            ),
            "--exit-on-error=true",
        ),
        (("start", "--exit-on-error", "--http-p"), "--http-port"),
        (("start", "--log-format", ""), "default ISO8601 json"),
        (("start", "--model-control-mode", "=", "e"), "explicit"),
    ],
)
def test_bash_offers(scripts: dict[str, Path], words: tuple[str, ...], expected: str):
    """Commands, flags and values, by what stands before."""
    assert in_bash(scripts, *words) == expected.split()


def test_no_flag_is_forgotten(scripts: dict[str, Path]):
    """The script is made from the parser: each option is in it, those without meaning are not."""
    offered = in_bash(scripts, "start", "--")
    assert {name for each in OPTIONS for name in (each.flag, *each.aliases)} <= set(offered)
    assert "--grpc-port" not in offered
    for shell in ("zsh", "fish"):
        text = scripts[shell].read_text()
        assert all(each.flag[2:] in text for each in OPTIONS)
        assert "grpc-port" not in text


# --- at a keyboard -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bash", "zsh"])
def keyboard(
    request: pytest.FixtureRequest, scripts: dict[str, Path], place: Path
) -> Iterator[Terminal]:
    """Yield a shell at a terminal, in which `actorserve` shows its arguments."""
    shell = request.param
    program = needs(shell)
    options = ["--norc", "--noprofile", "-i"] if shell == "bash" else ["-f", "-i"]
    env = {"HOME": str(scripts[shell].parent), "INPUTRC": os.devnull, "PS1": "> "}
    with Terminal([program, *options], env=env, cwd=place) as terminal:
        if shell == "zsh":
            terminal.type("autoload -U compinit; compinit -u -D\n")
        terminal.type(f"{SHOW}; source {scripts[shell]}; echo is re''ady\n")
        terminal.read_until("is ready")
        yield terminal


@pytest.mark.parametrize(
    ("typed", "arguments"),
    [
        ("sta", "[sta]"),  # start or status: nothing to add
        ("che", "[check]"),
        ("start --http-hea", "[start][--http-head-timeout-s"),
        ("start m", "[start][my repo]"),
        ("start my\\ ", "[start][my repo]"),
        ("check my", "[check][my repo]"),
        ("new oth", "[new][other]"),
        ("start --log-file a", "[start][--log-file][a file.txt]"),
        ("start --log-file=a", "[start][--log-file=a file.txt]"),
        ("start --crash-dir=o", "[start][--crash-dir=other]"),
        ("start --crash-dir my", "[start][--crash-dir][my repo]"),
        ("start --exit-on-error=f", "[start][--exit-on-error=false]"),
        ("start --log-format j", "[start][--log-format][json]"),
        ("completion f", "[completion][fish]"),
    ],
)
def test_tab_completes(keyboard: Terminal, typed: str, arguments: str):
    """What the command gets after a TAB, with names of spaces whole."""
    keyboard.type(f"actorserve {typed}\t\n")
    shown = keyboard.read_until(" seen").rsplit("\n", 1)[-1]
    # zsh takes the slash after a folder away when a line is sent.
    assert arguments in shown.replace("/]", "]"), shown


# --- fish ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"start", "check", "status", "health", "chat", "new", "completion"}),
        ("sta", {"start", "status"}),
        ("--v", {"--version"}),
        ("start --http-po", {"--http-port"}),
        ("start --http-port ", set()),
        ("start --exit-on-error=t", {"--exit-on-error=true"}),
        ("start --log-format ", {"default", "ISO8601", "json"}),
        ("start ", {"my repo/", "other/"}),
        ("start --crash-dir=o", {"--crash-dir=other/"}),
        ("start --log-file a", {"a file.txt"}),
        ("check repo --dry", {"--dry-run"}),
        ("completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_fish_offers(
    scripts: dict[str, Path], place: Path, tmp_path: Path, line: str, expected: set[str]
):
    """The same in fish, which has a command to ask it."""
    fish = needs("fish")
    program = "source $argv[1]; complete -C $argv[2]"
    done = subprocess.run(
        [fish, "--no-config", "-c", program, str(scripts["fish"]), f"actorserve {line}"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        cwd=place,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert {each.partition("\t")[0] for each in done.stdout.splitlines()} == expected
