# SPDX-License-Identifier: Apache-2.0
"""A model's own `is_ready`: over HTTP, embedded, beside inferences, with stubs that die or hang."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from actorserve import Supervisor, SyncSupervisor
from actorserve.clock import monotonic_s
from actorserve.config import Settings
from tests.conftest import wait_until
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, Server, write_model

SAY = """
import asyncio
def say(name):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(name + "\\n")
    with open(os.path.join(os.environ["MODES"], name)) as file:
        mode = file.read()
    while mode == "hang" and os.path.exists(os.path.join(os.environ["MODES"], "HANGS")):
        time.sleep(0.005)
    if mode == "raise":
        raise ValueError("no luck today")
    if mode == "exit":
        raise SystemExit(3)
    if mode == "interrupt":
        raise KeyboardInterrupt
    words = {"no": False, "one": 1, "numpy": np.bool_(True), "none": None}
    return words.get(mode, True)
"""
BODY = IDENTITY.partition("class TritonPythonModel:\n")[2]
ASYNC_BODY = """
    async def execute(self, requests):
        await asyncio.sleep(0)
""" + BODY.partition("requests):\n")[2]
PLAIN_HOOK = """
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.main = threading.current_thread()
    def is_ready(self):
        assert threading.current_thread() is not self.main
        return say(self.name)
"""
COROUTINE_HOOK = """
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.loop = None
    async def is_ready(self):
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        assert self.loop in (None, loop)
        self.loop = loop
        return say(self.name)
"""
KINDS = {
    "plain": PLAIN_HOOK + BODY,
    "coroutine": COROUTINE_HOOK + BODY,
    "plain_async": PLAIN_HOOK + ASYNC_BODY,
    "coroutine_async": COROUTINE_HOOK + ASYNC_BODY,
}
ONE = {"INPUT0": ("FP32", [1], [1.0])}


class Modes:
    """What each instance's hook says from now on, and how often it was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "CALLS"
        self.calls.touch()
        self.hangs = folder / "HANGS"

    def env(self) -> dict[str, str]:
        """Return the environment of the models."""
        return {"MODES": str(self.folder), "CALLS": str(self.calls)}

    def set(self, instance: str, mode: str) -> None:
        """Have an instance's hook do something."""
        part = self.folder / f"{instance}.part"
        part.write_text(mode)
        part.replace(self.folder / instance)

    def count(self, instance: str) -> int:
        """Return how often an instance's hook was called."""
        return self.calls.read_text().split().count(instance)


@pytest.fixture(scope="module")
def modes(tmp_path_factory) -> Modes:
    """Return the modes of the shared server's models."""
    modes = Modes(tmp_path_factory.mktemp("modes"))
    for kind in KINDS:
        modes.set(f"{kind}_0", "yes")
    for number in (0, 1):
        modes.set(f"pair_0_{number}", "yes")
    return modes


@pytest.fixture(scope="module")
def server(start_shared, tmp_path_factory, modes) -> Server:
    """Return a server with a model of each kind, one with two instances and one without a hook."""
    repository = tmp_path_factory.mktemp("ready")
    for kind, body in KINDS.items():
        write_model(repository, kind, SAY + body)
    config = IDENTITY_CONFIG + "instance_group [ { count: 2 } ]"
    write_model(repository, "pair", SAY + PLAIN_HOOK + BODY, config)
    write_model(repository, "hookless")
    return start_shared(repository, env=modes.env())


@pytest.fixture(autouse=True)
def all_is_well(request):
    """Let every hook say yes again after a test, and none hang."""
    yield
    if "modes" in request.fixturenames:
        modes = request.getfixturevalue("modes")
        modes.hangs.unlink(missing_ok=True)
        for path in modes.folder.glob("*_[01]"):
            modes.set(path.name, "yes")


def ready(server: Server, model: str) -> bool:
    """Probe a model."""
    status, answer = server.call("GET", f"/v2/models/{model}/ready")
    assert (status, answer) in ((200, b""), (400, {"error": "Model version not ready"}))
    return status == 200


