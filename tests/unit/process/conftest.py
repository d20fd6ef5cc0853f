# SPDX-License-Identifier: Apache-2.0
"""What the tests of this room share: a Spawner in a loop of either kind, and a leak check."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import resource
import select
import signal
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from actorserve.process.exit import Exit
from actorserve.process.spawn import Child, Spawner, SpawnSpec
from actorserve.wire.messages import MapSegment

T = TypeVar("T")
HERE = str(Path(__file__).parent)
PATIENCE_S = 20.0


class Watched:
    """A spawned child with everything that came of it."""

    def __init__(self) -> None:
        self.child: Child = None  # type: ignore[assignment]
        self.lines: list[tuple[str, str]] = []
        self.exits: list[Exit] = []
        self.exited_at_s = 0.0
        self.waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    def on_output(self, stream: str, line: str) -> None:
        self.lines.append((stream, line))
        self._wake()

    def on_exit(self, exit_: Exit) -> None:
        self.exited_at_s = time.perf_counter()
        self.exits.append(exit_)
        self._wake()

    def _wake(self) -> None:
        for done, future in self.waiters:
            if done() and not future.done():
                future.set_result(None)

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until something that output or the exit brings about holds."""
        if not done():
            future = asyncio.get_running_loop().create_future()
            self.waiters.append((done, future))
            await asyncio.wait_for(future, PATIENCE_S)

    async def end(self) -> Exit:
        """Wait for the exit."""
        await self.until(lambda: bool(self.exits))
        return self.exits[0]

    async def line(self, start: str) -> str:
        """Wait for a line that begins with `start` and return the rest of it."""
        await self.until(lambda: any(text.startswith(start) for _, text in self.lines))
        return next(text for _, text in self.lines if text.startswith(start))[len(start) :]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.lines)

    async def ask(self, number: int = 7) -> int:
        """Ask an `echo` entry and return what it answers."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        boot = self.child.boot
        boot.send(MapSegment(number, 0, 0))

        def on_readable() -> None:
            try:
                received = boot.recv_nowait()
            except Exception as error:
                loop.remove_reader(boot.fileno())
                answer.set_exception(error)
                return
            if received is not None:
                loop.remove_reader(boot.fileno())
                answer.set_result(received[0].arena)  # type: ignore[union-attr]

        loop.add_reader(boot.fileno(), on_readable)
        return int(await asyncio.wait_for(answer, PATIENCE_S))


class Bench:
    """A started Spawner with short words for what the tests do."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        self.log: list[tuple[int, str]] = []
        self.born: list[Watched] = []
        self.spawner = Spawner(
            preload=preload, log=lambda level, text: self.log.append((level, text))
        )

    async def __aenter__(self) -> Bench:
        await self.spawner.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.spawner.stop()

    async def spawn(self, entry: str = "echo", name: str = "probe_0_0", **rest: Any) -> Watched:
        watched = Watched()
        rest.setdefault("sys_path", [HERE])
        spec = SpawnSpec(f"child_entries:{entry}", name, **rest)
        spawn = self.spawner.spawn(spec, watched.on_exit, watched.on_output)
        watched.child = await asyncio.wait_for(spawn, PATIENCE_S)
        self.born.append(watched)
        return watched

    async def settle(self) -> None:
        """Kill what lives and wait for the exits."""
        born, self.born = self.born, []
        for watched in born:
            watched.child.signal(signal.SIGKILL)
            await watched.end()

    @property
    def zygote(self) -> int:
        pid = self.spawner.stats().zygote_pid
        assert pid is not None
        return pid

    async def next_zygote(self, old: int) -> int:
        """Wait until another zygote than `old` is up."""

        def other() -> bool:
            return self.spawner.stats().zygote_pid not in (None, old)

        await until(other)
        return self.zygote


