# SPDX-License-Identifier: Apache-2.0
"""The lines of a model's Logger leave the stub without keeping anybody waiting."""

from __future__ import annotations

import threading

import pytest

from actorserve.actors import stub_log
from actorserve.actors.stub_log import StubLog
from actorserve.state.line_quota import LineQuota
from actorserve.triton.logger import LogLevel
from actorserve.wire.codec import decode_to_supervisor
from actorserve.wire.messages import LogRecord

INFO, ERROR = LogLevel.INFO, LogLevel.ERROR


class FakeEnd:
    """A lane with `room` for so many lines."""

    def __init__(self) -> None:
        self.is_severed = False
        self.room = 1_000_000
        self.lines: list[LogRecord] = []
        self.woken = 0

    def try_send_encoded(self, data: bytes) -> bool:
        if self.room <= 0:
            return False
        self.room -= 1
        self.send_encoded(data)
        return True

    def send_encoded(self, data: bytes) -> None:
        message = decode_to_supervisor(data)
        assert isinstance(message, LogRecord)
        self.lines.append(message)

    def wake_control(self) -> None:
        self.woken += 1

    @property
    def texts(self) -> list[str]:
        return [line.message for line in self.lines]


@pytest.fixture
def end() -> FakeEnd:
    """Return the stub's end."""
    return FakeEnd()


@pytest.fixture
def log(end) -> StubLog:
    """Return the stub's log."""
    return StubLog(end)


def test_a_line_is_sent_at_once(log, end):
    """With its level, and the place that wrote it."""
    log.write(ERROR, "model.py", 12, "oh")
    assert end.lines == [LogRecord(2, "model.py", 12, "oh")]


def test_text_that_is_no_unicode_is_sent_too(log, end):
    """With what cannot be written escaped."""
    log.write(INFO, "mod\udc00.py", 1, "a\ud800b")
    assert end.texts == ["a\\ud800b"]


def test_lines_wait_for_room_in_order(log, end):
    """The next line takes them along, or the control thread, or the end of the process."""
    end.room = 1
    for number in range(3):
        log.write(INFO, "m.py", 1, str(number))
    assert end.texts == ["0"]
    assert end.woken == 1
    end.room = 2
    log.tick()
    assert end.texts == ["0", "1", "2"]
    log.write(INFO, "m.py", 1, "3")
    log.drain()
    assert end.texts == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("nbytes", "most"), [(10, 20), (5000, 3)])
def test_few_lines_wait_and_the_rest_is_counted(log, end, monkeypatch, nbytes, most):
    """Memory does not grow; one line says how many were left out."""
    monkeypatch.setattr(stub_log, "MOST_WAITING", 20)
    monkeypatch.setattr(stub_log, "MOST_LARGE", 3)
    end.room = 0
    for _ in range(100):
        log.write(INFO, "m.py", 1, "x" * nbytes)
    assert len(log._waiting) == most
    end.room = 1000
    log.tick()
    assert end.texts[:-1] == ["x" * nbytes] * most
    assert end.texts[-1].startswith(f"{100 - most} lines of level INFO were left out here")
    assert end.lines[-1].level == INFO


def test_a_flood_hides_no_graver_lines(log, end):
    """Each level has its own limit."""
    log._quotas[INFO] = LineQuota(burst=10, per_s=0.001)
    for _ in range(50):
        log.write(INFO, "m.py", 1, "chatter")
    log.write(ERROR, "m.py", 2, "grave")
    assert end.texts == ["chatter"] * 10 + ["grave"]
    log.tick()
    log.tick()
    assert end.texts[11:] == [
        "40 lines of level INFO were left out here: no more than 1000 a second are taken"
    ]


def test_a_line_that_is_written_while_one_is_sent_is_not_lost(log, end, monkeypatch):
    """A finalizer's, in the very thread; it comes behind the other."""
    send = end.send_encoded

    def send_and_collect(data: bytes) -> None:
        monkeypatch.setattr(end, "send_encoded", send)
        log.write(ERROR, "m.py", 3, "from __del__")
        send(data)

    monkeypatch.setattr(end, "send_encoded", send_and_collect)
    log.write(INFO, "m.py", 1, "first")
    assert end.texts == ["first", "from __del__"]


def test_a_forked_child_writes_to_stderr(log, end, capfd):
    """In the server's format; what its parent still had is its parent's."""
    end.room = 0
    log.write(INFO, "m.py", 1, "the parent's")
    end.is_severed = True
    log.write(ERROR, "m.py", 2, "the child's")
    log.drain()
    assert end.lines == []
    text = capfd.readouterr().err
    assert text.startswith("E") and text.endswith(' m.py:2] "the child\'s"\n')
    assert text.count("\n") == 1


def test_many_threads_lose_nothing(log, end):
    """Each one's lines stay in order."""

    def talk(name: str) -> None:
        for number in range(200):
            log.write(INFO, "m.py", number, name)

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.drain()
    for name in "abcd":
        assert [line.line for line in end.lines if line.message == name] == list(range(200))
