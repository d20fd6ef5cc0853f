# SPDX-License-Identifier: Apache-2.0
"""The Spawner: children in an asyncio loop, made by a zygote that may die at any time.

    spawn() ─► Order ─► ZygoteLink ─► zygote ─► Child ─► pidfd ─► on_exit
                 ▲          │
                 └── once ──┘ when it dies: the next zygote is started at once, children serve on

What holds here: every order ends in exactly one Child or one exception, every Child in exactly
one `on_exit`. Everything runs in the loop's own thread, and nothing waits in it. A process that
the host forks from this one owns nothing of it: there every Spawner is inert and its descriptors
are closed, so that neither its life nor its end matters to the children.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from actorserve.errors import ActorserveError, ResourceExhausted, Unavailable
from actorserve.process.brood import Brood
from actorserve.process.environment import PackageFolder, UnpackedFolder
from actorserve.process.environment_store import EnvironmentStore
from actorserve.process.exit import Exit
from actorserve.process.keeper import TRIES, KeeperStats, ZygoteKeeper
from actorserve.process.link import ZygoteLink
from actorserve.process.order import Order, SpawnSpec, spawn_error, spawn_request
from actorserve.process.packet import Packet, close_all
from actorserve.process.watch import Child
from actorserve.shm import janitor
from actorserve.wire.boot import (
    ChildSpawned,
    FromZygote,
    KillChild,
    SpawnFailed,
    ZygoteUp,
)

__all__ = ["Child", "SpawnSpec", "Spawner", "SpawnerStats"]

_STOP_KILL_S = 5.0
_STOP_ZYGOTE_S = 1.0


class SpawnerStats(msgspec.Struct, frozen=True):
    """Counters since the start; `zygote_pid` is None while none is up."""

    zygote_pid: int | None
    zygotes_started: int
    children: int
    orders: int
    spawned: int
    failed: int
    exited: int
    unknown_statuses: int


class Spawner:
    """Start children and tell how they end; lives in one asyncio loop, of any kind, in any thread.

    `preload` names modules that the zygote imports, so that children have them at once. `log` is
    called with a level (0 info, 1 warning, 2 error, 3 verbose) and a text.
    """

    def __init__(self, *, preload: Sequence[str] = (), log: Callable[[int, str], None]) -> None:
        self._owner = os.getpid()
        self._preload = tuple(preload)
        self._log = _unfailing(log)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeper: ZygoteKeeper | None = None
        self._orders: dict[int, Order] = {}
        self._brood: Brood | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._is_closed = False
        self._folder = PackageFolder()
        self._archives = EnvironmentStore(self._log)
        self._number = self._spawned = self._failed = 0
        _spawners.add(self)

    # --- start -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the zygote and return when it is up; the loop is never blocked.

        First it removes what killed processes left: see shm/janitor.py, environment_store.py.

        Raises Unavailable or ResourceExhausted when none comes up in two tries, and stops then.
        """
        self._check_usable()
        if self._keeper is None:
            self._loop = asyncio.get_running_loop()
            for name in janitor.sweep():
                self._log(0, f"removed /dev/shm/{name}, which a dead process had left")
            self._keeper = ZygoteKeeper(
                self._loop,
                preload=self._preload,
                on_message=self._on_message,
                on_lost=self._on_zygote_lost,
                is_waiting=lambda: bool(self._orders),
                log=self._log,
            )
            self._brood = Brood(self._loop, self._keeper.replace_if_stopped, self._log)
        try:
            await self._archives.sweep()
            await self._keeper.wait_up()
        except ActorserveError:
            await self.stop()
            raise

    def _on_zygote_lost(self, error: ActorserveError, was_up: bool) -> None:
        """Have the waiting orders made by the next zygote, but for those that saw enough."""
        for order in list(self._orders.values()):
            order.zygotes_lost += order.is_sent or not was_up
            if order.zygotes_lost >= TRIES:
                self._fail(order, error)
            elif order.is_sent:
                self._renew(order)

    def _renew(self, order: Order) -> None:
        try:
            order.renew()
        except ActorserveError as error:
            self._fail(order, error)

    # --- spawning --------------------------------------------------------------------------------

    async def spawn(
        self,
        spec: SpawnSpec,
        on_exit: Callable[[Exit], None],
        on_output: Callable[[str, str], None],
    ) -> Child:
        """Start a child and return it; wait for a zygote if one is only coming up.

        `on_output(stream, line)` gets the lines of "stdout" and "stderr"; `on_exit(exit)` is
        called once, after the last line. Both run in the loop, never before this call is done.
        If this call is cancelled, the child is killed, or never made, and nobody is called.

        Raises InvalidArgument or BootError for a spec that cannot work, ResourceExhausted
        without room for descriptors, Unavailable when no process can be made (EAGAIN, ENOMEM),
        two zygotes died over this order, or the Spawner does not run.
        """
        self._check_usable()
        keeper, brood, loop = self._running()
        self._number += 1
        request = spawn_request(self._number, spec, self._folder)
        order = Order(request, loop.create_future(), on_exit, on_output)
        self._orders[order.number] = order
        try:
            if keeper.ready_link is not None:
                self._dispatch(order, keeper.ready_link)
            keeper.watch()
            child = await order.future
        except BaseException:
            self._give_up(order)
            raise
        child.begin(brood.on_death)
        return child

    async def unpacked(self, archive: Path) -> UnpackedFolder:
        """Return the folder of an archive of a Python environment, unpacked once for all.

        It stays while the archive does not change and somebody holds it, and goes with this
        Spawner. Raises BootError for an archive that is none, and as `spawn`.
        """
        self._check_usable()
        return await self._archives.folder(archive, self.spawn)

    def _dispatch(self, order: Order, link: ZygoteLink) -> None:
        try:
            order.is_sent = True
            link.send(order.request, order.child_fds())
        except ActorserveError as error:
            self._fail(order, error)

    def _fail(self, order: Order, error: ActorserveError) -> None:
        self._failed += 1
        self._orders.pop(order.number, None)
        order.close()
        if not order.future.done():
            order.future.set_exception(error)

    def _give_up(self, order: Order) -> None:
        """Undo an order that nobody waits for any more, whatever became of it."""
        self._orders.pop(order.number, None)
        if self._brood is None or not self._brood.disclaim(order.number):
            order.close()  # a child that comes of it yet finds the end of file

    # --- what zygotes say ------------------------------------------------------------------------

    def _on_message(self, link: ZygoteLink, message: FromZygote, packet: Packet) -> None:
        if isinstance(message, ZygoteUp):
            for order in list(self._orders.values()):
                self._dispatch(order, link)
        elif isinstance(message, ChildSpawned):
            self._on_spawned(link, message, packet)
        elif isinstance(message, SpawnFailed):
            refused = self._orders.get(message.number)
            if refused is not None:
                self._fail(refused, spawn_error(refused.name, message))
        elif self._brood is not None:
            self._brood.on_status(message)

    def _on_spawned(self, link: ZygoteLink, message: ChildSpawned, packet: Packet) -> None:
        order = self._orders.pop(message.number, None)
        if order is None or order.future.done() or not packet.fds:
            link.send(KillChild(message.number))
            close_all(packet.fds)
            if order is not None and not packet.fds:
                text = f"no room for the pidfd of {order.name}: too many open files (ulimit -n)"
                self._fail(order, ResourceExhausted(text))
            return
        self._spawned += 1
        _, brood, loop = self._running()
        brood.add(order.fulfil(loop, message.pid, packet.fds[0], self._log), link)

    # --- the end ---------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Kill all children and the zygote, reap it, close everything; `on_exit` is called.

        Idempotent, and harmless before `start()`. Takes milliseconds, 7 s at the very most, and
        what it takes to remove unpacked archives. Without its loop (closed, or in a fork of the
        owner) it does what can be done at once, and calls nobody.
        """
        if self._owner != os.getpid():
            return
        if self._loop is None or self._keeper is None or self._loop.is_closed():
            self._close()
            return
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._stop(*self._running()[:2]))
            # Not in a finally of _stop: a task that is cancelled before its first step runs none.
            self._stopping.add_done_callback(lambda _task: self._close())
        await asyncio.shield(self._stopping)

    async def _stop(self, keeper: ZygoteKeeper, brood: Brood) -> None:
        for order in list(self._orders.values()):
            self._fail(order, Unavailable(f"{order.name}: the Spawner was stopped"))
        brood.kill_all()
        await _within(brood.childless, _STOP_KILL_S)
        keeper.end()
        await _within(keeper.gone, _STOP_ZYGOTE_S)
        await self._archives.close()
        brood.give_up()

    def _close(self) -> None:
        """End everything at once, also without a loop. Idempotent."""
        self._is_closed = True
        if self._brood is not None:
            self._brood.close()
        for order in self._orders.values():
            order.close()
        if self._keeper is not None:
            self._keeper.close()
        self._folder.close()
        self._archives.close_now()
        self._forget()

    def _forget(self) -> None:
        self._orders.clear()
        _spawners.discard(self)

    def disown(self) -> None:
        """In a process forked from the owner: close the copies, and touch nothing else."""
        if self._brood is not None:
            self._brood.disown()
        for order in self._orders.values():
            order.close()
        if self._keeper is not None:
            self._keeper.disown()
        self._folder.disown()
        self._archives.disown()
        self._forget()

    def __del__(self) -> None:
        if getattr(self, "_owner", None) == os.getpid():
            self._close()

    # --- the rest --------------------------------------------------------------------------------

    def stats(self) -> SpawnerStats:
        """Count what happened since the start."""
        keeper = self._keeper.stats() if self._keeper is not None else KeeperStats(None, 0, 0)
        return SpawnerStats(
            zygote_pid=keeper.pid,
            zygotes_started=keeper.started,
            children=len(self._brood) if self._brood is not None else 0,
            orders=len(self._orders),
            spawned=self._spawned,
            failed=self._failed,
            exited=self._brood.exited if self._brood is not None else 0,
            unknown_statuses=self._brood.unknown_statuses if self._brood is not None else 0,
        )

    def _check_usable(self) -> None:
        if self._owner != os.getpid():
            raise Unavailable(f"this Spawner belongs to process {self._owner}, not to its forks")
        if self._stopping is not None or self._is_closed:
            raise Unavailable("this Spawner was stopped")

    def _running(self) -> tuple[ZygoteKeeper, Brood, asyncio.AbstractEventLoop]:
        if self._keeper is None or self._brood is None or self._loop is None:
            raise Unavailable("this Spawner was not started")
        return self._keeper, self._brood, self._loop


def _unfailing(log: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """A log that is full or closed must not keep a zygote from being replaced."""

    def log_if_possible(level: int, text: str) -> None:
        try:
            log(level, text)
        except Exception:
            pass

    return log_if_possible


async def _within(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except asyncio.TimeoutError:
        pass


_spawners: weakref.WeakSet[Spawner] = weakref.WeakSet()


def _disown_all() -> None:
    for spawner in list(_spawners):
        spawner.disown()


os.register_at_fork(after_in_child=_disown_all)
