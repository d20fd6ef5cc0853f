# SPDX-License-Identifier: Apache-2.0
"""What a model sees of the server: its arguments, versions, instances, repository and end."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from actorserve.errors import InvalidArgument
from actorserve.frontend.table import model_table
from tests.server.harness import IDENTITY_CONFIG, TELL, TELL_CONFIG, write_model

ARGS = TELL + "    def tell(self, request): return json.dumps(self.args)\n"
VERSION = TELL + "    def tell(self, request): return self.args['model_version']\n"
PID = TELL + "    def tell(self, request): return str(os.getpid())\n"
MEETING = """
class TritonPythonModel:
    def execute(self, requests):
        # Each instance waits for the other: only side by side can they answer.
        me, other = sorted([os.environ["MEET"] + "/0", os.environ["MEET"] + "/1"],
                           key=lambda path: path[-1] != self.number)
        open(me, "w").close()
        deadline = time.monotonic() + 30
        while not os.path.exists(other) and time.monotonic() < deadline:
            time.sleep(0.005)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", np.array([self.name.encode()], object))]
            )
            for _ in requests
        ]

    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.number = self.name[-1]
"""


LONG_NAME = "a_model_with_a_name_beyond_fifteen_characters"


@pytest.fixture(scope="module")
def server(start_shared, tmp_path_factory):
    """Return a server of models that tell what they see."""
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "args", ARGS, TELL_CONFIG + 'parameters { key: "x" value: {} }')
    write_model(repository, "latest", VERSION, TELL_CONFIG, (1, 3, 12))
    two = TELL_CONFIG + "version_policy { latest { num_versions: 2 } }"
    write_model(repository, "two", VERSION, two, (1, 3, 12))
    every = TELL_CONFIG + "version_policy { all {} }"
    write_model(repository, "every", VERSION, every, (0, 1, 20, "02", "x1", "-3", "1.5"))
    chosen = TELL_CONFIG + "version_policy { specific { versions: [ 1, 3, 7 ] } }"
    write_model(repository, "chosen", VERSION, chosen, (1, 3, 12))
    groups = TELL_CONFIG + 'instance_group [ { count: 2 }, { name: "spare" kind: KIND_CPU } ]'
    write_model(repository, "groups", VERSION, groups)
    write_model(repository, "no_config_name", VERSION, f'name: "no_config_name"\n{TELL_CONFIG}')
    renamed = TELL_CONFIG + 'default_model_filename: "other.py"'
    folder = write_model(repository, "renamed", VERSION, renamed)
    (folder / "1" / "model.py").rename(folder / "1" / "other.py")
    siblings = "import sibling\n" + TELL + "    def tell(self, request): return sibling.WORD\n"
    folder = write_model(repository, "siblings", siblings, TELL_CONFIG)
    (folder / "1" / "sibling.py").write_text("WORD = 'found'\n")
    two = TELL_CONFIG + "instance_group [ { count: 2 kind: KIND_CPU } ]"
    write_model(repository, "pair", MEETING, two)
    write_model(repository, LONG_NAME, PID, two)
    meet = tmp_path_factory.mktemp("meet")
    server = start_shared(repository, env={"MEET": str(meet)})
    server.repository = repository
    return server


# --- arguments -----------------------------------------------------------------------------------


def test_initialize_gets_exactly_the_seven_arguments(server):
    """The seven strings of the model API, with the completed configuration as JSON."""
    args = json.loads(server.tell("args"))
    config = json.loads(args.pop("model_config"))
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "args_0",
        "model_instance_device_id": "0",
        "model_repository": str(server.repository / "args"),
        "model_version": "1",
        "model_name": "args",
    }
    assert config["name"] == "args"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert config["parameters"]["x"] == {"string_value": ""}
    assert config == server.request("GET", "/v2/models/args/config").json


def test_a_model_file_may_have_another_name(server):
    """default_model_filename is honoured."""
    assert server.tell("renamed") == "1"


def test_a_model_imports_its_siblings(server):
    """Files beside model.py are importable."""
    assert server.tell("siblings") == "found"


# --- versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "versions"),
    [
        ("latest", ["12"]),
        ("two", ["3", "12"]),
        ("every", ["0", "1", "20"]),
        ("chosen", ["1", "3"]),
    ],
)
def test_the_version_policy_chooses(server, model, versions):
    """Chosen versions serve, the highest is the default, the others are not there."""
    assert server.request("GET", f"/v2/models/{model}").json["versions"] == versions
    assert server.tell(model) == versions[-1]
    for version in versions:
        assert server.tell(f"{model}/versions/{version}") == version
        assert server.call("GET", f"/v2/models/{model}/versions/{version}/ready")[0] == 200
    status, error = server.infer(f"{model}/versions/9", {"INPUT0": ("FP32", [1], [0])})
    assert status == 404
    assert error == f"Request for unknown model: '{model}' version 9 is not found"


def test_a_version_that_the_policy_names_and_the_disk_lacks_is_said(server):
    """A warning, and the others serve."""
    assert "model 'chosen': version 7 has no folder" in server.log()


def test_the_response_names_the_version_that_answered(server):
    """model_version in a response is the one that ran."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    reply = server.request("POST", "/v2/models/two/versions/3/infer", {"inputs": [tensor]})
    assert reply.json["model_name"] == "two"
    assert reply.json["model_version"] == "3"


