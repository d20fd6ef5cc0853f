# SPDX-License-Identifier: Apache-2.0
"""An embedding application keeps what is its own, and may be as careless as applications are."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError, Unavailable
from tests.conftest import wait_until
from tests.faults.harness import Harness, marked_processes, stub_pids, write_model

X = np.ones(4, np.float32)


def new_server(repository: Path, **settings: Any) -> Supervisor:
    """Return a server for the repository that is not started."""
    settings.setdefault("crash_dir", str(repository.parent / "crashes"))
    return Supervisor(repository, Settings(restart_backoff_s=(0.0, 0.0), **settings))


# --- row 62: the host's own processes, handlers, threads ------------------------------------------


@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_row_62_the_hosts_children_and_handlers_stay_its_own(repository, where):
    """Statuses of its children are right while stubs die; its handlers are as they were."""
    caught: list[int] = []
    numbers = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: caught.append(number))
    codes: list[int] = []

    async def main() -> None:
        handlers = [signal.getsignal(number) for number in numbers]
        server = new_server(repository)
        await server.start()
        try:
            harness = Harness(server)
            child = subprocess.Popen(["sh", "-c", "exit 7"])
            for code in range(3):
                pid = harness.kill("bystander")
                other = await asyncio.create_subprocess_exec("sh", "-c", f"exit {code + 20}")
                codes.append(await other.wait())
                await harness.until_restarted("bystander", pid)
            codes.append(child.wait(10))
        finally:
            await server.stop()
        assert [signal.getsignal(number) for number in numbers] == handlers

    try:
        run_in(where, main)
        assert codes == [20, 21, 22, 7]
        assert signal.SIGTERM not in caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in(where: str, main: Any) -> None:
    """Run a coroutine function in a loop of its own, here or in a thread."""
    if where == "main thread":
        asyncio.run(main())
        return
    problems: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(40)
    assert not thread.is_alive()
    if problems:
        raise problems[0]


def test_row_62_a_host_that_ignores_sigchld_loses_nothing(embed):
    """With SIG_IGN the kernel reaps for the host; deaths are noticed all the same."""
    host = embed("""
signal.signal(signal.SIGCHLD, signal.SIG_IGN)

async def main():
    server = new_server()
    await server.start()
    instance = lambda: server.stats().models[0].versions[0].instances[0]
    for _ in range(3):
        pid = instance().pid
        os.kill(pid, 9)
        while instance().pid in (0, pid) or instance().state != "RUNNING":
            await pause(0.01)
        await ask(server)
    await server.stop()
    say(restarts=3)

asyncio.run(main())
""")
    assert host.hear() == {"restarts": 3}
    assert host.wait() == 0


def test_row_62_a_host_that_reaps_everybody_costs_no_stub(embed):
    """A SIGCHLD handler that calls waitpid(-1) takes the zygote's status, and nothing else."""
    host = embed("""
def reap(number, frame):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, reap)

async def main():
    server = new_server()
    await server.start()
    zygote = server._node.spawner.stats().zygote_pid
    os.kill(zygote, 9)
    while server._node.spawner.stats().zygote_pid in (None, zygote):
        await ask(server)
        await pause(0.01)
    instance = lambda: server.stats().models[0].versions[0].instances[0]
    pid = instance().pid
    os.kill(pid, 9)
    while instance().pid in (0, pid) or instance().state != "RUNNING":
        await pause(0.01)
    await ask(server)
    await server.stop()
    say(done=True)

asyncio.run(main())
""")
    assert host.hear() == {"done": True}
    assert host.wait() == 0


# --- row 63: the host forks -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "child",
    [
        "os._exit(0)",
        "sys.exit(0)",
        "del server; gc.collect(); os._exit(0)",
        "gc.collect(); asyncio.get_event_loop_policy().new_event_loop().close(); os._exit(0)",
        "os.execv('/bin/true', ['true'])",
        "server._node.spawner._close(); os._exit(0)",
        "asyncio.events._set_running_loop(None); asyncio.run(server.stop()); os._exit(0)",
        "os.kill(os.getpid(), 9)",
    ],
)
def test_row_63_a_fork_of_the_host_owns_no_stub(embed, child):
    """Whatever a forked child does, and however it ends: the same stubs serve its parent."""
    host = embed(f"""
import warnings
warnings.simplefilter("ignore")

async def main():
    server = new_server()
    await server.start()
    big = np.arange(100_000, dtype=np.float32)
    kept = (await server.infer("bystander", {{"INPUT0": big}}))["OUTPUT0"]
    pids = [each.pid for each in server.stats().models[0].versions[0].instances]
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            try:
                {child}
            finally:
                os._exit(1)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            await ask(server)
        await ask(server)
        for _ in range(5):
            again = (await server.infer("bystander", {{"INPUT0": big + 1}}))["OUTPUT0"]
            assert np.array_equal(again, big + 1)
    assert np.array_equal(kept, big)
    assert pids == [each.pid for each in server.stats().models[0].versions[0].instances]
    assert server.is_ready()
    del kept, again
    for _ in range(500):  # the stub gives its loans back a moment after its answer
        held = server.stats().exchange.held_blocks
        if not held:
            break
        await pause(0.01)
    await server.stop()
    say(held=held)

asyncio.run(main())
""")
    assert host.hear() == {"held": 0}
    assert host.wait() == 0


