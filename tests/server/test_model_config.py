# SPDX-License-Identifier: Apache-2.0
"""Configurations: completed by the model, wrong, or beyond this version; each is told to people."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, parameter, write_model

COMPLETE = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config
"""
EXECUTE = IDENTITY.partition("class TritonPythonModel:\n")[2]
HOOK = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        {}
"""
DIES_TWICE = """
        count = os.path.getsize(os.environ["MARK"]) if os.path.exists(os.environ["MARK"]) else 0
        with open(os.environ["MARK"], "a") as mark:
            mark.write("x")
        if count < 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return config
"""

WRONG = {
    # name: (model.py, config.pbtxt, what the reason has to hold)
    "returns_int": (HOOK.format("return 3"), None, "must return a valid pb.ModelConfig object"),
    "returns_none": (HOOK.format("pass"), None, "must return a valid pb.ModelConfig object"),
    "hook_raises": (HOOK.format("raise RuntimeError('no idea')"), None, "RuntimeError: no idea"),
    "hook_dies": (
        HOOK.format("print('last words'); os._exit(4)"),
        None,
        "5 deaths in a row: the stub exited with code 4\n    last words",
    ),
    "hook_contradicts": (
        HOOK.format("config.add_input({'name': 'INPUT0', 'data_type': 'TYPE_INT8', 'dims': [1]})"),
        IDENTITY_CONFIG,
        "configuration expects datatype TYPE_FP32 for input 'INPUT0', model provides TYPE_INT8",
    ),
    "unknown_field": (
        IDENTITY,
        IDENTITY_CONFIG + "  bogus_field: 3\n",
        "unknown_field/config.pbtxt:4:3: ModelConfig has no field 'bogus_field'",
    ),
    "wrong_type": (
        IDENTITY,
        'backend: "python"\nmax_batch_size: "x"\n',
        "wrong_type/config.pbtxt:2:17: max_batch_size: expected an integer (int32), found '\"x\"'",
    ),
    "unfinished": (IDENTITY, 'input [ { name: "A"\n', "unfinished/config.pbtxt:2:1: "),
    "no_utf_8": (IDENTITY, b'backend: "python"\nname: "\xff"\n', "no_utf_8/config.pbtxt"),
    "other_name": (
        IDENTITY,
        'name: "another" ' + IDENTITY_CONFIG,
        "unexpected directory name 'other_name' for model 'another', "
        "directory name must equal model name",
    ),
    "no_dims": (
        IDENTITY,
        'backend: "python" input [ { name: "A" data_type: TYPE_FP32 } ]',
        "model input 'A' must specify 'dims' for no_dims",
    ),
    "gpu": (
        IDENTITY,
        IDENTITY_CONFIG + "instance_group [ { kind: KIND_GPU } ]",
        "has kind KIND_GPU but no GPUs are available",
    ),
    "bad_budget": (
        IDENTITY,
        IDENTITY_CONFIG + parameter("EXECUTE_TIMEOUT_S", "fast"),
        "parameter EXECUTE_TIMEOUT_S of model 'bad_budget': expected a number of seconds greater "
        "than 0, or none, got 'fast'",
    ),
    "no_environment": (
        IDENTITY,
        IDENTITY_CONFIG + parameter("EXECUTION_ENV_PATH", "/nowhere/env"),
        "EXECUTION_ENV_PATH '/nowhere/env' does not exist",
    ),
    "ensemble": (IDENTITY, "ensemble_scheduling { step [] }", "ensemble_scheduling is not supp"),
    "sequences": (
        IDENTITY,
        IDENTITY_CONFIG + "sequence_batching {}",
        "sequence_batching is not supported by this version",
    ),
    "foreign": (
        IDENTITY,
        'backend: "onnxruntime"',
        "backend 'onnxruntime' is not supported: only the backend 'python' is",
    ),
    "agents": (
        IDENTITY,
        IDENTITY_CONFIG + 'model_repository_agents { agents [ { name: "checksum" } ] }',
        "model_repository_agents are not supported, and 'checksum' may have to check the files",
    ),
    "syntax_error": ("def x(:\n", IDENTITY_CONFIG, "SyntaxError: invalid syntax"),
    "import_error": ("import nowhere\n", IDENTITY_CONFIG, "No module named 'nowhere'"),
    "no_class": ("x = 1\n", IDENTITY_CONFIG, "has no attribute 'TritonPythonModel'"),
    "init_raises": (
        "class TritonPythonModel:\n    def initialize(self, args): raise KeyError('weights')\n",
        IDENTITY_CONFIG,
        "KeyError: 'weights'",
    ),
    "init_exits": (
        "class TritonPythonModel:\n    def initialize(self, args): sys.exit('enough')\n",
        IDENTITY_CONFIG,
        "SystemExit: enough",
    ),
    "init_dies": (
        "class TritonPythonModel:\n    def initialize(self, args): os._exit(3)\n",
        IDENTITY_CONFIG,
        "died 5 times in a row before it was ready: exited with code 3 while initializing",
    ),
    "bad$name": (IDENTITY, IDENTITY_CONFIG, "model name 'bad$name' contains the character '$'"),
}


@pytest.fixture(scope="module")
def server(start_shared, tmp_path_factory):
    """Return a server of good and bad models that serves what can be."""
    repository = tmp_path_factory.mktemp("configs")
    write_model(repository, "completed", COMPLETE + EXECUTE, None)
    write_model(repository, "bare", IDENTITY, None)
    partial = 'backend: "python"\nmax_batch_size: 2\n'
    write_model(repository, "partial", COMPLETE + EXECUTE, partial)
    write_model(
        repository, "dies_twice", HOOK.format(DIES_TWICE.strip()) + EXECUTE, IDENTITY_CONFIG
    )
    warned = (
        'model_warmup [ { name: "a" batch_size: 1 } ] response_cache { enable: true }\n'
        'optimization { cuda { graphs: true } } metric_tags { key: "a-b" value: "b" }\n'
        "instance_group [ { count: 2 rate_limiter { priority: 1 } } ]\n"
        "max_batch_size: 2 dynamic_batching { preserve_ordering: true "
        "default_queue_policy { timeout_action: DELAY allow_timeout_override: true } }\n"
    )
    write_model(repository, "warned", IDENTITY, IDENTITY_CONFIG + warned)
    for name, (source, config, _) in WRONG.items():
        folder = write_model(repository, name, source, None)
        if config is not None:
            data = config if isinstance(config, bytes) else config.encode()
            (folder / "config.pbtxt").write_bytes(data)
    (repository / "no_versions").mkdir()
    (repository / "no_versions" / "config.pbtxt").write_text(IDENTITY_CONFIG)
    folder = write_model(repository, "no_file", IDENTITY, IDENTITY_CONFIG)
    (folder / "1" / "model.py").unlink()
    (repository / "nothing").mkdir()
    mark = tmp_path_factory.mktemp("mark") / "deaths"
    flags = ["--exit-on-error=false", "--restart-backoff-s=0:0.01"]
    server = start_shared(repository, flags=flags, env={"MARK": str(mark)})
    server.mark = mark
    return server


def _table(server) -> dict[str, list[str]]:
    """Return the rows of the table of models by name."""
    lines = server.log().partition("MODEL ")[2].partition("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: line.split()[1:] for line in lines}


def _reason(server, model: str) -> str:
    """Return a model's reason below the table."""
    found = re.search(rf"^{re.escape(model)}: (.*(?:\n    .*)*)", server.log(), re.MULTILINE)
    assert found is not None, f"no reason for {model}"
    return found[1]


