# SPDX-License-Identifier: Apache-2.0
"""What a fresh child does before, around and after its entry function.

    forked by the zygote ─► run_forked ─┬─────────────────────────► live ─► entry(boot) ─► end
                                        └─ exec foreign.py ─► main ─┘

Before: its own session and group, the guard armed, stdout and stderr on their pipes, SIGINT and
SIGTERM caught by an empty handler, environment, folder and import path as ordered, random
generators seeded anew, the instance's name in ps and top. Then it waits at its boot socket for
the supervisor's first packet, `GO`, which says that the supervisor knows this process by its
pidfd. A child that nobody knows, because its zygote died before it could tell, or because its
spawn was cancelled, finds the end of file there and ends.

After: as at the end of any Python program, non-daemon threads are joined and the exit functions
run, those that the child's own code registered: what the zygote registered, for its own end, was
dropped at the fork. Then `os._exit`, so that nothing of the zygote is torn down twice. The exit
code is 0 when the entry returned, SystemExit's, or 1 with a traceback on stderr.

A child that cannot start for a reason that no retry cures says so with `BootFailed` over its
boot socket, before it exits with code 1.

At import, and until it has looked for them, this module uses the standard library alone: a
foreign interpreter may lack msgspec and numpy.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import random
import re
import resource
import select
import signal
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from actorserve import fault
from actorserve.process import guard

if TYPE_CHECKING:
    from actorserve.process.boot import BootSocket

GO = b"go"
"""The first packet on every boot socket, from the supervisor; no message."""

_COMM_BYTES = 15
_REASON_BYTES = 16 << 10
_NEEDED = ("numpy", "msgspec")
_FOREIGN = str(Path(__file__).resolve().with_name("foreign.py"))


class Birth(NamedTuple):
    """Everything a forked child needs; the descriptors are its own. -1 is no pidfd."""

    name: str
    entry: str
    python: bytes | None
    environment: dict[bytes, bytes]
    cwd: bytes
    sys_path: list[bytes]
    boot_fd: int
    stdout_fd: int
    stderr_fd: int
    guard_fd: int
    supervisor_pidfd: int


class _Refused(Exception):
    """A reason why this child cannot start that another try would not change."""


# --- the two ways in -----------------------------------------------------------------------------


def run_forked(birth: Birth) -> NoReturn:
    """Be the child that the zygote forked just now; ends the process."""
    try:
        os.setsid()
        guards = guard.arm(birth.guard_fd, whole_group=True)
        os.close(birth.guard_fd)
        _take_output(birth.stdout_fd, birth.stderr_fd)
        if birth.python is not None:
            _exec_foreign(birth, guards)
        _forget_zygote()
        os.environb.clear()
        os.environb.update(birth.environment)
        time.tzset()
        _reseed()
        sys.path[:0] = [os.fsdecode(path) for path in birth.sys_path]
        importlib.invalidate_caches()
    except BaseException as error:
        _refuse(birth.boot_fd, f"{birth.name} could not be set up: {error}")
    live(birth.boot_fd, birth.supervisor_pidfd, birth.name, birth.entry, os.fsdecode(birth.cwd))


def main() -> NoReturn:
    """Be the child that another interpreter runs (from foreign.py); ends the process."""
    catch_stop_signals()
    boot_fd, supervisor_pidfd, *guards = (int(number) for number in sys.argv[1:5])
    name, entry, cwd, *sys_path = sys.argv[5:]
    for fd in (boot_fd, supervisor_pidfd, *guards):
        if fd >= 0:
            os.set_inheritable(fd, False)
    missing = [module for module in _NEEDED if not _has(module)]
    if missing:
        _refuse(
            boot_fd,
            f"the interpreter {sys.executable} (Python {sys.version.split()[0]}) cannot import "
            f"{' and '.join(missing)}: install {' and '.join(_NEEDED)} in its environment",
        )
    sys.path[:0] = sys_path
    live(boot_fd, supervisor_pidfd, name, entry, cwd)


def _exec_foreign(birth: Birth, guards: list[int]) -> NoReturn:
    """Become the other interpreter; the armed guards stay armed across the exec."""
    kept = [birth.boot_fd, birth.supervisor_pidfd, *guards]
    for fd in kept:
        if fd >= 0:
            os.set_inheritable(fd, True)
    # A handler does not outlive the exec; blocked signals stay blocked until main() has its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    os.chdir("/")
    assert birth.python is not None
    arguments: list[str | bytes] = [birth.python, _FOREIGN, *map(str, kept)]
    arguments += [birth.name, birth.entry, birth.cwd, *birth.sys_path]
    os.execve(birth.python, arguments, birth.environment)


# --- the common way ------------------------------------------------------------------------------


def live(boot_fd: int, supervisor_pidfd: int, name: str, entry: str, cwd: str) -> NoReturn:
    """Call the entry function with the boot socket and end with what came of it."""
    try:
        show_name(name)
        sys.argv = [name]
        _open_streams()
        faulthandler.enable(2, all_threads=True)
        switch_off_core_dumps()
        os.register_at_fork(
            before=_hold_stop_signals,
            after_in_parent=_let_stop_signals,
            after_in_child=_restore_stop_signals,
        )
        fault.arm(os.environ.get(fault.VARIABLE))
        fault.fault_point("spawn.forked")
        _enter_folder(cwd)
        _wait_for_go(boot_fd, supervisor_pidfd)
        function = _load(entry)
        boot = _boot_socket(boot_fd, supervisor_pidfd, name)
    except BaseException as error:
        text = "" if isinstance(error, _Refused) else traceback.format_exc()
        _refuse(boot_fd, f"{name} cannot start: {error}", text)
    fault.fault_point("spawn.entering")
    end(_exit_code(function, boot))


def _enter_folder(cwd: str) -> None:
    try:
        os.chdir(cwd)
    except OSError as error:
        raise _Refused(f"working directory {cwd!r}: {error.strerror}") from None


def _wait_for_go(boot_fd: int, supervisor_pidfd: int) -> None:
    """Wait until the supervisor knows this process, or end with it."""
    poll = select.poll()
    for fd in (boot_fd, supervisor_pidfd):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    poll.poll()
    try:
        first = os.read(boot_fd, len(GO))
    except OSError:  # nothing there: it was the supervisor's pidfd
        first = b""
    if first != GO:
        os._exit(0)


def _load(entry: str) -> Callable[[BootSocket], object]:
    module_name, _, function_name = entry.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there and misses another
        raise _Refused(f"entry {entry!r}: there is no module {error.name!r}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise _Refused(f"entry {entry!r}: module {module_name!r} has no function of that name")
    return function  # type: ignore[no-any-return]


def _boot_socket(boot_fd: int, supervisor_pidfd: int, name: str) -> BootSocket:
    import socket

    from actorserve.process.boot import BootSocket

    pidfd = supervisor_pidfd if supervisor_pidfd >= 0 else None
    return BootSocket(socket.socket(fileno=boot_fd), name=name, supervisor_pidfd=pidfd)


def _exit_code(function: Callable[[BootSocket], object], boot: BootSocket) -> int:
    try:
        function(boot)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(code: int) -> NoReturn:
    """End this process as a Python program ends, but for the tear-down of the interpreter."""
    for step in (_join_threads, _run_exit_functions, _flush):
        try:
            step()
        except BaseException:
            _print_quietly(traceback.format_exc())
    os._exit(code)


def _join_threads() -> None:
    getattr(threading, "_shutdown", lambda: None)()


def _run_exit_functions() -> None:
    getattr(atexit, "_run_exitfuncs", lambda: None)()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _refuse(boot_fd: int, reason: str, text: str = "") -> NoReturn:
    """Report over the boot socket and stderr why this child cannot start, and end it."""
    try:
        os.write(boot_fd, refusal(reason, text))
    except OSError:
        pass  # the supervisor is gone, or does not listen
    _print_quietly("\n".join(filter(None, (text.rstrip(), reason))) + "\n")
    os._exit(1)


def refusal(reason: str, text: str = "") -> bytes:
    """Encode BootFailed(reason, text) without msgspec, which may be what is missing."""
    packed = b"\x93\x21"  # an array of three, the first the tag 33
    for part in (reason, text):
        data = part.encode("utf-8", "backslashreplace")[-_REASON_BYTES:]
        data = data.decode("utf-8", "ignore").encode()  # the cut may have split a character
        packed += b"\xdb" + struct.pack(">I", len(data)) + data
    return packed


def _print_quietly(text: str) -> None:
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass


# --- signals -------------------------------------------------------------------------------------

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def catch_stop_signals() -> None:
    """Survive what systemd and Ctrl-C send to everybody: only the supervisor decides to stop.

    An empty handler and never SIG_IGN, which a model's own programs would inherit; then
    `Process.terminate()` does nothing and `Pool.terminate()` never returns.
    """
    for signo in _STOP_SIGNALS:
        signal.signal(signo, _do_nothing)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _do_nothing(_signo: int, _frame: FrameType | None) -> None:
    pass


_mask = threading.local()  # `before` is that of a thread which forks


def _hold_stop_signals() -> None:
    """Keep back what reaches a forked child before it has its own handlers, as the empty one would
    swallow it: `Pool.terminate()` may come so early, and waits for the child's end without limit.
    """
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _let_stop_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _restore_stop_signals() -> None:
    """Give a forked child of this child the usual signals, where nobody chose others."""
    try:
        _restore_handlers()
    finally:
        _let_stop_signals()


def _restore_handlers() -> None:
    if signal.getsignal(signal.SIGINT) is _do_nothing:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# --- parts ---------------------------------------------------------------------------------------


def _take_output(stdout_fd: int, stderr_fd: int) -> None:
    for fd, target in ((stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(fd, target)
        os.close(fd)


def _open_streams() -> None:
    """Line-buffered text streams that can write every string."""
    sys.stdout = sys.__stdout__ = _stream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2)  # type: ignore[misc]


def _stream(fd: int) -> Any:
    return open(fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def switch_off_core_dumps() -> None:
    """Never dump core: it takes long and lands anywhere."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _reseed() -> None:
    """Part this child's random numbers from its siblings'."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _forget_zygote() -> None:
    """Drop the exit functions of the zygote; what Python itself must do at the end stays."""
    getattr(atexit, "_clear", lambda: None)()
    finalize: Any = weakref.finalize
    for finalizer in list(getattr(finalize, "_registry", ())):
        finalizer.atexit = False
    finalize._registered_with_atexit = False  # the child's first finalizer registers the hook
    for module, function in (("logging", "shutdown"), ("multiprocessing.util", "_exit_function")):
        if module in sys.modules:
            atexit.register(getattr(sys.modules[module], function))


def _has(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def show_name(name: str) -> None:
    """Show the instance's name in ps and top, where /proc allows it."""
    try:
        with open("/proc/self/comm", "wb") as file:
            file.write(short_name(name))
    except OSError:
        pass


def short_name(name: str) -> bytes:
    """Cut a name to the 15 bytes that the kernel shows; an instance's "_0_0" stays whole."""
    printable = "".join(char if char.isprintable() else "?" for char in name)
    found = re.search(r"_\d+_\d+$", printable)
    suffix = found.group().encode() if found else b""
    model = printable.encode("utf-8", "replace")[: -len(suffix) or None]
    room = max(0, _COMM_BYTES - len(suffix))
    return (model[:room].decode("utf-8", "ignore").encode() + suffix)[:_COMM_BYTES]