# --- instances -----------------------------------------------------------------------------------


def test_instances_are_named_after_their_groups(server):
    """Every instance is a process whose name ps shows."""
    assert {"groups_0_0", "groups_0_1", "spare_0"} <= set(server.stubs())
    log = server.log()
    for name in ("groups_0_0", "groups_0_1", "spare_0"):
        assert f'"{name}: ready"' in log


def test_instances_run_side_by_side(server):
    """Two requests that wait for each other are both answered, each by its own instance."""
    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(lambda _: server.tell("pair"), range(2)))
    assert sorted(names) == ["pair_0_0", "pair_0_1"]


def test_a_long_model_name_keeps_its_number_in_ps(server):
    """What ps shows is cut in the model's part."""
    shown = {name: pid for name, pid in server.stubs().items() if name.startswith("a_model")}
    assert {each[-4:] for each in shown} == {"_0_0", "_0_1"}
    assert int(server.tell(LONG_NAME)) in shown.values()


# --- repositories --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(start_shared, tmp_path_factory):
    """Return a server of four repositories, with a model that is in two, and things besides."""
    root = tmp_path_factory.mktemp("many")
    for number in range(3):
        write_model(root / f"repo{number}", f"model{number}")
    for number in range(2):
        write_model(root / f"repo{number}", "twice")
    (root / "repo0" / ".git").mkdir()
    (root / "repo0" / "README.md").write_text("hello")
    (root / "empty").mkdir()
    flags = [f"--model-repository={root / 'repo2'}", f"--model-store={root / 'repo0'}"]
    return start_shared(
        root / "repo0", root / "repo1", root / "empty", flags=[*flags, "--exit-on-error=false"]
    )


def test_several_repositories_are_one(many):
    """Models of all repositories serve, however and how often the repositories are named."""
    for number in range(3):
        assert many.infer(f"model{number}", {"INPUT0": ("FP32", [1], [number])})[0] == 200


def test_a_model_in_two_repositories_does_not_load(many):
    """Neither of the two serves, and the reason says so; the others do."""
    assert "twice: model appears in two or more repositories" in many.log()
    assert many.call("GET", "/v2/models/twice/ready")[0] == 400
    assert many.call("GET", "/v2/health/ready")[0] == 503


def test_hidden_folders_and_files_are_no_models(many):
    """A .git and a README beside the models do no harm."""
    assert "README" not in many.log()
    assert ".git" not in many.log()


def test_an_empty_repository_is_served(repository, tmp_path):
    """No models is no error."""

    async def main() -> None:
        async with Supervisor(repository, _settings(tmp_path)) as server:
            assert server.is_ready()
            assert model_table(server.stats()) == "No models are loaded."

    asyncio.run(main())


# --- the end -------------------------------------------------------------------------------------


FINALIZE = """
class TritonPythonModel:
    def finalize(self):
        open(os.environ["MARK"], "a").write("finalized\\n")
        print("good bye")
    def execute(self, requests):
        return []
"""


def test_finalize_is_called_at_stop(start_server, repository, tmp_path):
    """Once for each instance; what it prints and what it raises is in the log, the code is 0."""
    mark = tmp_path / "mark"
    write_model(repository, "model", FINALIZE, IDENTITY_CONFIG + "instance_group [ { count: 2 } ]")
    body = "class TritonPythonModel:\n    def finalize(self): raise RuntimeError('not now')\n"
    write_model(repository, "raises", body)
    server = start_server(repository, env={"MARK": str(mark)})
    assert not mark.exists()
    assert server.stop() == 0
    assert mark.read_text() == "finalized\n" * 2
    assert re.search(r'I\d{4} [\d:.]+ \d+ model_0_[01] stdout\] "good bye"', server.log())
    assert "raises_0: finalize failed: RuntimeError: not now" in server.log()


# --- reload -------------------------------------------------------------------


def _settings(tmp_path: Path, **fields: object) -> Settings:
    return Settings(crash_dir=str(tmp_path / "crashes"), **fields)  # type: ignore[arg-type]


def test_a_reload_that_fails_leaves_what_served(repository, tmp_path):
    """The reason is raised, the old version goes on."""
    write_model(repository, "model")

    async def main() -> None:
        async with Supervisor(repository, _settings(tmp_path)) as server:
            write_model(repository, "model", "raise ValueError('broken')\n")
            with pytest.raises(InvalidArgument, match="ValueError: broken"):
                await server.load("model")
            x = np.ones(1, np.float32)
            assert (await server.infer("model", {"INPUT0": x}))["OUTPUT0"].tolist() == [1]
            assert "broken" in server.failures["model"]
            write_model(repository, "model")
            await server.load("model")
            assert server.failures == {}

    asyncio.run(main())