def count_threads(pid: int) -> int:
    """Return how many threads a process has."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["no", "one", "numpy", "none", "raise", "exit", "interrupt"])
def test_only_true_is_ready(server, modes, kind, mode):
    """Anything else is not; and the next word counts."""
    assert ready(server, kind)
    modes.set(f"{kind}_0", mode)
    assert not ready(server, kind)
    assert not ready(server, f"{kind}/versions/1")
    assert server.infer(kind, ONE) == (200, {"OUTPUT0": [1.0]})
    modes.set(f"{kind}_0", "yes")
    assert ready(server, kind)


def test_every_instance_has_to_be_ready(server, modes):
    """One that is not makes the model so, and the status names it."""
    assert ready(server, "pair")
    modes.set("pair_0_1", "no")
    assert not ready(server, "pair")
    _, document = server.call("GET", "/v2/actorserve/status")
    pair = next(model for model in document["models"] if model["name"] == "pair")
    reasons = {each["name"]: each["reason"] for each in pair["versions"][0]["instances"]}
    assert reasons == {"pair_0_0": "", "pair_0_1": "not ready: its is_ready says no"}
    modes.set("pair_0_0", "no")
    modes.set("pair_0_1", "yes")
    assert not ready(server, "pair")
    modes.set("pair_0_0", "yes")
    assert ready(server, "pair")


def test_probes_of_one_moment_share_a_check(server, modes):
    """Many probers cost one call, and inferences go on meanwhile."""
    modes.hangs.touch()
    modes.set("plain_0", "hang")
    before = modes.count("plain_0")
    with ThreadPoolExecutor(20) as pool:
        probes = [pool.submit(ready, server, "plain") for _ in range(20)]
        wait_until(lambda: modes.count("plain_0") == before + 1)
        assert server.infer("plain", ONE) == (200, {"OUTPUT0": [1.0]})
        modes.hangs.unlink()
        assert [probe.result() for probe in probes] == [True] * 20
    assert modes.count("plain_0") <= before + 2  # a late prober may ask anew


def test_probes_of_the_server_cost_a_check_a_second(server, modes):
    """/v2/health/ready asks the models, and remembers their word for a moment."""
    assert server.call("GET", "/v2/health/ready") == (200, b"")
    before, begun_s = modes.count("plain_0"), monotonic_s()
    for _ in range(40):
        assert server.call("GET", "/v2/health/ready") == (200, b"")
    assert modes.count("plain_0") - before <= 2 + (monotonic_s() - begun_s)
    modes.set("coroutine_0", "no")
    wait_until(lambda: server.call("GET", "/v2/health/ready") == (503, b""))
    assert server.call("GET", "/v2/health/live") == (200, b"")
    modes.set("coroutine_0", "yes")
    wait_until(lambda: server.call("GET", "/v2/health/ready") == (200, b""))


@pytest.mark.parametrize("kind", ["plain", "coroutine_async"])
def test_probes_run_beside_inferences(server, modes, kind):
    """Both are answered while the other goes on without a pause."""
    stop = threading.Event()
    results = []

    def infer() -> None:
        while not stop.is_set():
            results.append(server.infer(kind, ONE))

    thread = threading.Thread(target=infer)
    thread.start()
    try:
        assert all(ready(server, kind) for _ in range(50))
    finally:
        stop.set()
        thread.join()
    assert len(results) > 5
    assert all(result == (200, {"OUTPUT0": [1.0]}) for result in results)


def test_a_check_that_hangs_is_not_ready(server, modes):
    """After five seconds, and then at once; threads do not pile up, and inferences go on."""
    modes.hangs.touch()
    modes.set("plain_0", "hang")
    begun_s = monotonic_s()
    assert not ready(server, "plain")
    assert monotonic_s() - begun_s > 4
    server.wait_log("Timed out waiting for user-defined is_ready() response")
    pid, before = server.stubs()["plain_0"], modes.count("plain_0")
    threads = count_threads(pid)
    begun_s = monotonic_s()
    for _ in range(10):
        assert not ready(server, "plain")
        assert server.infer("plain", ONE) == (200, {"OUTPUT0": [1.0]})
    assert monotonic_s() - begun_s < 4
    assert modes.count("plain_0") == before
    assert count_threads(pid) == threads
    assert server.stubs()["plain_0"] == pid
    modes.hangs.unlink()
    wait_until(lambda: ready(server, "plain"))


def test_a_stopped_stub_is_not_ready_at_once(server, modes):
    """By the state of its process."""
    pid = server.stubs()["plain_0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        begun_s = monotonic_s()
        wait_until(lambda: not ready(server, "plain"))
        assert monotonic_s() - begun_s < 4
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: ready(server, "plain"))


def test_a_model_without_the_hook_is_ready(server, modes):
    """As soon as it is initialized."""
    assert ready(server, "hookless")
    assert not ready(server, "nobody")


# --- embedded ------------------------------------------------------------------------------------


@pytest.fixture
def embedded_modes(tmp_path, monkeypatch) -> Modes:
    """Return the modes of a model "plain" of our own."""
    folder = tmp_path / "modes"
    folder.mkdir()
    modes = Modes(folder)
    for name, value in modes.env().items():
        monkeypatch.setenv(name, value)
    modes.set("plain_0", "yes")
    return modes


def test_a_dead_stub_is_not_ready_at_once(start_server, repository, embedded_modes):
    """Also to those that wait for its word; its heir is asked anew."""
    write_model(repository, "plain", SAY + KINDS["plain"])
    server = start_server(repository)
    embedded_modes.hangs.touch()
    embedded_modes.set("plain_0", "hang")
    with ThreadPoolExecutor(1) as pool:
        begun_s = monotonic_s()
        probe = pool.submit(ready, server, "plain")
        wait_until(lambda: embedded_modes.count("plain_0"))
        os.kill(server.stubs()["plain_0"], signal.SIGKILL)
        assert probe.result() is False
        assert monotonic_s() - begun_s < 4
    embedded_modes.hangs.unlink()
    wait_until(lambda: ready(server, "plain"))
    assert embedded_modes.count("plain_0") >= 2


SLEEPS = """
class TritonPythonModel:
    async def is_ready(self):
        say("plain_0")
        await asyncio.sleep(1e6)
