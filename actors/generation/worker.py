# SPDX-License-Identifier: Apache-2.0
"""The executor whose engine runs in a thread of this process.

    any thread ─ put ─► inbox ─► pump thread: take, turn ─► registry ─► results

The thread knows the inbox and the registry and never the executor, so that an executor which
everybody forgot is collected, and its thread ends. What always holds: whatever the thread dies
of, everybody who waits hears it.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import traceback
from collections import deque
from typing import Any

from actorserve.actors.generation.engine import Engine
from actorserve.actors.generation.executor import GenerationExecutor
from actorserve.actors.generation.executor_base import Sendable
from actorserve.actors.generation.pump import Pump
from actorserve.actors.generation.registry import Registry
from actorserve.actors.generation.spec import (
    REFUSALS,
    EngineSpec,
    ExecutorConfig,
    checked_engine,
    spec_of,
    tokenizer_of,
)
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, EngineDeadError
from actorserve.wire.generation import Abort, Output

_log = logging.getLogger("actorserve")

THREAD_POLL_S = 0.005
"""How long a thread-driven engine without a descriptor is waited for, while requests may come."""

JOIN_S = 2.0
ABANDONED_JOIN_S = 0.2
"""As long, for a thread that was given up: it may be about to notice."""

LONGEST_S = 1e6
"""The longest sleep with a limit: poll takes a C int of milliseconds."""

LOOKS = 4
"""How often an iteration is looked at before it counts as hung."""


class Inbox:
    """What is sent to the pump, and its sleep. Any number of senders, one taker."""

    def __init__(self) -> None:
        self._messages: deque[Sendable] = deque()
        self._is_parked = False
        self._hear, self._ring = socket.socketpair()
        self._hear.setblocking(False)
        self._ring.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._hear, select.POLLIN)
        self._watched: int | None = None

    def put(self, message: Sendable) -> None:
        """Send a message; nothing happens after `close`."""
        self._messages.append(message)
        if self._is_parked:  # it looked before it saw this, or sees it yet
            try:
                self._is_parked = False
                self._ring.send(b"\0")
            except OSError:
                pass  # closed, or rung already
            except BaseException:  # an interrupt: whoever sends next rings
                self._is_parked = True
                raise

    def take(self) -> list[Sendable]:
        """Return everything that has come."""
        messages = self._messages
        taken = []
        while messages:
            taken.append(messages.popleft())
        return taken

    @property
    def is_empty(self) -> bool:
        """Whether everything that was sent has been taken."""
        return not self._messages

    def wait(self, timeout_s: float | None, fileno: int | None) -> None:
        """Sleep until a message comes, or the descriptor is readable, or the time is over."""
        if fileno is not None and fileno != self._watched:
            self._poll.register(fileno, select.POLLIN)
            self._watched = fileno
        self._is_parked = True
        if not self._messages:
            timeout_ms = None if timeout_s is None else math.ceil(min(timeout_s, LONGEST_S) * 1e3)
            self._poll.poll(timeout_ms)
        self._is_parked = False
        try:
            self._hear.recv(4096)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Take no more."""
        self._is_parked = False
        self._hear.close()
        self._ring.close()


class _Watch:
    """Where the pump is, for the thread that asks whether it hangs."""

    def __init__(self) -> None:
        self.pump: Pump | None = None
        self.is_abandoned = False
        self.ended = threading.Event()

    def run(self, registry: Registry, limit_s: float) -> None:
        """Be that thread: it sleeps, mostly."""
        while not self.ended.wait(limit_s / LOOKS):
            pump = self.pump
            since_s = 0.0 if pump is None else pump.busy_since_s
            if since_s and monotonic_s() - since_s > limit_s:
                self.is_abandoned = True
                registry.fail_all(
                    EngineDeadError(
                        f"an iteration has taken over {limit_s:g} s", rank=0, pid=os.getpid()
                    )
                )
                registry.gone.open()  # nobody waits for it any more
                return