@pytest.mark.parametrize("child", ["pass", "refused()", "server.stop()", "own()"])
def test_row_63_a_fork_of_a_synchronous_host_does_not_hang(embed, child):
    """It asks, stops, starts a server of its own or just ends: none of it waits for a thread."""
    host = embed(f"""
import warnings
warnings.simplefilter("ignore")
from actorserve import SyncSupervisor
from actorserve.errors import Unavailable

server = SyncSupervisor(REPOSITORY, Settings(crash_dir=CRASHES))

def infer():
    assert np.array_equal(server.infer("bystander", {{"INPUT0": X}})["OUTPUT0"], X)

def refused():
    try:
        infer()
    except Unavailable:
        return
    raise AssertionError("a child asked its parent's server")

def own():
    server.start()
    infer()

server.start()
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    {child}
    sys.exit(7)
say(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
infer()
server.stop()
""")
    assert host.hear() == {"code": 7}
    assert host.wait() == 0


# --- row 64: start, stop and the end, in every order ----------------------------------------------


def test_row_64_stop_is_idempotent(repository):
    """Before start, twice, at the same time: nothing happens but the one stop."""

    async def main() -> None:
        server = new_server(repository)
        await server.stop()
        await server.start()
        await asyncio.gather(*[server.stop() for _ in range(3)])
        await server.stop()
        assert not server.is_live()
        assert not server.is_ready()
        with pytest.raises(ActorserveError):
            await server.infer("bystander", {"INPUT0": X})

    asyncio.run(main())


def test_row_64_a_server_starts_again_after_its_stop(repository):
    """Three lives of one object, each like the first."""

    async def main() -> None:
        server = new_server(repository)
        for _ in range(3):
            await server.start()
            assert server.is_ready()
            assert server.failures == {}
            outputs = await server.infer("bystander", {"INPUT0": X})
            assert np.array_equal(outputs["OUTPUT0"], X)
            await server.stop()
            assert not server.is_ready()
            assert not stub_pids()

    asyncio.run(main())


def test_row_64_a_second_start_is_refused(repository):
    """While it runs; what runs goes on."""

    async def main() -> None:
        server = new_server(repository)
        await server.start()
        with pytest.raises(Unavailable, match="running already"):
            await server.start()
        await server.infer("bystander", {"INPUT0": X})
        await server.stop()

    asyncio.run(main())


def test_row_64_a_start_that_is_cancelled_leaves_nothing(repository, tmp_path):
    """Cancelling `start` in the middle, then `stop`: no stub, no zygote."""
    mark = tmp_path / "mark"
    write_model(
        repository,
        "model",
        f"""
open({str(mark)!r}, "w").close()
threading.Event().wait()
""",
    )

    async def main() -> None:
        server = new_server(repository)
        starting = asyncio.ensure_future(server.start())
        await Harness(server).until(mark.exists)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(starting, 5)
        await asyncio.wait_for(server.stop(), 10)
        assert not marked_processes()

    asyncio.run(main())


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.15, 0.3])
def test_row_64_a_start_that_is_cancelled_early_leaves_nothing(repository, delay_s):
    """Cancelled while the zygote comes up; nobody calls `stop`, as after a failed `async with`."""

    async def main() -> None:
        server = new_server(repository)
        starting = asyncio.ensure_future(server.start())
        await asyncio.wait([starting], timeout=delay_s)
        starting.cancel()
        await asyncio.wait([starting], timeout=10)
        assert starting.done()

        assert not marked_processes()

    asyncio.run(main())


def test_row_64_requests_in_flight_get_an_answer_at_the_stop(repository, tmp_path):
    """Queued and running ones end with an error within the grace time; nobody hangs."""
    body = f"""
class TritonPythonModel:
    def execute(self, requests):
        open({str(tmp_path / "begun")!r}, "w").close()
        threading.Event().wait()
"""
    write_model(repository, "model", body)

    async def main() -> None:
        server = new_server(repository)
        await server.start()
        harness = Harness(server)
        tasks = [harness.submit("model", [1.0] * n) for n in (1, 10, 5000, 100_000)]
        await harness.until((tmp_path / "begun").exists)
        await asyncio.wait_for(server.stop(grace_s=0.2), 10)
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert all(isinstance(each, Unavailable) for each in outcomes), outcomes

    asyncio.run(main())


ENDINGS = {
    "the loop ends without stop": "asyncio.run(main())",
    "an exception": "asyncio.run(main(1 / 0 if False else RuntimeError('host')))",
    "sys.exit in the loop": "asyncio.run(main(SystemExit(0)))",
    "os._exit": "asyncio.run(main(None, os._exit))",
    "collected": "asyncio.run(main())\nglobals().pop('kept')\ngc.collect()\npids()",
    "collected in the loop": "asyncio.run(collect())",
    "another loop afterwards": "asyncio.run(main())\nasyncio.run(pause(0.2))",
    "stop in another loop": "asyncio.run(main())\nasyncio.run(kept[0].stop())",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_row_64_a_host_that_never_stops_its_server_ends(embed, ending):
    """Garbage collection or the interpreter's end, in whatever way: soon, and nobody is left."""
    host = embed(f"""
kept = []

async def main(error=None, end=None):
    server = new_server()
    await server.start()
    await ask(server)
    kept.append(server)
    say(ready=True)
    if end is not None:
        end(0)
    if error is not None:
        raise error

async def collect():
    await main()
    kept.clear()
    gc.collect()

def pids():
    say(ready=False)

{ENDINGS[ending]}
""")
    assert host.hear() == {"ready": True}
    code = host.process.wait(15)
    assert code == (1 if ending == "an exception" else 0), host.errors.read_text()
    wait_until(lambda: not marked_processes())