"""


@pytest.mark.parametrize("body", [KINDS["plain"], SLEEPS + BODY, SLEEPS + ASYNC_BODY])
def test_unload_ends_a_check(repository, tmp_path, embedded_modes, body):
    """Who waits hears no, and neither unload nor stop waits for the hook."""
    write_model(repository, "plain", SAY + body)

    async def main() -> None:
        async with Supervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
            assert not await server.check_model_ready("plain", "2")
            if SLEEPS not in body:
                embedded_modes.hangs.touch()
                embedded_modes.set("plain_0", "hang")
            begun_s = monotonic_s()
            probe = asyncio.ensure_future(server.check_model_ready("plain", "1"))
            while not embedded_modes.count("plain_0"):
                await asyncio.sleep(0)
            await server.unload("plain")
            assert await probe is False
            assert monotonic_s() - begun_s < 4
            assert not await server.check_model_ready("plain")
        assert not await server.check_ready()

    asyncio.run(main())


def test_a_coroutine_that_takes_too_long_is_cancelled(repository, tmp_path, embedded_modes):
    """So that the next probe can ask anew."""
    write_model(repository, "plain", SAY + SLEEPS + ASYNC_BODY)
    with SyncSupervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
        assert not server.check_model_ready("plain")

        def is_asked_anew() -> bool:
            with ThreadPoolExecutor(1) as pool:
                probe = pool.submit(server.check_model_ready, "plain")
                wait_until(lambda: probe.done() or embedded_modes.count("plain_0") == 2)
                if embedded_modes.count("plain_0") == 2:
                    server.unload("plain")
                    return True
                return False

        wait_until(is_asked_anew)


def test_a_prober_that_goes_away_takes_no_check_along(repository, tmp_path, embedded_modes):
    """The others get the word that they wait for."""
    write_model(repository, "plain", SAY + KINDS["plain"])

    async def main() -> None:
        async with Supervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
            embedded_modes.hangs.touch()
            embedded_modes.set("plain_0", "hang")
            first, second = (
                asyncio.ensure_future(server.check_model_ready("plain")) for _ in range(2)
            )
            while not embedded_modes.count("plain_0"):
                await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            embedded_modes.hangs.unlink()
            assert await second
            assert first.cancelled()

    asyncio.run(main())


def test_synchronous_apps_ask_too(repository, tmp_path, embedded_modes):
    """`check_ready` asks the models, `is_ready` does not."""
    write_model(repository, "plain", SAY + KINDS["plain"])
    with SyncSupervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
        assert server.check_ready() and server.check_model_ready("plain")
        embedded_modes.set("plain_0", "no")
        assert not server.check_model_ready("plain")
        assert not server.check_ready()
        assert server.is_ready() and server.is_model_ready("plain")


def test_without_strict_readiness_no_model_is_asked(repository, tmp_path, embedded_modes):
    """The server is ready once it has loaded."""
    write_model(repository, "plain", SAY + KINDS["plain"])
    embedded_modes.set("plain_0", "no")
    settings = Settings(crash_dir=str(tmp_path), strict_readiness=False)
    with SyncSupervisor(repository, settings) as server:
        assert server.check_ready()
        assert not embedded_modes.count("plain_0")
        assert not server.check_model_ready("plain")


FORKS = """
class TritonPythonModel:
    def is_ready(self):
        pid = os.fork()
        if pid == 0:
            return True
        return os.waitpid(pid, 0)[1] == 0
"""
CALLS = """
class TritonPythonModel:
    def is_ready(self):
        x = pb_utils.Tensor("INPUT0", np.ones(1, np.float32))
        request = pb_utils.InferenceRequest(
            model_name="other", inputs=[x], requested_output_names=["OUTPUT0"])
        pb_utils.Logger.log_info("from is_ready")
        return not request.exec().has_error()
"""


@pytest.mark.parametrize("hook", [FORKS, CALLS])
def test_the_hook_may_do_what_models_do(repository, tmp_path, hook):
    """Fork a child that comes back from it, call another model."""
    write_model(repository, "model", hook + BODY)
    write_model(repository, "other")
    with SyncSupervisor(repository, Settings(crash_dir=str(tmp_path))) as server:
        for _ in range(3):
            assert server.check_model_ready("model")
        x = np.ones(1, np.float32)
        assert server.infer("model", {"INPUT0": x})["OUTPUT0"].tolist() == [1.0]