class GenerationWorker(GenerationExecutor):
    """An executor over an engine in a thread of this process.

    `engine` is an instance, which is this executor's from now on, or names one. A hung engine
    cannot be killed here: after `hang_timeout_s` everybody is told that it is dead, and its
    thread is left behind.
    """

    def __init__(
        self, engine: Engine | EngineSpec | str, config: ExecutorConfig | None = None
    ) -> None:
        config = config or ExecutorConfig()
        self._name = _name_of(engine)
        if isinstance(engine, (str, EngineSpec)):
            engine = spec_of(engine)
            tokenizer = engine.tokenizer()
        else:
            engine = checked_engine(engine)
            tokenizer = tokenizer_of(type(engine), getattr(engine, "options", {}))
        self._inbox = Inbox()
        super().__init__(config, tokenizer)
        self._watch = _Watch()
        self._thread = threading.Thread(
            target=_run,
            args=(engine, self._inbox, self._registry, self._watch),
            name=f"generation {self._name}",
            daemon=True,
        )
        self._thread.start()
        if config.hang_timeout_s:
            threading.Thread(
                target=self._watch.run,
                args=(self._registry, config.hang_timeout_s),
                name="generation watch",
                daemon=True,
            ).start()

    def _send(self, message: Sendable) -> None:
        self._inbox.put(message)

    def _kill(self) -> None:
        self._watch.is_abandoned = True

    def _is_ending(self) -> bool:
        return self._inbox.is_empty  # it has taken the word; a hung one takes nothing

    def _join(self) -> None:
        if not self._may_wait():
            return
        thread = self._thread
        thread.join(ABANDONED_JOIN_S if self._watch.is_abandoned else JOIN_S)
        if thread.is_alive():
            _log.warning(
                "thread %r of %s hangs in its engine and is left behind", thread.name, self._name
            )

    def _may_wait(self) -> bool:
        return threading.current_thread() is not self._thread


class _Sink:
    """Hands on what comes of turns."""

    def __init__(self, registry: Registry, inbox: Inbox) -> None:
        self._registry = registry
        self._inbox = inbox
        self.stats = registry.take_stats
        self.kv_events = registry.take_kv_events
        self.call_ended = registry.call_ended

    def outputs(self, outputs: list[Output]) -> None:
        """See Sink."""
        stopped = self._registry.deliver(outputs)
        if stopped:
            self._inbox.put(Abort(stopped))


def _run(engine: Engine | EngineSpec, inbox: Inbox, registry: Registry, watch: _Watch) -> None:
    """Be the pump's thread."""
    loaded: Any = None
    refusals: tuple[type[ActorserveError], ...] = REFUSALS
    try:
        loaded = engine.make() if isinstance(engine, EngineSpec) else engine
        registry.info = loaded.start(0, None)
        pump = watch.pump = Pump(loaded, _Sink(registry, inbox))
        refusals = ()  # from now on, whatever it raises is a fault
        registry.ready.open()
        _turn(pump, inbox, watch)
    except refusals as error:
        registry.fail_all(error)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        registry.fail_all(
            EngineDeadError(reason, rank=0, pid=os.getpid(), traceback=traceback.format_exc())
        )
    finally:
        if watch.pump is None or not watch.pump.is_closed:
            _close(loaded)
        watch.pump = None
        watch.ended.set()
        inbox.close()
        registry.gone.open()


def _turn(pump: Pump, inbox: Inbox, watch: _Watch) -> None:
    while not pump.is_closed and not watch.is_abandoned:
        for message in inbox.take():
            pump.take(message)
        if not pump.turn(THREAD_POLL_S) and not pump.is_closed:
            inbox.wait(pump.idle_s(), pump.engine_fileno)


def _name_of(engine: Engine | EngineSpec | str) -> str:
    name = spec_of(engine).name if isinstance(engine, (str, EngineSpec)) else type(engine).__name__
    return name.rpartition(":")[2]


def _close(engine: Any) -> None:
    """Close a dead engine; it may object."""
    try:
        if engine is not None:
            engine.close()
    except Exception:
        pass
