# SPDX-License-Identifier: Apache-2.0
"""Entry functions that the tests start in children. Imported there by path, never collected."""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

from actorserve.process.boot import BootSocket, PeerGone


def echo(boot: BootSocket) -> None:
    """Answer every message with itself until the supervisor is gone."""
    print("ready", flush=True)
    try:
        while True:
            message, fds = boot.recv(None)
            boot.send(message, fds)
            for fd in fds:
                os.close(fd)
    except PeerGone:
        pass


def describe(boot: BootSocket) -> None:
    """Print what this process is, as one line of JSON."""
    import numpy

    facts = {
        "argv": sys.argv,
        "boot_name": boot.name,
        "comm": Path("/proc/self/comm").read_text().strip(),
        "cwd": str(Path.cwd()),
        "env": {
            key: os.environ.get(key) for key in ("FLAVOUR", "BIG", "PYTHONPATH", "VIRTUAL_ENV")
        },
        "executable": sys.executable,
        "fds": sorted(int(path.name) for path in Path("/proc/self/fd").iterdir()),
        "fd_targets": [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in (0, 1, 2)],
        "leads_group": os.getpgrp() == os.getpid() == os.getsid(0),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "numpy_random": float(numpy.random.random()),
        "path": sys.path,
        "path0": sys.path[0],
        "pidfd": boot.supervisor_pidfd,
        "prefix": sys.prefix,
        "random": random.random(),
        "sigint_ignored": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
        "main": getattr(sys.modules["__main__"], "__file__", None),
        "version": list(sys.version_info[:2]),
    }
    print("facts " + json.dumps(facts))


def fail(_boot: BootSocket) -> None:
    """End with an exception."""
    raise RuntimeError("the entry failed on purpose")


def leave(boot: BootSocket) -> None:
    """End with the exit code in FLAVOUR."""
    sys.exit(int(os.environ["FLAVOUR"]))


def leave_with_words(_boot: BootSocket) -> None:
    """End as `sys.exit("...")` does."""
    sys.exit("words for the end")


def leave_at_once(_boot: BootSocket) -> None:
    """End as a model that calls os._exit does."""
    os._exit(0)


def crash(_boot: BootSocket) -> None:
    """End with a segmentation fault in Python's own code path."""
    ctypes.string_at(0)


def hold_gil(_boot: BootSocket) -> None:
    """Sit in C code that holds the interpreter lock for a minute."""
    print("holding", flush=True)
    ctypes.PyDLL(None).usleep(60_000_000)


def tidy_end(_boot: BootSocket) -> None:
    """Register everything that runs at the end of a Python program, and return."""
    atexit.register(print, "atexit")
    weakref.finalize(tidy_end, print, "finalizer")
    logging.basicConfig(stream=sys.stdout)
    go = threading.Event()
    threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
    sys.stdout.write("unfinished\n")
    go.set()


def talk(_boot: BootSocket) -> None:
    """Write odd things to both streams."""
    print("first")
    print("second \udcff", file=sys.stderr)
    os.write(1, b"raw \xff\r\n")
    os.write(1, b"x" * 40_000 + b"\n")
    os.write(2, b"last words")


def flood(_boot: BootSocket) -> None:
    """Write much, then end."""
    for number in range(20_000):
        print("line", number)


def leave_grandchild(boot: BootSocket) -> None:
    """Start a program that keeps stdout, one in this group and one that leaves it."""
    kept = subprocess.Popen(["sleep", "60"])
    escaped = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(f"grandchildren {kept.pid} {escaped.pid}", flush=True)
    echo(boot)


def fork_and_report(boot: BootSocket) -> None:
    """Fork as a model would; the fork says how it finds signals and the boot socket."""
    pid = os.fork()
    if pid == 0:
        try:
            boot.recv(1)
        except PeerGone:
            severed = True
        defaults = (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        print(f"fork {severed} {defaults}", flush=True)
        signal.pause()
    print(f"forked {pid}", flush=True)
    echo(boot)


def fork_and_terminate(boot: BootSocket) -> None:
    """Fork, and terminate the fork at once, many times; then say how many did not die of it."""
    survivors = 0
    for _ in range(200):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(1)
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        if not select.select([pidfd], [], [], 5)[0]:
            survivors += 1
            os.kill(pid, signal.SIGKILL)
        os.close(pidfd)
        os.waitpid(pid, 0)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print(f"survivors {survivors}, masked {len(masked)}", flush=True)
    echo(boot)


def stubborn(boot: BootSocket) -> None:
    """Do what a stub must not do to stay stoppable."""
    for signo in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGHUP):
        signal.signal(signo, signal.SIG_IGN)
    try:
        os.setsid()
    except PermissionError:
        print("no session of its own")
    os.chdir("/")
    os.umask(0)
    echo(boot)


def hungry(_boot: BootSocket) -> None:
    """Take more memory than there is."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    bytearray(2 << 30)
