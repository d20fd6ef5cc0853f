# SPDX-License-Identifier: Apache-2.0
"""`actorserve chat`: a conversation with a model, on a terminal or through pipes.

On a terminal lines are typed behind a prompt and answers appear as they are generated. Ctrl-C
ends the answer, or the line that is being typed, and never the program; Ctrl-D ends that. A line
that begins with a word like /new is for the program, and never a question. Without a terminal each
line of standard input is a question, whatever it says, each answer is followed by a line's end,
and the first error ends it.
"""

from __future__ import annotations

import contextlib
import io
import queue
import re
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from types import FrameType
from typing import TextIO

import msgspec

from actorserve.errors import ActorserveError, ConfigError, InvalidArgument
from actorserve.frontend.chat_running import RunningServer
from actorserve.frontend.chat_source import Manner, Message, Source
from actorserve.frontend.colour import RED, is_coloured

PROMPT = "> "
COMMANDS = {
    "/new": "begins the conversation anew",
    "/help": "says this",
}
_HELP = [f"{name} {text}" for name, text in COMMANDS.items()]
_KEYS = "Ctrl-C ends an answer, or a line; Ctrl-D leaves"
_COMMAND = re.compile(r"/[A-Za-z]+")
_LONGEST_WAIT_S = 1.0
_CLEAR_LINE = "\r\x1b[K"

_Inbox = queue.SimpleQueue["str | BaseException | None"]
"""Pieces of an answer on their way to whoever shows them, then its end."""


def run(
    repositories: Sequence[str],
    *,
    url: str,
    model: str,
    system: str,
    manner: Manner,
    timeout_s: float,
) -> int:
    """Talk until the end of the input; returns the exit code. Raises ActorserveError."""
    if not (repositories or url):
        raise ConfigError("name a model repository, or a running server with --url")
    if repositories and url:
        raise ConfigError("name a model repository or a running server (--url), not both")
    if sys.stdin is None or sys.stdout is None:
        raise ConfigError("one of standard input and output is closed, and a chat needs both")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may have characters that it lacks
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    source: Source
    if url:
        source = RunningServer(url, model, timeout_s)
    else:
        from actorserve.frontend.chat_own import OwnServer  # and with it the whole server

        with _told(f"loading {model or 'the model'} …", is_wanted=sys.stderr.isatty()):
            source = OwnServer(repositories, model)
    try:
        chat = Chat(source, Conversation(system), manner)
        if is_terminal:
            with _told("asking the model for a word …", is_wanted=sys.stderr.isatty()):
                chat.try_out()
            chat.on_terminal()
        else:
            chat.through_pipes(sys.stdin, sys.stdout)
    finally:
        source.close()
    return 0


@contextlib.contextmanager
def _told(text: str, *, is_wanted: bool) -> Generator[None, None, None]:
    """Show a text on the terminal while something lasts."""
    if is_wanted:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_wanted:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


class Conversation:
    """What was said so far. A question without any answer has not been said."""

    def __init__(self, system: str) -> None:
        self._system = [Message("system", system)] if system else []
        self.messages = list(self._system)

    def clear(self) -> None:
        """Begin anew."""
        self.messages = list(self._system)

    def ask(self, question: str) -> None:
        """Add a question; what is no text in it is replaced."""
        text = question.encode("utf-8", "replace").decode()
        self.messages.append(Message("user", text))

    def answered(self, text: str) -> None:
        """Add the answer to it, or what there is of one that was cut off."""
        if text:
            self.messages.append(Message("assistant", text))
        else:
            self.messages.pop()


class Chat:
    """A conversation with whoever `source` is."""

    def __init__(self, source: Source, conversation: Conversation, manner: Manner) -> None:
        self._source = source
        self._conversation = conversation
        self._manner = manner

    # --- pipes -----------------------------------------------------------------------------------

    def through_pipes(self, questions: TextIO, answers: TextIO) -> None:
        """Answer each line. Raises the first error."""
        for line in questions:
            question = line.strip()
            if question:
                for text in self._answer(question, queue.SimpleQueue()):
                    answers.write(text)
                    answers.flush()
                answers.write("\n")
                answers.flush()

    # --- a terminal ------------------------------------------------------------------------------

    def on_terminal(self) -> None:
        """Answer what is typed, until Ctrl-D."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (makes `input` a line that can be edited)
        print(f"{self._source.model}: {_KEYS}; /help says more.")
        while True:
            try:
                line = input(PROMPT)
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            command = _COMMAND.match(line)
            if command is not None and line[command.end() :].strip(" \t") == "":
                self._obey(command.group())
            elif line.strip():
                self._show_answer(line.strip())

    def try_out(self) -> None:
        """Ask for one token, so that a model which cannot converse is refused before anybody types.

        Raises InvalidArgument with what it lacks: a chat template, say. Other errors may pass.
        """
        inbox: _Inbox = queue.SimpleQueue()
        greeting = [*self._conversation.messages, Message("user", "Hello")]
        manner = msgspec.structs.replace(self._manner, max_tokens=1)
        cancel = self._source.ask(greeting, manner, inbox.put)
        try:
            piece = _next(inbox)
            while isinstance(piece, str):
                piece = _next(inbox)
        finally:
            cancel()
        if isinstance(piece, InvalidArgument):
            raise piece

    def _obey(self, command: str) -> None:
        """Do what a line of the program's own says."""
        if command == "/new":
            self._conversation.clear()
        elif command == "/help":
            print("\n".join([*_HELP, _KEYS, "a space in front makes a question of such a word"]))
        else:
            print(f"there is no {command}: {', '.join(COMMANDS)} (a space in front: a question)")

    def _show_answer(self, question: str) -> None:
        """Show an answer as it comes, and an error in its place."""
        inbox: _Inbox = queue.SimpleQueue()
        try:
            with _interrupts_go_to(inbox):
                for text in self._answer(question, inbox):
                    print(harmless(text), end="", flush=True)
        except KeyboardInterrupt:
            print(" …", end="")
        except ActorserveError as error:
            text = harmless(error.message)
            print(f"\x1b[{RED}m{text}\x1b[0m" if is_coloured(sys.stdout) else text, end="")
        print(flush=True)

    def _answer(self, question: str, inbox: _Inbox) -> Iterator[str]:
        """Ask, and yield the answer; what came of it is remembered, however it ends."""
        said: list[str] = []
        self._conversation.ask(question)
        cancel = self._source.ask(self._conversation.messages, self._manner, inbox.put)
        try:
            while (piece := _next(inbox)) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                said.append(piece)
                yield piece
        finally:
            cancel()
            self._conversation.answered("".join(said))


def _next(inbox: _Inbox) -> str | BaseException | None:
    """Wait for the next piece. A signal just before the wait does not end it: so none is long."""
    while True:
        with contextlib.suppress(queue.Empty):
            return inbox.get(timeout=_LONGEST_WAIT_S)


@contextlib.contextmanager
def _interrupts_go_to(inbox: _Inbox) -> Generator[None, None, None]:
    """Have Ctrl-C put a KeyboardInterrupt there, to be raised where it does no harm."""

    def note(number: int, frame: FrameType | None) -> None:
        inbox.put(KeyboardInterrupt())

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def harmless(text: str) -> str:
    """Return a text that cannot order a terminal about: no control characters."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
