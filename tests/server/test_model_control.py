# SPDX-License-Identifier: Apache-2.0
"""Models that load and unload models: from execute, threads, coroutines and initialize."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.server.control_models import (
    ASYNC_CONTROLLER,
    CONTROLLER,
    CONTROLLER_CONFIG,
    ORDERS,
    THREADED_CONTROLLER,
    order,
    pids,
)
from tests.server.harness import IDENTITY, MODEL_HEAD, Server, write_model

X = {"INPUT0": ("FP32", [2], [1.5, 2.5])}
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
JSON_CONFIG = json.dumps(
    {
        "backend": "python",
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
)


def load(server: Server, model: str, **parameters: object) -> tuple[int, object]:
    """Load over HTTP."""
    return server.call("POST", f"/v2/repository/models/{model}/load", {"parameters": parameters})


@pytest.fixture
def server(start_server, repository):
    """Return a server with a controller of each kind, and a model to control."""
    for name, body in (
        ("controller", CONTROLLER),
        ("threaded", THREADED_CONTROLLER),
        ("coroutine", ASYNC_CONTROLLER),
    ):
        write_model(repository, name, body, CONTROLLER_CONFIG)
    write_model(repository, "target")
    return start_server(repository, *EXPLICIT)


@pytest.mark.parametrize("controller", ["controller", "threaded", "coroutine"])
def test_a_model_loads_unloads_and_looks(server, controller):
    """Whichever thread asks; only it waits."""
    assert order(server, controller, "is_model_ready", model_name="target") == {"result": True}
    assert order(server, controller, "unload_model", model_name="target") == {"result": None}
    assert order(server, controller, "is_model_ready", model_name="target") == {"result": False}
    assert server.infer("target", X)[0] in (404, 503)
    assert order(server, controller, "load_model", model_name="target") == {"result": None}
    ready = order(server, controller, "is_model_ready", model_name="target", model_version="1")
    assert ready == {"result": True}
    assert server.infer("target", X) == (200, {"OUTPUT0": [1.5, 2.5]})
    assert server.stop() == 0


def test_a_model_is_told_what_is_wrong_in_the_documented_words(server, repository):
    """Each function has its own prefix."""

    def say(do: str, **arguments: object) -> str:
        return str(order(server, "controller", do, **arguments)["error"])

    assert say("load_model", model_name="nobody") == (
        "Failed to load model: failed to load 'nobody', failed to poll from model repository"
    )
    assert "Failed to check model readiness: Request for unknown model: 'nobody'" in say(
        "is_model_ready", model_name="nobody"
    )
    for version in ("x", "0", "-1", "1.5"):
        assert say("is_model_ready", model_name="target", model_version=version) == (
            "Failed to check model readiness: failed to get model version from specified version "
            f"string '{version}' (details: not a number), version should be an integral value > 0"
        )
    missing = order(server, "controller", "is_model_ready", model_name="target", model_version="9")
    assert missing == {"result": False}
    write_model(repository, "broken", "raise ValueError('so it is')")
    assert "so it is" in say("load_model", model_name="broken")
    write_model(repository, "new")
    not_loaded = order(server, "controller", "is_model_ready", model_name="new")
    assert not_loaded == {"result": False}
    assert say("load_model", model_name="../target").startswith("Failed to load model: ")
    assert "Invalid config override: " in say("load_model", model_name="target", config="{")
    files = {"file:1/model.py": ""}
    assert "config" in say("load_model", model_name="target", files=files)
    bad = {"file:../x": ""}
    assert "relative path" in say("load_model", model_name="target", config="{}", files=bad)
    assert say("load_model", model_name="target", config="{}", files={"x": ""}) == (
        "Failed to load model: Unrecognized load parameter 'x' with type 'BYTES'"
    )
    for arguments in ({"model_name": 1}, {"model_name": "x", "config": None}):
        assert "type_error" in order(server, "controller", "load_model", **arguments)
    assert order(server, "controller", "unload_model", model_name="nobody") == {"result": None}
    assert server.infer("target", X)[0] == 200


def test_a_model_brings_a_model_with_it(server):
    """Files of any size, which go through shared memory; nothing of them stays."""
    body = MODEL_HEAD + "PADDING = os.path.getsize(os.path.dirname(__file__) + '/../padding')\n"
    body += IDENTITY.replace("as_numpy()", "as_numpy() + PADDING")
    arguments = {"config": JSON_CONFIG, "files": {"file:1/model.py": body}, "padding": 3_000_000}
    said = order(server, "controller", "load_model", model_name="brought", **arguments)
    assert said == {"result": None}
    assert server.infer("brought", X) == (200, {"OUTPUT0": [3000001.5, 3000002.5]})
    assert order(server, "threaded", "unload_model", model_name="brought") == {"result": None}
    _, index = server.call("POST", "/v2/repository/index")
    lines = {each["name"]: each for each in index}
    assert lines["brought"]["state"] in ("UNLOADING", "UNAVAILABLE")
    status = server.call("GET", "/v2/actorserve/status")[1]
    assert status["exchange"]["held_blocks"] == 0


def test_a_model_reloads_and_unloads_itself(server):
    """Its own request ends on the version that it is leaving behind."""
    before = pids(server, "controller")
    assert order(server, "controller", "load_model", model_name="controller") == {"result": None}
    after = pids(server, "controller")
    assert len(after) == 1
    assert after != before
    wait_until(lambda: not Path(f"/proc/{before[0]}").exists())
    assert order(server, "controller", "unload_model", model_name="controller") == {"result": None}
    wait_until(lambda: not Path(f"/proc/{after[0]}").exists())


def test_a_wait_for_a_load_keeps_nobody_else_waiting(start_server, repository, tmp_path):
    """Logs and calls of the same stub go on, from another thread, while one waits for a load."""
    go = tmp_path / "go"
    slow = f"""
