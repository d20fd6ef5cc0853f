# SPDX-License-Identifier: Apache-2.0
"""Python-based backends: one model.py in --backend-directory serves every model that names it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actorserve.actors.check import check
from actorserve.config import Settings
from tests.conftest import wait_until
from tests.server.archives import make_venv, pack
from tests.server.harness import MODEL_HEAD, TELL, TELL_CONFIG, parameter, write_model

pytestmark = pytest.mark.slow

# The name is that of a library which the backend wraps: that import must find the library.
NAME = "json"
BACKEND = (
    MODEL_HEAD
    + "from . import near\nimport side\nfrom parts import part\n"
    + TELL
    + """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "OUTPUT0", "data_type": "TYPE_STRING", "dims": [1]})
        folder = pb_utils.get_model_dir()
        if os.path.exists(os.path.join(folder, "batch")):
            config.set_max_batch_size(4)
        return config

    def tell(self, request):
        folder = pb_utils.get_model_dir()
        return json.dumps({
            "args": {key: value for key, value in self.args.items() if key != "model_config"},
            "config": json.loads(self.args["model_config"]),
            "folder": folder,
            "data": open(os.path.join(folder, "data")).read(),
            "siblings": [near.WORD, side.WORD, part.WORD],
            "file": __file__,
            "pid": os.getpid(),
            "prefix": sys.prefix,
        })
"""
)


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    """Return a backend directory with one backend."""
    folder = tmp_path / "backends" / NAME
    (folder / "parts").mkdir(parents=True)
    (folder / "model.py").write_text(BACKEND)
    (folder / "near.py").write_text("WORD = 'near'\n")
    (folder / "side.py").write_text("WORD = 'side'\n")
    (folder / "parts" / "part.py").write_text("WORD = 'part'\n")
    return folder.parent


def write_data(repository: Path, name: str, data: str, config: str = "", version: int = 1) -> Path:
    """Write a model that is nothing but data; returns its folder."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True)
    (folder / str(version) / "data").write_text(data)
    (folder / "config.pbtxt").write_text(f'backend: "{NAME}"\n{config}')
    return folder


def test_models_bring_data_alone(start_server, repository, backends):
    """Both run the backend's file, each with its own folder, and neither needs a model.py."""
    first = write_data(repository, "first", "one", "instance_group [ { count: 2 } ]")
    write_data(repository, "second", "old", version=1)
    second = write_data(repository, "second.json", "dot", version=3)
    (second / "config.pbtxt").unlink()  # the name tells
    server = start_server(repository, flags=["--backend-directory", str(backends)])
    told = json.loads(server.tell("first"))
    assert told["data"] == "one"
    assert told["folder"] == str(first / "1")
    assert told["args"] == {
        "model_name": "first",
        "model_version": "1",
        "model_repository": str(first),
        "model_instance_name": told["args"]["model_instance_name"],
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
    assert told["siblings"] == ["near", "side", "part"]
    assert told["file"] == str(backends / NAME / "model.py")
    assert told["config"]["backend"] == NAME
    assert told["config"]["runtime"] == "model.py"
    assert told["config"]["input"][0]["name"] == "INPUT0"  # auto-completed
    assert json.loads(server.tell("second"))["data"] == "old"
    dotted = json.loads(server.tell("second.json"))
    assert dotted["data"] == "dot"
    assert dotted["args"]["model_version"] == "3"
    assert server.stop() == 0


def test_auto_complete_sees_the_model_s_own_folder(start_server, repository, backends):
    """`get_model_dir` is the user's version there, too."""
    folder = write_data(repository, "batched", "x")
    (folder / "1" / "batch").write_text("")
    write_data(repository, "plain", "x")
    server = start_server(repository, flags=[f"--backend-directory={backends}"])
    sizes = [
        server.call("GET", f"/v2/models/{name}/config")[1]["max_batch_size"]
        for name in ("batched", "plain")
    ]
    assert sizes == [4, 0]
    assert server.stop() == 0


def test_its_stub_is_restarted(start_server, repository, backends):
    """With the same file and folder, by a directory that was named by its variable."""
    write_data(repository, "model", "x")
    environment = {"ACTORSERVE_BACKEND_DIRECTORY": os.path.relpath(backends)}
    server = start_server(repository, flags=["--restart-backoff-s=0:0"], env=environment)
    told = json.loads(server.tell("model"))
    os.kill(told["pid"], signal.SIGKILL)
    wait_until(lambda: server.stubs().get("model_0") not in (None, told["pid"]))
    wait_until(lambda: server.call("GET", "/v2/models/model/ready")[0] == 200)
    again = json.loads(server.tell("model"))
    assert again.pop("pid") != told.pop("pid")
    assert again == told
    assert server.stop() == 0


def test_its_environment_lies_beside_it(start_server, repository, backends, tmp_path):
    """A model's own EXECUTION_ENV_PATH beats it."""
    venv = make_venv(tmp_path / "env")
    pack(venv, backends / NAME / "pb_exec_env_model.py.tar.gz")
    write_data(repository, "theirs", "x")
    write_data(repository, "own", "x", parameter("EXECUTION_ENV_PATH", venv))
    server = start_server(
        repository,
        flags=["--backend-directory", str(backends)],
        env={"TMPDIR": str(tmp_path)},
    )
    prefix = json.loads(server.tell("theirs"))["prefix"]
    assert Path(prefix).parent.parent == tmp_path
    assert Path(prefix).name.endswith("-pb_exec_env_model")
    assert json.loads(server.tell("own"))["prefix"] == str(venv)
    assert server.stop() == 0
    assert not Path(prefix).exists()


PROBLEMS = {
    "unknown": (
        'backend: "nowhere"',
        "there is no backend 'nowhere': neither is it 'python', nor is there a file "
        "'{backends}/nowhere/model.py' (--backend-directory)",
    ),
    "compiled": (
        'backend: "compiled"',
        "backend 'compiled' is a compiled one ('{backends}/compiled/libtriton_compiled.so')",
    ),
    "illegal": (
        f'backend: "{NAME}" runtime: "libtriton_json.so"',
        "runtime 'libtriton_json.so' of backend 'json' is not supported: leave it out, or set "
        "'model.py'",
    ),
    "absent": (
        'backend: "empty" runtime: "model.py"',
        "nor is there a file '{backends}/empty/model.py'",
    ),
    "up": ('backend: "../backends/json"', "expected the name of a folder in '{backends}'"),
    "hidden": ('backend: ".."', "expected the name of a folder in '{backends}'"),
    "versionless": (f'backend: "{NAME}"', "at least one version must be available"),
}


def make_problems(repository: Path, backends: Path) -> None:
    """Write a model for each problem."""
    (backends / "empty").mkdir()
    (backends / "compiled").mkdir()
    (backends / "compiled" / "libtriton_compiled.so").write_text("")
    (backends / "compiled" / "model.py").write_text(BACKEND)
    for name, (config, _) in PROBLEMS.items():
        folder = repository / name
        (folder / ("1" if name != "versionless" else "one")).mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)


