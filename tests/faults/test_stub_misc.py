# SPDX-License-Identifier: Apache-2.0
"""What models do to their own process: memory, threads, signals, folders, and forks of it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from actorserve.errors import Code, Unavailable
from tests.faults.harness import Harness, marked_processes, parameter, write_model


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("dies", "raise ValueError('thread is gone')"),
        ("exits", "sys.exit(3)"),
        ("runs for ever", "threading.Event().wait()"),
    ],
)
def test_row_18_a_thread_of_the_model_ends_or_not(serve, repository, caplog, what, code):
    """A daemon thread that raises, exits or stays is nobody's death; its traceback is logged."""
    write_model(
        repository,
        "model",
        f"""
def work():
    {code}

class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=work, daemon=True).start()
    def execute(self, requests):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(0.1)
        return answers(tensors(requests))
""",
    )

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert harness.instance("model").pid == pid
        if what == "dies":
            await harness.until(lambda: "thread is gone" in caplog.text)

    with caplog.at_level("INFO", "actorserve"):
        serve(test)


LIMIT = """
import resource

def limit():
    resident = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (resident + (256 << 20), resource.RLIM_INFINITY))
"""


def test_row_19_memory_that_is_not_there_in_execute_is_an_error(serve, repository):
    """A model that hits its limit fails that request, says so, and serves on."""
    body = f"""{LIMIT}
class TritonPythonModel:
    def initialize(self, args):
        limit()
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] < 0:
            np.ones(1 << 30)
        return answers(arrays)
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await harness.outcome("model", [-1.0])
        assert error.code is Code.INTERNAL
        assert "MemoryError" in error.message
        assert await harness.outcome("model", [2.0]) == [2.0]
        assert harness.instance("model").pid == pid

    serve(test)


def test_row_19_memory_that_is_not_there_in_initialize_is_a_boot_error(serve, repository):
    """The load fails at once with the reason; the others serve."""
    body = f"""{LIMIT}
class TritonPythonModel:
    def initialize(self, args):
        limit()
        self.weights = np.ones(1 << 30)
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        assert "MemoryError" in harness.server.failures["model"]

    serve(test)


def test_row_19_the_output_of_a_stub_without_memory_is_an_error(serve, repository):
    """A response that no segment can be had for fails alone: RLIMIT_AS stops the mapping."""
    body = f"""{LIMIT}
class TritonPythonModel:
    def initialize(self, args):
        limit()
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] < 0:
            arrays = [np.broadcast_to(arrays[0], (200 << 20, 1)).ravel()[: 160 << 18]]
        return answers(arrays)
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await harness.outcome("model", [-1.0])
        assert error.code in (Code.INTERNAL, Code.RESOURCE_EXHAUSTED), error
        assert await harness.outcome("model", [2.0]) == [2.0]
        assert harness.instance("model").pid == pid

    serve(test)


@pytest.mark.parametrize(
    "code",
    [
        "threading.Event().wait()",
        "\n        while True: pass",
        "ctypes.PyDLL(None).sleep(100)",
        "threading.Thread(target=threading.Event().wait).start()",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "raise SystemExit(4)",
    ],
)
def test_row_28_a_stub_that_does_not_finalize_is_killed(serve, repository, code):
    """Unload ends after FINALIZE_TIMEOUT_S, whatever finalize does, and the process is gone."""
    body = f"""
class TritonPythonModel:
    def execute(self, requests):
        return answers(tensors(requests))
    def finalize(self):
        {code}
"""
    extra = parameter("FINALIZE_TIMEOUT_S", 0.3) + parameter("STOPPED_TIMEOUT_S", 0.3)
    write_model(repository, "model", body, extra=extra)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        await asyncio.wait_for(harness.server.unload("model"), 15)
        assert harness.instance("model").state == "STOPPED"
        assert pid not in marked_processes()

    serve(test)


def test_row_28_a_server_ends_although_a_stub_does_not_finalize(start_server, repository):
    """SIGTERM: exit code 0 in time, with a warning, although finalize hangs."""
    body = """
class TritonPythonModel:
    def execute(self, requests):
        return answers(tensors(requests))
    def finalize(self):
        threading.Event().wait()
"""
    write_model(repository, "model", body)
    server = start_server(repository, "--exit-timeout-secs", "1")
    assert server.stop(10) == 0
    assert "did not finalize in time" in server.log()


def test_row_35_a_dead_stubs_pid_is_never_signalled(serve, repository):
    """Whoever gets the pid of a dead stub is left alone by every order that comes late."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        instance = harness.server._models["model"].versions()[0]._instances[0]
        incarnation = instance._current
        child = incarnation.child
        pid = harness.kill("model")
        await harness.until_restarted("model", pid)
        stranger = stranger_with(pid)
        try:
            assert not child.signal(signal.SIGKILL)
            child.kill_group()
            assert child.sample().state == "X"
            incarnation.on_hung_up()
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(0.3)
            assert await harness.outcome("model", [1.0]) == [1.0]
        finally:
            stranger.kill()
            stranger.wait()

    serve(test)