# --- what the model completes --------------------------------------------------------------------


def test_a_model_completes_its_configuration(server):
    """Inputs, outputs, batching: the model says them, clients see them, batches run."""
    config = server.request("GET", "/v2/models/completed/config").json
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert [each["name"] for each in config["input"]] == ["INPUT0"]
    assert config["backend"] == "python"
    metadata = server.request("GET", "/v2/models/completed").json
    assert metadata["inputs"] == [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, -1]}]
    status, outputs = server.infer("completed", {"INPUT0": ("FP32", [2, 1], [1, 2])})
    assert (status, outputs) == (200, {"OUTPUT0": [1, 2]})


def test_what_the_file_says_is_completed_not_replaced(server):
    """A max_batch_size of the file may be raised, and the rest is added."""
    config = server.request("GET", "/v2/models/partial/config").json
    assert config["max_batch_size"] == 4
    assert len(config["input"]) == len(config["output"]) == 1


def test_a_model_without_config_and_hook_has_no_inputs(server):
    """It loads; a request with a tensor that nobody configured is refused."""
    metadata = server.request("GET", "/v2/models/bare").json
    assert metadata["inputs"] == []
    assert _table(server)["bare"] == ["1", "READY", "1/1"]
    status, error = server.infer("bare", {"INPUT0": ("FP32", [1], [1])})
    assert status == 400
    assert "expected 0 inputs but got 1 inputs for model 'bare'" in error


