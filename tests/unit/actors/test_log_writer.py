# SPDX-License-Identifier: Apache-2.0
"""The writer of log lines: whoever writes never waits for whoever reads."""

from __future__ import annotations

import os

from actorserve.actors import log_writer
from actorserve.actors.log_writer import LogWriter


def test_a_pipe_that_nobody_reads_blocks_nobody(monkeypatch):
    """Lines beyond the queue are lost and counted; what was queued comes once somebody reads."""
    monkeypatch.setattr(log_writer, "MOST_LINES", 100)
    read_fd, write_fd = os.pipe()
    stream = os.fdopen(write_fd, "w", encoding="utf-8")
    writer = LogWriter(stream)
    for number in range(1000):
        writer.write(f"{number} " + "x" * 1000)
    received = b""
    while b"lines were lost" not in received:
        received += os.read(read_fd, 1 << 20)
    assert received.startswith(b"0 x")
    os.close(read_fd)
    writer.close()
    stream.close()


def test_a_closed_pipe_changes_nothing():
    """Lines go nowhere, and close() returns."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    stream = os.fdopen(write_fd, "w", encoding="utf-8")
    writer = LogWriter(stream)
    writer.write("to nobody")
    writer.close()
    writer.close()
    try:
        stream.close()
    except BrokenPipeError:
        pass
