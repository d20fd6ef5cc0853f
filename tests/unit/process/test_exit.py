# SPDX-License-Identifier: Apache-2.0
"""Exits in numbers and words."""

from __future__ import annotations

import pytest

from actorserve.process.exit import Exit, signal_name


@pytest.mark.parametrize(
    ("status", "code", "signo", "words"),
    [
        (None, None, None, "exit status unknown"),
        (0, 0, None, "exited with code 0"),
        (3 << 8, 3, None, "exited with code 3"),
        (9, None, 9, "killed by SIGKILL (perhaps out of memory)"),
        (11, None, 11, "killed by SIGSEGV"),
        (6 | 0x80, None, 6, "killed by SIGABRT"),
        (40, None, 40, "killed by signal 40"),
    ],
)
def test_exit_is_told_in_words(status, code, signo, words):
    """Code, signal and description follow from the wait status."""
    exit_ = Exit(status)
    assert (exit_.code, exit_.signal, exit_.describe()) == (code, signo, words)


def test_signals_have_names():
    """Known signals go by name."""
    assert signal_name(15) == "SIGTERM"