def stranger_with(pid: int) -> subprocess.Popen[bytes]:
    """Start a process, with this pid where the kernel lets us choose it (root, no races)."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as error:
            assert error.errno in (errno.EACCES, errno.EPERM, errno.ENOENT)
        stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
        if stranger.pid == pid or os.geteuid() != 0:
            break
        stranger.kill()
        stranger.wait()
    return stranger


def test_row_40_a_stub_that_changes_its_process_is_still_stoppable(serve, repository, tmp_path):
    """Signal handlers, session, folder, umask, name: it serves, and stops in order."""
    body = f"""
class TritonPythonModel:
    def initialize(self, args):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        for change in (os.setsid, os.setpgrp):
            try:
                change()
            except PermissionError:
                pass
        os.chdir("/")
        os.umask(0o777)
        os.environ.clear()
        sys.path.clear()
        sys.stdout = sys.stderr = None
        open("/proc/self/comm", "w").write("renamed")
    def execute(self, requests):
        return answers(tensors(requests))
    def finalize(self):
        os.umask(0)
        open({str(tmp_path / "finalized")!r}, "w").close()
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        assert await harness.outcome("model", [1.0]) == [1.0]
        assert np.array_equal(await harness.infer("model", [2.0] * 5000), [2.0] * 5000)
        await asyncio.wait_for(harness.server.unload("model"), 10)
        assert (tmp_path / "finalized").exists()
        assert pid not in marked_processes()

    serve(test)


@pytest.mark.parametrize("signal_name", ["SIGHUP", "SIGUSR1", "SIGPIPE", "SIGQUIT"])
def test_row_40_other_signals_to_a_stub_are_deaths_or_nothing(serve, repository, signal_name):
    """Whatever a signal does to a stub, the model serves afterwards."""
    write_model(repository, "model")

    async def test(harness: Harness) -> None:
        harness.kill("model", signal.Signals[signal_name])
        outcome = await harness.outcome("model", [1.0])
        assert outcome == [1.0] or isinstance(outcome, Unavailable)
        await harness.until(lambda: harness.instance("model").state == "RUNNING")
        assert await harness.outcome("model", [1.0]) == [1.0]

    serve(test)


HOSTILE = """
import gc
from actorserve.runtime.peer_end import PeerChannel
from actorserve.wire.codec import encode
from actorserve.wire.messages import Executed, Handle, WireResponse, WireTensor

class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        if arrays[0][0] >= 0:
            return answers(arrays)
        end = next(each for each in gc.get_objects() if isinstance(each, PeerChannel))
        own = end.place(np.ones(5000, np.float32))
        page = end.page
        batch = page.last_begun()
        handle = {handle}
        tensor = WireTensor("OUTPUT0", {datatype}, (5000,), handle)
        response = WireResponse({request}, [WireTensor("OUTPUT0", 11, (5000,), own), tensor])
        end.send_encoded(encode(Executed(batch + {ahead}, [response], 1)))
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    "lie",
    [
        {"handle": "Handle(own.arena, own.block, 99, own.offset, own.nbytes)"},
        {"handle": "Handle(own.arena, own.block, own.segment, 1 << 40, own.nbytes)"},
        {"handle": "Handle(own.arena, own.block, own.segment, -64, own.nbytes)"},
        {"handle": "Handle(own.arena, own.block, own.segment, 8, own.nbytes)"},
        {"handle": "Handle(own.arena, own.block, own.segment, own.offset, 1 << 40)"},
        {"handle": "Handle(own.arena + 1, own.block, own.segment, own.offset, own.nbytes)"},
        {"handle": "Handle(1, 12345, 0, 0, own.nbytes)"},
        {"handle": "Handle(99, 1, 0, 0, own.nbytes)"},
        {"datatype": "200"},
        {"ahead": "5"},
    ],
)
def test_row_80_a_stub_that_lies_is_replaced_and_its_lies_hold_nothing(serve, repository, lie):
    """A handle, data type or batch that cannot be: the request ends, and no block stays held."""
    truth = {"handle": "own", "datatype": "11", "ahead": "0", "request": "1"}
    body = HOSTILE
    for name, value in {**truth, **lie}.items():
        body = body.replace("{" + name + "}", value)
    # The request's id is in the message alone: the first frame of the caller has it.
    body = body.replace(
        "WireResponse(1,",
        "WireResponse(sys._getframe(1).f_locals['batch'].live[0].id,",
    )
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        error = await asyncio.wait_for(harness.outcome("model", [-1.0] * 5000), 10)
        assert isinstance(error, Unavailable), error
        assert "replaced because of an error" in error.message
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [1.0] * 5000) == [1.0] * 5000

    serve(test)
