# SPDX-License-Identifier: Apache-2.0
"""A rank that does not keep to the rules: what it does wrong is its option "rude"."""

from __future__ import annotations

from typing import Any

from actorserve.errors import BootError
from actorserve.runtime.child import BootSocket
from actorserve.runtime.group_end import RankEnd
from actorserve.wire.codec import encode
from actorserve.wire.generation import EngineInfo, Fragment, Loaded, Output, Outputs, Start, Step
from actorserve.wire.messages import Hello


def main(boot: BootSocket) -> None:
    """Be rude, or wait if another rank is to be."""
    end = RankEnd(boot)
    messages: list[Any] = []
    while not (messages := end.read()):
        end.wait()
    start = messages[0]
    assert isinstance(start, Start)
    end.send(Loaded(end.rank, EngineInfo("rude")))
    if end.rank == 0:
        while not end.read():
            end.wait()
        end.broadcast(Step(1, [], []))
    else:
        while not end.receive_broadcast():
            end.wait()
    if end.rank == start.options.get("rank", 0):
        _be_rude(end, start.options["rude"])
    while True:
        end.wait()


def _be_rude(end: RankEnd, how: str) -> None:
    if how == "garbage":
        end.send_encoded(b"\xc1 no message")
    elif how == "arrays":
        end.send(Outputs([Output(1, arrays={"x": ["x", 11, [3], b"1234"]})]))
    elif how == "pieces":
        end.send_encoded(encode(Fragment(encode(Fragment(b"", True)), True)))
    elif how == "handle":
        end.send(Outputs([Output(1, arrays={"x": ["x", 11, [2], [99, 5, 0, 0, 8]]})]))
    elif how == "hello":
        end._boot.send(Hello(1, "x", 1, 1, 1, ""))
    elif how == "hang up":
        end._boot.close()
    elif how == "leave":
        raise SystemExit(0)
    else:
        raise BootError(how)