async def until(done: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Wait in a loop for what nobody announces."""
    deadline_s = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_s, "did not happen"
        await asyncio.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_gone(*pids: int, timeout_s: float = 5.0) -> float:
    """Wait until processes are gone; the seconds it took."""
    start_s = time.monotonic()
    while not all(is_gone(pid) for pid in pids):
        left = [pid for pid in pids if not is_gone(pid)]
        assert time.monotonic() < start_s + timeout_s, f"still alive: {left}"
        select.select([], [], [], 0.002)
    return time.monotonic() - start_s


def forked(body: Callable[[], object]) -> int:
    """Run `body` in a fork of this process and nothing after it; the fork's pid."""
    pid = os.fork()
    if pid == 0:
        code = 99
        faulthandler.disable()  # pytest's; a fork that dies on purpose is no news
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def sleep_for_ever() -> None:
    """Wait for the signal that kills."""
    while True:
        signal.pause()


def fds_of(pid: int) -> list[int]:
    """The numbers of what a process has open; for this process also that of the listing."""
    return [int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()]


def has_more_children(pid: int, count: int) -> bool:
    """Whether more than `count` children of a process live."""
    children = psutil.Process(pid).children()
    return sum(child.status() != psutil.STATUS_ZOMBIE for child in children) > count


@contextlib.contextmanager
def only_free_descriptors(room: int) -> Iterator[None]:
    """Leave this process exactly so many unused descriptors."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds_of(os.getpid())) + 20, limits[1]))
    taken: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.dup(0))
    for _ in range(room):
        os.close(taken.pop())
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


MARK = f"ACTORSERVE_TEST_MARK={os.getpid()}".encode()


def started_processes() -> set[int]:
    """Every living process that was started from this test run, at any remove, or forked by it."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208 (twice for each test: quick)
        with contextlib.suppress(OSError):
            if name.isdigit() and MARK in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.add(int(name))
    for path in Path("/proc/self/task").glob("*/children"):
        found |= {int(pid) for pid in path.read_text().split()}
    return found


@pytest.fixture(scope="module", autouse=True)
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepare what `no_leaks` counts on: a mark, a temporary folder of our own, warm libraries."""
    name, _, value = MARK.decode().partition("=")
    os.environ[name] = value
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temp"))
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()  # libuv keeps a pipe for the life of a process
    gc.collect()
    gc.freeze()  # makes the collection after each test quick
    yield
    gc.unfreeze()
    tempfile.tempdir = before
    del os.environ[name]


@pytest.fixture
def kit() -> types.SimpleNamespace:
    """The classes and functions above: tests cannot import this file."""
    return types.SimpleNamespace(
        Bench=Bench,
        Watched=Watched,
        HERE=HERE,
        fds_of=fds_of,
        forked=forked,
        has_more_children=has_more_children,
        is_gone=is_gone,
        only_free_descriptors=only_free_descriptors,
        open_fds=open_fds,
        sleep_for_ever=sleep_for_ever,
        started_processes=started_processes,
        until=until,
        wait_gone=wait_gone,
    )


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[T]]], T]:
    """Run a coroutine function to its end in a fresh loop of each kind."""
    return _runner(request.param)


@pytest.fixture
def run_plain() -> Callable[[Callable[[], Awaitable[T]]], T]:
    """Run a coroutine function in a fresh asyncio loop."""
    return _runner("asyncio")


def _runner(kind: str) -> Callable[[Callable[[], Awaitable[T]]], T]:
    if kind == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        new_loop = uvloop.new_event_loop
    else:
        new_loop = asyncio.new_event_loop

    def run_in_loop(main: Callable[[], Awaitable[T]]) -> T:
        loop = new_loop()
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.wait_for(main(), 60))  # type: ignore[no-any-return]
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            asyncio.set_event_loop(None)

    return run_in_loop


@pytest.fixture(scope="module")
def warm() -> Iterator[Callable[[Callable[[Bench], Awaitable[T]]], T]]:
    """Run coroutine functions with one Bench and one loop for a whole file: starts are dear."""
    loop = asyncio.new_event_loop()
    bench = Bench()
    loop.run_until_complete(bench.__aenter__())

    def run_warm(main: Callable[[Bench], Awaitable[T]]) -> T:
        try:
            return loop.run_until_complete(asyncio.wait_for(main(bench), 60))
        finally:
            loop.run_until_complete(bench.settle())

    yield run_warm
    loop.run_until_complete(bench.__aexit__())
    loop.close()


def open_fds() -> set[str]:
    """What this process has open, as "number -> target"."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{path.name} -> {path.readlink()}")
    return found


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No test here leaves a descriptor, a thread, a process, a handler or a folder behind."""
    handlers = {signo: signal.getsignal(signo) for signo in (signal.SIGINT, signal.SIGTERM)}
    folders = set(Path(tempfile.gettempdir()).iterdir())
    threads = set(threading.enumerate())
    processes = started_processes()
    before = open_fds()
    yield
    gc.collect()
    assert open_fds() - before == set()
    assert set(threading.enumerate()) - threads == set()
    left = started_processes() - processes
    try:
        wait_gone(*left)
    finally:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        zombie = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        assert zombie is None, f"process {zombie.si_pid} was not reaped"
    assert set(Path(tempfile.gettempdir()).iterdir()) - folders == set()
    assert {signo: signal.getsignal(signo) for signo in handlers} == handlers
