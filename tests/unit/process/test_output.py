# SPDX-License-Identifier: Apache-2.0
"""Lines out of pipes."""

from __future__ import annotations

import asyncio
import os

import pytest

from actorserve.process import output
from actorserve.process.output import LAST_LINES, MAX_LINE_BYTES, LineReader
from actorserve.state.line_quota import LineQuota


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


# --- floods --------------------------------------------------------------------------------------


@pytest.fixture
def flooded(pipe):
    """Return a reader with a small quota, its list, and what writes a number of lines to it."""
    reader, got, write_fd = pipe
    reader._quota = LineQuota(burst=10, per_s=1000.0)

    def write(first: int, count: int) -> None:
        text = "".join(f"{number}\n" for number in range(first, first + count))
        os.write(write_fd, text.encode())

    yield reader, got, write
    reader.close()
    os.close(write_fd)


def test_a_flood_is_cut_and_its_end_is_kept(flooded):
    """The first lines, how many are left out, and the last ones."""
    reader, got, write = flooded
    write(0, 1000)
    reader.end()
    left_out = 1000 - 10 - LAST_LINES
    assert got[:10] == [str(number) for number in range(10)]
    assert got[10] == f"({left_out} lines were left out here)"
    assert got[11:] == [str(number) for number in range(1000 - LAST_LINES, 1000)]


def test_a_flood_is_told_of_while_it_lasts(flooded, run, monkeypatch):
    """After a moment, with its last lines; what comes later is delivered as before."""
    reader, got, write = flooded
    monkeypatch.setattr(output, "NOTICE_S", 0.05)

    async def main() -> None:
        reader.begin(asyncio.get_running_loop())
        write(0, 500)
        while not got or "left out" not in "".join(got):
            await asyncio.sleep(0)
        assert got[:10] == [str(number) for number in range(10)]
        write(500, 3)
        while got[-1] != "502":
            await asyncio.sleep(0)
        assert got[-4:] == ["499", "500", "501", "502"]
        assert sum("left out" in line for line in got) == 1

    run(main)


def test_a_flood_without_an_end_of_line_is_cut_too(pipe):
    """Each piece of it counts as a line."""
    reader, got, write_fd = pipe
    reader._quota = LineQuota(burst=2, per_s=0.001)
    text = b"x" * (3 * MAX_LINE_BYTES) + b"\n"
    os.write(write_fd, text)
    reader.end()
    os.close(write_fd)
    assert "".join(got[:2]) == "x" * (2 * MAX_LINE_BYTES)
    assert len(got) <= 4


def test_few_lines_of_a_flood_need_no_notice(flooded):
    """Where all that was skipped is still there."""
    reader, got, write = flooded
    write(0, 50)
    reader.end()
    assert got == [str(number) for number in range(50)]
