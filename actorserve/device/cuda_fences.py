# SPDX-License-Identifier: Apache-2.0
"""Fences of a slab on CUDA: a ring of events that other processes can open.

    creator ─ cuEventRecord(ring[n]) ─► number n, in the reference ─► importer ─ cuStreamWaitEvent

The handles of all events go with the slab's offer, so that a fence is one number. What always
holds: a wait for fence n waits for n's work or for later work that took n's event over, never for
less; a fence of a dead creator is an error, since its event must not be touched any more.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec

from actorserve.device.cuda_calls import CallRefused, CudaCalls
from actorserve.device.driver import DeviceError, NoDevice
from actorserve.errors import ProtocolError
from actorserve.process.pidfd import is_dead, open_pidfd

RING = 16
"""So many fences of a slab are told apart; a wait for an older one is for a newer one too."""

HANDLE_BYTES = 64


class SlabExtra(msgspec.Struct, frozen=True, array_like=True):
    """What goes with an offer: whose events these are, and their handles, one after the other.

    `started` is when process `pid` began, in the kernel's ticks, so that another one is not taken
    for it. No handles: this device has no such events.
    """

    pid: int
    started: int
    handles: bytes


def read_extra(extra: bytes) -> SlabExtra:
    """Decode what came with an offer; ProtocolError if it is none of ours."""
    try:
        found = msgspec.msgpack.decode(extra, type=SlabExtra)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"what goes with a CUDA slab cannot be read: {error}") from None
    if len(found.handles) % HANDLE_BYTES or len(found.handles) > RING * HANDLE_BYTES:
        raise ProtocolError(f"{len(found.handles)} bytes of event handles with a CUDA slab")
    return found


class OwnFences:
    """The events of a slab that this process made. Closed with its last user."""

    def __init__(self, calls: CudaCalls, ordinal: int) -> None:
        self._calls = calls
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._users = 1
        self._last = 0
        self._events: list[Any] = []
        handles = self._make_events()
        pid = os.getpid()
        self.extra = SlabExtra(pid, _started(pid), handles)
        if handles:
            _made_here[handles] = self

    def record(self, stream: int) -> int:
        """Record the next fence; 0 where there are no events, and the stream was waited for."""
        with self._calls.current(self._ordinal):
            if not self._events:
                self._calls("cuStreamSynchronize", stream)
                return 0
            with self._lock:
                self._last = fence = self._last + 1
                self._calls("cuEventRecord", self._events[(fence - 1) % RING], stream)
                return fence

    def wait(self, fence: int, stream: int) -> None:
        """Have a stream wait for a fence."""
        if not (self._events and fence > 0):
            raise DeviceError(f"a slab without such a fence: {fence}")
        with self._calls.current(self._ordinal):
            self._calls("cuStreamWaitEvent", stream, self._events[(fence - 1) % RING], 0)

    def join(self) -> OwnFences:
        """Count one more user: the slab is mapped once more in this process."""
        with self._lock:
            self._users += 1
            return self

    def close(self) -> None:
        """Count a user less; destroy the events with the last. A context must be current."""
        with self._lock:
            self._users -= 1
            events, self._events = (self._events, []) if not self._users else ([], self._events)
        for event in events:
            self._calls.api.cuEventDestroy(event)

    def _make_events(self) -> bytes:
        flag = self._calls.api.CUevent_flags
        flags = int(flag.CU_EVENT_INTERPROCESS) | int(flag.CU_EVENT_DISABLE_TIMING)
        handles = []
        try:
            for _ in range(RING):
                self._events.append(self._calls("cuEventCreate", flags))
                handle = self._calls("cuIpcGetEventHandle", self._events[-1])
                handles.append(ctypes.string_at(handle.getPtr(), HANDLE_BYTES))
        except (CallRefused, NoDevice):  # fences are then waited for where they are recorded
            for event in self._events:
                self._calls.api.cuEventDestroy(event)
            self._events = []
            return b""
        return b"".join(handles)


_made_here: weakref.WeakValueDictionary[bytes, OwnFences] = weakref.WeakValueDictionary()
"""A process cannot open its own handles; it uses the events themselves."""


class TheirFences:
    """The events of a slab that another process made, opened when they are first waited for."""

    def __init__(self, calls: CudaCalls, ordinal: int, extra: SlabExtra) -> None:
        self._calls = calls
        self._ordinal = ordinal
        self._extra = extra
        self._lock = threading.Lock()
        self._events: dict[int, Any] = {}
        self._pidfd = -1

    def record(self, stream: int) -> int:
        """Wait for the stream instead: who waits could not tell that this process died."""
        with self._calls.current(self._ordinal):
            self._calls("cuStreamSynchronize", stream)
        return 0

    def wait(self, fence: int, stream: int) -> None:
        """Have a stream wait for a fence; DeviceError if its creator is dead."""
        if not (self._extra.handles and fence > 0):
            raise DeviceError(f"a slab without such a fence: {fence}")
        with self._lock, self._calls.current(self._ordinal):
            if self._is_dead():
                raise DeviceError(f"fence {fence} does not count: its process died before")
            number = (fence - 1) % (len(self._extra.handles) // HANDLE_BYTES)
            event = self._events.get(number)
            if event is None:
                event = self._events[number] = self._open(number)
            self._calls("cuStreamWaitEvent", stream, event, 0)

    def close(self) -> None:
        """Give the events up. A context must be current."""
        with self._lock:
            for event in self._events.values():
                self._calls.api.cuEventDestroy(event)
            self._events = {}
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1

    def _open(self, number: int) -> Any:
        handle = self._calls.api.CUipcEventHandle()
        start = number * HANDLE_BYTES
        ctypes.memmove(
            handle.getPtr(), self._extra.handles[start : start + HANDLE_BYTES], HANDLE_BYTES
        )
        return self._calls("cuIpcOpenEventHandle", handle)

    def _is_dead(self) -> bool:
        pid, started = self._extra.pid, self._extra.started
        if self._pidfd < 0:
            try:
                pidfd = open_pidfd(pid)
            except OSError:  # nobody has this number, or the kernel has no pidfds
                return _started(pid) != started
            if _started(pid) != started:
                os.close(pidfd)
                return True
            self._pidfd = pidfd
        return is_dead(self._pidfd)


Fences = OwnFences | TheirFences


def fences_of(calls: CudaCalls, ordinal: int, extra: bytes) -> Fences:
    """Return the fences of a slab that is being imported; ProtocolError if the extra lies."""
    found = read_extra(extra)
    own = _made_here.get(found.handles) if found.pid == os.getpid() else None
    return own.join() if own is not None else TheirFences(calls, ordinal, found)


def _started(pid: int) -> int:
    """Return when a process began; 0 if it is none any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
