# SPDX-License-Identifier: Apache-2.0
"""What a stub's model asks the supervisor itself, and the way the answers find who waits.

    ask on the main thread ─► Asked(work) ─► it reads the work lane itself while it waits
    ask on another thread ──► Asked(control) ─► the control thread ─► a queue ─► that thread

There from before the model is imported until the process ends; only who asks is kept waiting.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from actorserve.errors import ActorserveError, InvalidArgument, Unavailable, error_for
from actorserve.runtime.stub_end import StubEnd
from actorserve.wire.codec import encode
from actorserve.wire.messages import Answered, Asked, Handle, Question, Result


class Questions:
    """The questions of one stub. Any thread may ask."""

    def __init__(self, end: StubEnd) -> None:
        """Belongs to the main thread's stub: construct it there."""
        self.before: Callable[[], None] = lambda: None
        """Called by whoever asks, before the question is sent."""
        self.after_main_wait: Callable[[], None] = lambda: None
        self._end = end
        self._main = threading.get_ident()
        self._numbers = itertools.count(1)
        self._open: dict[int, SimpleQueue[Answered]] = {}

    def ask(self, question: Question, handles: Sequence[Handle] = ()) -> Result:
        """Ask and wait for the answer. Raises the ActorserveError that is the answer.

        `handles` are those that the question names; they are given up with it. Raises
        InvalidArgument for a question that no message can hold, Unavailable in a process that the
        model has forked.
        """
        end = self._end
        number = next(self._numbers)
        on_control = threading.get_ident() != self._main
        try:
            data = self._encoded(Asked(number, question, on_control))
        except ActorserveError:
            end.unplace(handles)
            raise
        self.before()
        answers: SimpleQueue[Answered] = SimpleQueue()
        self._open[number] = answers
        try:
            end.send_encoded(data)
            answered = answers.get() if on_control else self._read(answers)
        finally:
            self._open.pop(number, None)
        if answered.error is not None:
            raise error_for(answered.error.code, answered.error.message)
        return answered.result

    def _encoded(self, asked: Asked) -> bytes:
        if self._end.is_severed:
            raise Unavailable("a process that the model has forked cannot ask the server")
        try:
            data = encode(asked)
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"it is no valid Unicode: {error}") from None
        if len(data) > self._end.max_frame_bytes:
            raise InvalidArgument("its texts do not fit into one message")
        return data

    def _read(self, answers: SimpleQueue[Answered]) -> Answered:
        """Read the work lane until the answer is there. Main thread only."""
        end = self._end
        try:
            while True:
                end.take_in()
                try:
                    return answers.get_nowait()
                except Empty:
                    end.wait(lambda: not answers.empty())
        finally:
            self.after_main_wait()

    def take(self, answered: Answered) -> None:
        """Hand an answer to who waits for it; whichever thread reads the lane."""
        answers = self._open.get(answered.number)
        if answers is not None:
            answers.put(answered)
