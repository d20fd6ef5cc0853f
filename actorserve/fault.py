# SPDX-License-Identifier: Apache-2.0
"""Fault points: named places where a test can make a process die, stop or hang.

Off unless a process was started with ACTORSERVE_FAULT="<point>:<action>", several separated by
commas; `<point>:<action>:<n>` strikes at the n-th passage instead of the first. Actions:
kill (SIGKILL), stop (SIGSTOP), segv (SIGSEGV), exit0 (ends at once with code 0), hang (sleeps for
ever). The variable is read once, when the process starts. A point that is off costs one test of
a global.

Points: zygote.imported, zygote.forked (before it reports the child), zygote.reported
(after), spawn.forked (before the child waits for its supervisor), spawn.entering (before its entry
function), unpacker.unpacked (an archive, before it is checked), rank.loading and rank.loaded (a
rank of an engine, before and after it loads). A zygote reads the host's variable,
a child that of its spawn.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

VARIABLE = "ACTORSERVE_FAULT"

_armed: dict[str, tuple[str, int]] | None = None


def fault_point(name: str) -> None:
    """Strike here if the process was started with a fault of this name."""
    if _armed is not None:
        _pass(name)


def arm(text: str | None) -> None:
    """Set this process's faults from the variable's text; None or "" is none.

    Raises ValueError for an action that does not exist, as a misspelt fault would test nothing.
    """
    global _armed
    _armed = {}
    for item in filter(None, (text or "").split(",")):
        name, _, rest = item.strip().partition(":")
        action, _, count = rest.partition(":")
        if action not in _ACTIONS or not (count or "1").isdigit():
            raise ValueError(f"{VARIABLE}: {item!r} is not <point>:<{'|'.join(_ACTIONS)}>[:<n>]")
        _armed[name] = (action, int(count or "1"))
    if not _armed:
        _armed = None


def _pass(name: str) -> None:
    assert _armed is not None
    action, count = _armed.get(name, ("", 0))
    if count > 1:
        _armed[name] = (action, count - 1)
    elif count == 1:
        del _armed[name]
        _ACTIONS[action]()


def _hang() -> None:
    while True:
        signal.pause()


def _raise_signal(signo: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signo)


_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _raise_signal(signal.SIGKILL),
    "stop": _raise_signal(signal.SIGSTOP),
    "segv": _raise_signal(signal.SIGSEGV),
    "exit0": lambda: os._exit(0),
    "hang": _hang,
}
