# SPDX-License-Identifier: Apache-2.0
"""The life of one request: who has it, who still waits for it, and what ends it.

Two parties hold a request: the client, who waits for its end, and the stub, which works on it.
They let go in either order, and that is all there is to the states:

    state        client   stub      why it is a state of its own
    QUEUED       waits    -         nothing happened yet: it may be dropped or moved at will
    DISPATCHED   waits    works     nothing was delivered yet: a retry is still possible
    STREAMING    waits    works     something was delivered: a retry would deliver it twice
    CANCELLING   waits    is told   the answer still comes, but nothing is retried any more
    GONE         -        works     its cancel word and its blocks may not be reused yet
    ENDED        -        -         forget it; whatever still comes for it is dropped

                    DISPATCH               RESPONSE
          QUEUED ─────────────► DISPATCHED ─────────► STREAMING
            │ ▲  STUB_DIED_RETRY │ │  └──── CANCEL ────────┤
            │ └──────────────────┘ │                       ▼
            │                      │ DEADLINE, DISCONNECT  CANCELLING
            │                      ├──────────► GONE ◄─────┤
            ▼                      ▼              ▼        ▼
          ENDED ◄──────────────── FINAL, ERROR, STUB_DIED ─┘

What always holds: whatever the events and their order, END is said exactly once on the way to
ENDED, and DELIVER and FAIL never after it.

States and events are small integers, and one look into `TRANSITIONS` says everything, because
this runs several times for every request. A step yields one integer: the next state in its low
bits, and above them the flags of what the caller has to do. `Life.step` does it with a method
call; a class that cannot inherit from `Life` does the same in its own words:

    todo = TRANSITIONS[self.state][event]
    self.state = todo & STATE_MASK
"""

from __future__ import annotations

import msgspec

# States.
QUEUED = 0
DISPATCHED = 1
STREAMING = 2
CANCELLING = 3
GONE = 4
ENDED = 5

STATE_NAMES = ("QUEUED", "DISPATCHED", "STREAMING", "CANCELLING", "GONE", "ENDED")

# Events.
DISPATCH = 0
"""It is about to be sent to a stub. DROP in the answer means: leave it out of the batch."""
RESPONSE = 1
"""A response came and more may follow; an error inside a stream counts as one."""
FINAL = 2
"""The last response came, with or without content: the stub is done with it."""
ERROR = 3
"""It failed and no stub works on it (any more): refused in the queue, or the stub said so."""
CANCEL = 4
"""The client does not need the answer, but still waits for the end."""
DEADLINE = 5
"""The server ends it now, whatever the stub does: a deadline, or a drain that takes too long."""
STUB_DIED = 6
"""The stub that works on it died, and it may not be run again."""
STUB_DIED_RETRY = 7
"""The stub that works on it died, and it may be run again."""
DISCONNECT = 8
"""The client is gone: nobody is left to be told anything."""

EVENT_NAMES = (
    "DISPATCH",
    "RESPONSE",
    "FINAL",
    "ERROR",
    "CANCEL",
    "DEADLINE",
    "STUB_DIED",
    "STUB_DIED_RETRY",
    "DISCONNECT",
)

# What to do; any number of them may be set.
STATE_MASK = 7
DELIVER = 8
"""Hand this response to the client."""
END = 16
"""This is the end for the client: said exactly once in a life."""
FREE = 32
"""No stub holds it any more: its cancel word and its blocks may be given back."""
DROP = 64
"""The event came too late or twice: do nothing with what it carries, and count it."""
FAIL = 128
"""Tell the client an error, the event's own; always together with END."""
TELL = 256
"""Set the request's cancel word, so that the stub knows."""
REQUEUE = 512
"""Put it back to the front of its queue."""
UNQUEUE = 1024
"""Take it out of its queue."""

_REFUSED = ENDED | FAIL | END | UNQUEUE
_ANSWERED = ENDED | DELIVER | END | FREE
_FAILED = ENDED | FAIL | END | FREE

TRANSITIONS: tuple[tuple[int, ...], ...] = (
    (  # QUEUED: a response can only be one of a stub that is dead by now
        DISPATCHED,
        QUEUED | DROP,
        QUEUED | DROP,
        _REFUSED,
        _REFUSED,
        _REFUSED,
        QUEUED,
        QUEUED,
        ENDED | END | UNQUEUE,
    ),
    (  # DISPATCHED
        DISPATCHED | DROP,
        STREAMING | DELIVER,
        _ANSWERED,
        _FAILED,
        CANCELLING | TELL,
        GONE | FAIL | END | TELL,
        _FAILED,
        QUEUED | REQUEUE | FREE,
        GONE | END | TELL,
    ),
    (  # STREAMING: as above, but never run again
        STREAMING | DROP,
        STREAMING | DELIVER,
        _ANSWERED,
        _FAILED,
        CANCELLING | TELL,
        GONE | FAIL | END | TELL,
        _FAILED,
        _FAILED,
        GONE | END | TELL,
    ),
    (  # CANCELLING: the model answers what it likes, the client sees it; who cancels twice is heard
        CANCELLING | DROP,
        CANCELLING | DELIVER,
        _ANSWERED,
        _FAILED,
        CANCELLING,
        GONE | FAIL | END,
        _FAILED,
        _FAILED,
        GONE | END,
    ),
    (  # GONE: only the stub's last word on it is awaited
        GONE | DROP,
        GONE | DROP,
        ENDED | FREE | DROP,
        ENDED | FREE | DROP,
        GONE,
        GONE,
        ENDED | FREE,
        ENDED | FREE,
        GONE,
    ),
    (  # ENDED
        ENDED | DROP,
        ENDED | DROP,
        ENDED | DROP,
        ENDED | DROP,
        ENDED,
        ENDED,
        ENDED,
        ENDED,
        ENDED,
    ),
)


class LifeStats(msgspec.Struct, frozen=True):
    """Where a request is, and how many stubs died with it."""

    state: str
    kills: int


class Life:
    """The state of one request, to be inherited by whatever else the server keeps about it.

    `state` is one of the states above; `kills` counts the stubs that died while they had it.
    """

    __slots__ = ("kills", "state")

    def __init__(self) -> None:
        self.state = QUEUED
        self.kills = 0

    def step(self, event: int) -> int:
        """Take an event; return the next state (low bits) and the flags of what to do."""
        todo = TRANSITIONS[self.state][event]
        self.state = todo & STATE_MASK
        return todo

    def stub_died(self, retries: int) -> int:
        """Take the death of its stub; `retries` is the model's RETRY_ON_STUB_DEATH.

        A request that had nothing delivered and was not cancelled is put back (REQUEUE) until it
        has killed `retries` + 1 stubs. A queued or ended request is not touched: no stub had it.
        """
        if self.state in (QUEUED, ENDED):
            return self.state
        self.kills += 1
        return self.step(STUB_DIED_RETRY if self.kills <= retries else STUB_DIED)

    def death_message(self, retries: int, death: str) -> str:
        """Return the text of the error after `stub_died`; `death` says what killed the stub."""
        if retries > 0 and self.kills > retries:
            return poison_message(self.kills)
        return death

    def stats(self) -> LifeStats:
        """Return where the request is."""
        return LifeStats(STATE_NAMES[self.state], self.kills)


def poison_message(kills: int) -> str:
    """Return the text of the refusal of a request that has killed `kills` stubs."""
    return f"request rejected: killed {kills} stub{'' if kills == 1 else 's'}"
