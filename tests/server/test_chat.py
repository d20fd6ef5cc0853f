# SPDX-License-Identifier: Apache-2.0
"""`actorserve chat` as people use it: typed at on a terminal, and fed through pipes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import wait_until
from tests.server.generation_models import CHAT_ANSWER, write_engine
from tests.server.harness import IDENTITY, Launcher, Server, write_model
from tests.server.terminal import CTRL_C, Terminal

CTRL_D = "\x04"
CHAT = [sys.executable, "-m", "actorserve", "chat"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with a quick and a slow model, and one that does not generate."""
    path = tmp_path_factory.mktemp("repository")
    write_engine(path, "quick")
    write_engine(path, "slow", delay_s=0.05)
    write_engine(path, "loading", load_s=3.0)
    write_engine(path, "broken", load_error="no weights today")
    write_engine(path, "tinygpt", engine="tinygpt")
    write_model(path, "identity", IDENTITY)
    return path


@pytest.fixture(scope="module")
def server(repository: Path, start_shared: Launcher) -> Iterator[Server]:
    """Serve them, too."""
    yield start_shared(repository, "--exit-on-error=false")


def chat(*arguments: str | Path, questions: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with questions on its standard input."""
    return subprocess.run(
        [*CHAT, *map(str, arguments)],
        input=questions,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def interrupt(terminal: Terminal) -> None:
    """Type Ctrl-C until there is a prompt: Python's `input` may miss one just before it waits."""
    for _ in range(5):
        terminal.type(CTRL_C)
        with contextlib.suppress(pytest.fail.Exception):
            terminal.read_until("> ", 4)
            return
    pytest.fail("no prompt after Ctrl-C")


def test_a_conversation_on_a_terminal(repository: Path) -> None:
    """Answers stream; Ctrl-C ends one, or a line, and not the program; Ctrl-D does."""
    command = [*CHAT, str(repository), "--model", "slow", "--max-tokens", "1000"]
    with Terminal(command) as terminal:
        terminal.read_until("> ")
        terminal.type("hello\n")
        terminal.read_until(CHAT_ANSWER[:3])
        terminal.read_until(CHAT_ANSWER[5])
        terminal.type(CTRL_C)
        terminal.read_until(" …\r\n")
        terminal.read_until("> ")
        terminal.type("half a line")
        terminal.read_until("half a line")
        interrupt(terminal)
        terminal.type("again\n")
        terminal.read_until(CHAT_ANSWER[:3])
        interrupt(terminal)
        terminal.type("/new\n")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        code, _ = terminal.read_all()
    assert code == 0


def test_words_for_the_program_are_no_questions(repository: Path) -> None:
    """Help is the program's, an unknown word is said to be one, and a path is a question."""
    command = [*CHAT, str(repository), "--model", "quick", "--max-tokens", "3"]
    with Terminal(command) as terminal:
        terminal.read_until("> ")
        terminal.type("/help\n")
        terminal.read_until("/new begins the conversation anew\r\n")
        terminal.read_until("> ")
        terminal.type("/quit\n")
        terminal.read_until("there is no /quit: /new, /help (a space in front: a question)\r\n")
        terminal.read_until("> ")
        terminal.type("/etc/hosts is what?\n")
        terminal.read_until(CHAT_ANSWER[:3])
        terminal.read_until("> ")
        terminal.type(" /help\n")
        terminal.read_until(CHAT_ANSWER[:3])
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        code, _ = terminal.read_all()
    assert code == 0


@pytest.mark.parametrize("is_running", [False, True])
def test_a_model_that_cannot_converse_is_refused_at_once(
    repository: Path, server: Server, is_running: bool
) -> None:
    """Before anybody has typed a question."""
    where = ["--url", f"http://{server.address}"] if is_running else [str(repository)]
    with Terminal([*CHAT, *where, "--model", "tinygpt"]) as terminal:
        code, shown = terminal.read_all()
    assert code == 1
    assert "chat template" in shown
    assert "> " not in shown


def test_a_conversation_with_a_running_server(server: Server) -> None:
    """The same through its port; what is wrong is said, and the conversation goes on."""
    url = f"http://{server.address}"
    with Terminal([*CHAT, "--url", url, "--model", "slow", "--max-tokens", "1000"]) as terminal:
        terminal.read_until("> ")
        terminal.type("hello\n")
        terminal.read_until(CHAT_ANSWER[:3])
        interrupt(terminal)
        server.stop()
        terminal.type("are you there?\n")
        terminal.read_until(f"no answer from {url}")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        code, _ = terminal.read_all()
    assert code == 0


def test_questions_through_a_pipe(repository: Path) -> None:
    """A line each; empty ones are none."""
    done = chat(
        repository, "--model", "quick", "--max-tokens", "3", questions="hello\n\nand you?\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{CHAT_ANSWER[:3]}\n" * 2


def test_what_is_no_text_is_no_crash(repository: Path) -> None:
    """Bytes that are not UTF-8 in a question, letters that the output lacks in an answer."""
    done = subprocess.run(
        [*CHAT, str(repository), "--model", "quick", "--max-tokens", "200"],
        input=b"\xff\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii:surrogateescape"},
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(CHAT_ANSWER.encode())


def test_errors_through_a_pipe(repository: Path) -> None:
    """End it, with the exit code of what went wrong."""
    done = chat(repository, "--model", "tinygpt", questions="hello\n")
    assert done.returncode == 1
    assert "chat template" in done.stderr
    done = chat(repository, "--model", "broken", questions="hello\n")
    assert done.returncode == 1
    assert "no weights today" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name a model repository, or a running server with --url"),
        (
            ("REPO", "--url", "http://127.0.0.1:1"),
            "name a model repository or a running server (--url), not both",
        ),
        (("REPO",), "name a model with --model; REPO has: broken, loading, quick, slow, tinygpt"),
        (("REPO", "--model", "identity"), "no model 'identity' that generates text"),
        (("REPO/none",), "is not a directory"),
        (("--url", "ftp://x"), "--url 'ftp://x': expected something like"),
        (("REPO", "--max-tokens", "0"), "expected a number of tokens, 1 or more"),
        (("REPO", "--temperature", "9"), "expected a number from 0 to 2"),
    ],
)
def test_wrong_usage(repository: Path, arguments: tuple[str, ...], reason: str) -> None:
    """One line that says what is wrong, and exit code 2."""
    done = chat(*[each.replace("REPO", str(repository)) for each in arguments])
    assert done.returncode == 2
    assert reason.replace("REPO", str(repository)) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_server_that_is_not_there() -> None:
    """One line, exit code 1."""
    done = chat("--url", "http://127.0.0.1:1", questions="hello\n")
    assert done.returncode == 1
    assert done.stderr.startswith("actorserve chat: no answer from http://127.0.0.1:1: ")


def test_an_interrupted_load_says_so_and_nothing_else(repository: Path) -> None:
    """Ctrl-C while the model loads: what was begun is ended in order, without a complaint."""
    with Terminal([*CHAT, str(repository), "--model", "loading"]) as terminal:
        terminal.read_until("loading loading")
        wait_until(lambda: psutil.Process(terminal.process.pid).children())
        terminal.type(CTRL_C)
        code, text = terminal.read_all()
    assert code == 130
    assert "interrupted" in text
    assert "Task" not in text and "Traceback" not in text


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_a_closed_stream_is_said(repository: Path, closed: str) -> None:
    """Not shown as a crash."""
    command = f'"$@" {closed}'
    arguments = [*CHAT, str(repository), "--model", "quick", "--max-tokens", "5"]
    done = subprocess.run(
        ["/bin/sh", "-c", command, "sh", *arguments],
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "closed, and a chat needs both" in done.stderr
