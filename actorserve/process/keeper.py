# SPDX-License-Identifier: Apache-2.0
"""Keeping a zygote: there is one, or one is on its way.

    start() ─► ZygoteLink ─► up ─► (serves) ─► gone ─► the next one, at once
                   │                             one that never came up: after a pause
                   └─► stopped (state T) while somebody waits: killed, so gone

A zygote holds nothing that matters, so it is replaced without a second thought; what it made
serves on. The keeper also owns what every zygote and child is given to learn of this process's
end: the guard pipe's read end and this process's pidfd. The write end is here and nowhere else.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence

import msgspec

from actorserve.errors import ActorserveError, Unavailable
from actorserve.process import pidfd
from actorserve.process.exit import Exit
from actorserve.process.link import ZygoteLink
from actorserve.process.packet import Packet, close_all, exhausted
from actorserve.wire.boot import FromZygote, ZygoteUp

TRIES = 2
"""How many zygotes in a row may fail a caller before it gets the error."""

_CHECK_EVERY_S = 0.25
_FIRST_BACKOFF_S = 0.1
_LAST_BACKOFF_S = 30.0


class KeeperStats(msgspec.Struct, frozen=True):
    """`pid` is None while no zygote is up; `failed_starts` counts those since the last success."""

    pid: int | None
    started: int
    failed_starts: int


class ZygoteKeeper:
    """Hold one zygote up in `loop`. Raises ResourceExhausted without room for descriptors.

    `on_message` gets what zygotes say. `on_lost` gets the reason each time that one died, and
    whether it had been up; False is also for one that could not be started. `is_waiting` tells
    whether anybody waits for an answer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        preload: Sequence[str],
        on_message: Callable[[ZygoteLink, FromZygote, Packet], None],
        on_lost: Callable[[ActorserveError, bool], None],
        is_waiting: Callable[[], bool],
        log: Callable[[int, str], None],
    ) -> None:
        self.link: ZygoteLink | None = None
        self.gone = asyncio.Event()
        self._loop = loop
        self._preload = preload
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_waiting = is_waiting
        self._log = log
        self._is_ending = False
        self._started = self._failed_starts = 0
        self._launch_timer: asyncio.TimerHandle | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._fds = _guard_and_pidfd()
        self._up: asyncio.Future[None] = loop.create_future()
        self._up.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._launch()

    async def wait_up(self) -> None:
        """Wait for the first zygote; raise the reason if none came up in two tries."""
        await asyncio.shield(self._up)

    @property
    def ready_link(self) -> ZygoteLink | None:
        """The link of a zygote that is up."""
        return self.link if self.link is not None and self.link.is_up else None

    def watch(self) -> None:
        """Look now and then whether the zygote was stopped, as long as somebody waits for it."""
        if self._check_timer is None and not self._is_ending:
            self._check_timer = self._loop.call_later(_CHECK_EVERY_S, self._on_check)

    def replace_if_stopped(self) -> None:
        """Kill a zygote in state T, which answers nobody; the next one follows."""
        if self.link is not None and self.link.is_stopped():
            self._log(1, f"the zygote (process {self.link.pid}) is stopped; replacing it")
            self.link.kill()

    def end(self) -> None:
        """Hang up and start no other; `gone` is set when the zygote is dead and reaped."""
        self._is_ending = True
        self._cancel_timers()
        if not self._up.done():
            self._up.set_exception(Unavailable("the zygote was stopped before it was up"))
        if self.link is None:
            self.gone.set()
            return
        self.link.hang_up()
        if not self.link.is_up or self.link.is_stopped():
            self.link.kill()  # it would not notice

    def close(self) -> None:
        """Kill and reap the zygote and close everything, also without the loop. Idempotent."""
        self._is_ending = True
        self._cancel_timers()
        if self.link is not None:
            self.link.close()
        self._close_fds()

    def disown(self) -> None:
        """Close this process's copies alone, in a fork of the owner."""
        self._is_ending = True
        if self.link is not None:
            self.link.disown()
        self._close_fds()

    def stats(self) -> KeeperStats:
        """Count the zygotes."""
        pid = self.ready_link.pid if self.ready_link is not None else None
        return KeeperStats(pid, self._started, self._failed_starts)

    # --- what happens ---

    def _launch(self) -> None:
        """Start a zygote now; if even that fails, try again later."""
        self._launch_timer = None
        guard_r, _, own_pidfd = self._fds
        try:
            self.link = ZygoteLink(
                self._loop,
                guard_fd=guard_r,
                supervisor_pidfd=own_pidfd,
                preload=self._preload,
                on_message=self._on_link_message,
                on_gone=self._on_gone,
                log=self._log,
            )
        except OSError as error:
            self._on_failed_start(Unavailable(f"the zygote cannot be started: {error}"))
        except ActorserveError as error:
            self._on_failed_start(error)
        else:
            self._started += 1
            self.watch()

    def _on_link_message(self, link: ZygoteLink, message: FromZygote, packet: Packet) -> None:
        if isinstance(message, ZygoteUp):
            for failure in message.failures:
                self._log(1, f"the zygote (process {message.pid}) could not import {failure}")
            self._failed_starts = 0
            if not self._up.done():
                self._up.set_result(None)
        self._on_message(link, message, packet)

    def _on_gone(self, link: ZygoteLink, end: Exit) -> None:
        self.link = None
        if self._is_ending:
            self.gone.set()
            return
        words = f"the zygote (process {link.pid}) {end.describe()}"
        if not link.is_up:
            self._on_failed_start(Unavailable(f"{words} before it was up"))
            return
        self._log(1, f"{words}; its children serve on, another is being started")
        self._on_lost(Unavailable(words), True)
        self._launch()

    def _on_failed_start(self, error: ActorserveError) -> None:
        self._failed_starts += 1
        delay_s = min(_FIRST_BACKOFF_S * 2 ** (self._failed_starts - 1), _LAST_BACKOFF_S)
        self._log(2, f"{error.message}; trying again in {delay_s:g} s")
        if self._failed_starts >= TRIES and not self._up.done():
            self._up.set_exception(error)
        self._on_lost(error, False)
        self._launch_timer = self._loop.call_later(delay_s, self._launch)

    def _on_check(self) -> None:
        self._check_timer = None
        self.replace_if_stopped()
        if self._is_waiting() or self.ready_link is None:
            self.watch()

    def _cancel_timers(self) -> None:
        for timer in (self._launch_timer, self._check_timer):
            if timer is not None:
                timer.cancel()
        self._launch_timer = self._check_timer = None

    def _close_fds(self) -> None:
        self.link = None
        fds, self._fds = self._fds, (-1, -1, -1)
        close_all([fd for fd in fds if fd >= 0])


def _guard_and_pidfd() -> tuple[int, int, int]:
    """The guard pipe's ends, and this process's pidfd or -1 where the kernel has none."""
    try:
        guard_r, guard_w = os.pipe()
    except OSError as error:
        raise exhausted(error, "the guard pipe") from error
    try:
        return guard_r, guard_w, pidfd.open_pidfd(os.getpid())
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):
            return guard_r, guard_w, -1
        close_all((guard_r, guard_w))
        raise exhausted(error, "this process's pidfd") from error