def test_a_hook_that_dies_is_asked_again(server):
    """Two deaths, then an answer: the model serves."""
    assert server.mark.read_text() == "xxx"
    assert _table(server)["dies_twice"] == ["1", "READY", "1/1"]


def test_a_hook_is_not_called_where_that_is_switched_off(repository, tmp_path):
    """--disable-auto-complete-config leaves the configuration as it is."""
    write_model(repository, "model", HOOK.format("raise RuntimeError('no')") + EXECUTE)
    settings = Settings(auto_complete_config=False, crash_dir=str(tmp_path))

    async def main() -> None:
        async with Supervisor(repository, settings) as server:
            outputs = await server.infer("model", {"INPUT0": np.ones(1, np.float32)})
            assert outputs["OUTPUT0"].tolist() == [1]

    asyncio.run(main())


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("model", WRONG)
def test_a_model_that_cannot_load_says_why(server, model):
    """In the table, in the log, and at its endpoints; never a traceback of ours."""
    expected = WRONG[model][2]
    assert _table(server)[model] == ["-", "UNAVAILABLE", "-"]
    reason = _reason(server, model)
    assert expected in reason
    first = reason.partition("\n")[0]
    escaped = json.dumps(first, ensure_ascii=False)[1:-1]
    assert re.search(rf"^E\d{{4}} .*\"failed to load '{re.escape(model)}': ", server.log(), re.M)
    assert escaped in server.log()
    assert "actorserve/actors" not in reason
    url = f"/v2/models/{model.replace('$', '%24')}"
    assert server.call("GET", f"{url}/ready")[0] == 400
    status, body = server.call("GET", url)
    assert status in (404, 503), body


def test_a_model_without_a_version_says_so(server):
    """A configuration and no version folder."""
    reason = _reason(server, "no_versions")
    assert "at least one version must be available under the version policy" in reason


def test_a_missing_model_file_is_named(server):
    """A version folder without model.py."""
    assert re.search(r"Python model file not found in '.*/no_file/1/model.py'", server.log())


def test_an_empty_folder_is_no_model_of_any_backend(server):
    """The reason is the real server's."""
    assert _reason(server, "nothing").startswith(
        "Invalid model name: Could not determine backend for model 'nothing' with no backend in "
        "model configuration. Expected model name of the form 'model.<backend_name>'."
    )


def test_a_model_s_traceback_is_in_the_log_without_our_frames(server):
    """What the model's author needs, and nothing of the server's inside."""
    lines = [line for line in server.log().splitlines() if " init_raises_0 stderr] " in line]
    text = "\n".join(lines)
    assert "Traceback (most recent call last):" in text
    assert "init_raises/1/model.py" in text
    assert "KeyError: 'weights'" in text
    assert "actors/stub.py" not in text


def test_the_server_serves_and_says_that_it_is_not_ready(server):
    """Some models failed: the good ones answer, readiness is false, and people are told."""
    log = server.log()
    assert "Serving, but not ready: http://" in log
    assert "\nReady: " not in log
    assert server.call("GET", "/v2/health/live")[0] == 200
    assert server.call("GET", "/v2/health/ready")[0] == 503
    assert server.call("GET", "/v2/models/completed/ready")[0] == 200


# --- what is ignored is said ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "model_warmup is ignored when serving, the first requests run on a cold model",
        "response_cache is ignored: every request is executed",
        "optimization.cuda is ignored",
        "metric_tags: 'a-b' is ignored",
        "dynamic_batching: timeout_action DELAY is ignored: with preserve_ordering no request",
        "instance_group 'warned_0': rate_limiter is ignored: an instance runs as soon as",
    ],
)
def test_what_has_no_effect_is_warned_of(server, text):
    """One warning for each, with the model's name; the model serves."""
    warnings = [line for line in server.log().splitlines() if f"\"model 'warned': {text}" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("W")
    assert _table(server)["warned"] == ["1", "READY", "2/2"]