def test_problems_name_what_was_looked_for(start_server, repository, backends):
    """Each fails its own model; a runtime says which of two is meant."""
    make_problems(repository, backends)
    (backends / "compiled" / "near.py").write_text("WORD = 'near'\n")
    (backends / "compiled" / "side.py").write_text("WORD = 'side'\n")
    (backends / "compiled" / "parts").mkdir()
    (backends / "compiled" / "parts" / "part.py").write_text("WORD = 'part'\n")
    chosen = write_data(repository, "chosen", "x")
    (chosen / "config.pbtxt").write_text('backend: "compiled" runtime: "model.py"')
    server = start_server(
        repository, flags=["--backend-directory", str(backends), "--exit-on-error=false"]
    )
    log = server.log()
    for name, (_, expected) in PROBLEMS.items():
        (line,) = [each for each in log.splitlines() if f"failed to load '{name}': " in each]
        assert expected.format(backends=backends) in line
    told = json.loads(server.tell("chosen"))
    assert told["file"] == str(backends / "compiled" / "model.py")
    assert server.stop() == 0


def test_without_a_directory_the_option_is_named(start_server, repository):
    """Whoever forgot it reads what to add."""
    write_data(repository, "model", "x")
    server = start_server(repository, wait=False)
    assert server.wait() == 1
    assert "backend 'json' is not supported: only the backend 'python' is" in server.log()
    assert "--backend-directory" in server.log()


def test_check_knows_backends(repository, backends, tmp_path):
    """What would load and what would not, a syntax error of the backend included."""
    make_problems(repository, backends)
    write_data(repository, "good", "x")
    (backends / "broken").mkdir()
    (backends / "broken" / "model.py").write_text("class :\n")
    bad = write_data(repository, "bad", "x")
    (bad / "config.pbtxt").write_text('backend: "broken"')
    write_model(repository, "usual", TELL, TELL_CONFIG)
    settings = Settings(model_repository=(str(repository),), backend_directory=str(backends))
    problems = {each.model: each.problem for each in check(settings)}
    for name, (_, expected) in PROBLEMS.items():
        assert expected.format(backends=backends) in problems[name]
    assert f"{backends}/broken/model.py" in problems["bad"]
    assert "SyntaxError" in problems["bad"]
    assert problems["good"] == problems["usual"] == ""
    command = [sys.executable, "-m", "actorserve", "check", str(repository)]
    command += ["--backend-directory", str(backends)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "10 models: 2 ok, 8 failed" in done.stdout