class TritonPythonModel:
    def initialize(self, args):
        while not os.path.exists({str(go)!r}):
            time.sleep(0.005)
"""
    write_model(repository, "slow", slow + IDENTITY.partition("class TritonPythonModel:\n")[2])
    write_model(repository, "target")
    body = (
        ORDERS
        + f"""
class TritonPythonModel:
    def execute(self, requests):
        waiting = threading.Thread(target=pb_utils.load_model, args=("slow",))
        waiting.start()
        pb_utils.Logger.log_info("while it waits")
        x = pb_utils.Tensor("INPUT0", np.zeros(1, np.float32))
        for _ in range(20):
            pb_utils.InferenceRequest(
                model_name="target", inputs=[x], requested_output_names=["OUTPUT0"]
            ).exec()
        ready = pb_utils.is_model_ready("slow")
        alive = waiting.is_alive()
        open({str(go)!r}, "w").close()
        waiting.join()
        said = json.dumps([ready, alive, pb_utils.is_model_ready("slow")])
        return answers([said for _ in requests])
"""
    )
    write_model(repository, "controller", body, CONTROLLER_CONFIG)
    flags = ["--model-control-mode", "explicit", "--load-model", "controller"]
    server = start_server(repository, *flags, "--load-model", "target")
    status, outputs = server.infer("controller", {"ORDER": ("BYTES", [1], ["{}"])})
    assert (status, json.loads(outputs["SAID"][0])) == (200, [False, True, True])
    assert "while it waits" in server.log()


INITIALIZING = (
    ORDERS
    + """
class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.said = carry_out(json.loads(parameters["ORDER"]["string_value"]))
    def execute(self, requests):
        return answers([self.said for _ in requests])
    def finalize(self):
        print("finalize:", carry_out({"do": "load_model", "model_name": "target"}))
