# SPDX-License-Identifier: Apache-2.0
"""Lines out of pipes."""

from __future__ import annotations

import asyncio
import os

import pytest

from actorserve.process.output import MAX_LINE_BYTES, LineReader


@pytest.fixture
def pipe():
    """A reader with the list it fills, and the descriptor to write to."""
    read_fd, write_fd = os.pipe()
    lines: list[str] = []
    yield LineReader(read_fd, lines.append), lines, write_fd


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\r\n\nthree", ["one", "", "three"]),
        (b"\xff\xc3\xa9\n", ["\\xffé"]),
        (b"a\0b\n", ["a\0b"]),
    ],
)
def test_bytes_become_lines(pipe, data, lines):
    """Lines are decoded whatever they hold, and the unfinished one comes at the end."""
    reader, got, write_fd = pipe
    os.write(write_fd, data)
    os.close(write_fd)
    reader.end()
    reader.end()
    assert got == lines


@pytest.mark.parametrize("end", [b"\n", b""])
def test_long_line_comes_in_pieces(pipe, end):
    """A line over the limit is cut between characters, and nothing is lost."""
    reader, got, write_fd = pipe
    text = "aé€" * 8_000
    os.write(write_fd, text.encode() + end)
    os.close(write_fd)
    reader.end()
    assert "".join(got) == text
    assert len(got) > 1
    assert all(len(line.encode()) <= MAX_LINE_BYTES for line in got)


def test_end_does_not_wait_for_another_writer(pipe):
    """A pipe that somebody keeps open is drained and closed all the same."""
    reader, got, write_fd = pipe
    os.write(write_fd, b"so far")
    reader.end()
    assert got == ["so far"]
    with pytest.raises(BrokenPipeError):
        os.write(write_fd, b"more")
    os.close(write_fd)


def test_loop_delivers_as_it_comes(pipe, run):
    """In a loop, lines arrive while the pipe is open, and its end closes the reader."""
    reader, got, write_fd = pipe

    async def main() -> None:
        reader.begin(asyncio.get_running_loop())
        os.write(write_fd, b"now\nla")
        while not got:
            await asyncio.sleep(0)
        assert got == ["now"]
        os.write(write_fd, b"ter")
        os.close(write_fd)
        while len(got) < 2:
            await asyncio.sleep(0)

    run(main)
    assert got == ["now", "later"]


def test_line_may_close_its_reader():
    """Whoever gets a line may end the reader in that very call."""
    read_fd, write_fd = os.pipe()
    got: list[str] = []

    def deliver(line: str) -> None:
        got.append(line)
        reader.close()

    reader = LineReader(read_fd, deliver)
    os.write(write_fd, b"one\n")
    reader.end()
    os.close(write_fd)
    assert got == ["one"]