"""
)


def write_initializing(repository: Path, name: str, **what: object) -> None:
    """Write a model that does something to a model in its `initialize`."""
    text = json.dumps(json.dumps(what))
    parameter = f'parameters {{ key: "ORDER" value: {{ string_value: {text} }} }}\n'
    write_model(repository, name, INITIALIZING, CONTROLLER_CONFIG + parameter)


def said_at_start(server: Server, name: str) -> dict[str, object]:
    """Return what came of it."""
    status, outputs = server.infer(name, {"ORDER": ("BYTES", [1], ["{}"])})
    assert status == 200, outputs
    found: dict[str, object] = json.loads(outputs["SAID"][0])
    return found


def test_initialize_loads_what_the_model_needs(start_server, repository):
    """Also with one load at a time, and also what waits for its own load already."""
    write_initializing(repository, "a", do="load_model", model_name="b")
    write_initializing(repository, "b", do="load_model", model_name="target")
    write_model(repository, "target")
    server = start_server(repository, *EXPLICIT, "--model-load-thread-count", "1")
    assert said_at_start(server, "a") == {"result": None}
    assert said_at_start(server, "b") == {"result": None}
    assert server.infer("target", X)[0] == 200
    assert server.stop() == 0
    assert 'finalize: {"error": "Failed to load model: a model that a server runs can do this' in (
        server.log().replace("\\", "")
    )


def test_loads_that_would_wait_for_themselves_are_refused(start_server, repository):
    """A model that loads itself, and a circle of two; what is refused can be lived with."""
    write_initializing(repository, "itself", do="load_model", model_name="itself")
    write_initializing(repository, "a", do="load_model", model_name="b")
    write_initializing(repository, "b", do="load_model", model_name="a")
    server = start_server(repository, *EXPLICIT)
    said = str(said_at_start(server, "itself")["error"])
    assert said.startswith("Failed to load model: model 'itself' is being loaded and would wait")
    results = [said_at_start(server, name) for name in ("a", "b")]
    assert any("'a' waits for 'b'" in str(each.get("error")) for each in results) or any(
        "'b' waits for 'a'" in str(each.get("error")) for each in results
    )
    assert server.call("GET", "/v2/health/ready")[0] == 200


def test_auto_complete_config_controls_no_models(start_server, repository):
    """It runs in a process of its own, before anything is loaded."""
    body = (
        ORDERS
        + """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        raise ValueError(carry_out({"do": "load_model", "model_name": "target"}))
"""
    )
    write_model(repository, "model", body)
    server = start_server(repository, *EXPLICIT, "--exit-on-error=false")
    assert "not in auto_complete_config and finalize" in server.log()


def test_only_the_explicit_mode_lets_models_load_models(start_server, repository):
    """Looking is always allowed."""
    write_model(repository, "controller", CONTROLLER, CONTROLLER_CONFIG)
    server = start_server(repository)
    refusal = "explicit model load / unload is not allowed if polling is enabled"
    for do, prefix in (("load_model", "load"), ("unload_model", "unload")):
        said = order(server, "controller", do, model_name="controller")
        assert said["error"].startswith(f"Failed to {prefix} model: {refusal}")
    ready = order(server, "controller", "is_model_ready", model_name="controller")
    assert ready == {"result": True}


def test_models_load_each_other_under_load(start_server, repository):
    """Controllers that reload each other, clients meanwhile: no request fails, no load hangs."""
    for name in ("one", "two"):
        write_model(repository, name, CONTROLLER, CONTROLLER_CONFIG)
    write_model(repository, "target")
    server = start_server(repository, *EXPLICIT)
    results: list[object] = []

    def reload(controller: str, other: str) -> None:
        for model in (other, "target", other, "target"):
            results.append(order(server, controller, "load_model", model_name=model))

    def infer() -> None:
        while len(results) < 8 and threads[0].is_alive():
            statuses.append(server.infer("target", X)[0])

    statuses: list[int] = []
    threads = [
        threading.Thread(target=reload, args=names) for names in (("one", "two"), ("two", "one"))
    ]
    threads.append(threading.Thread(target=infer))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert results == [{"result": None}] * 8
    assert set(statuses) == {200}
    assert server.stop() == 0
