# SPDX-License-Identifier: Apache-2.0
"""Loads that change little touch little: the number of instances, and which versions serve."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.server.control_models import pids
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, Server, write_model

X = {"INPUT0": ("FP32", [2], [1.5, 2.5])}
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")


def config(count: int, extra: str = "") -> str:
    """Return a configuration with so many instances."""
    return f"{IDENTITY_CONFIG}instance_group [ {{ count: {count} kind: KIND_CPU }} ]\n{extra}"


def load(server: Server, model: str = "model") -> int:
    """Load over HTTP; returns the status."""
    return server.call("POST", f"/v2/repository/models/{model}/load")[0]


def configure(repository: Path, text: str) -> None:
    """Write the model's configuration anew."""
    (repository / "model" / "config.pbtxt").write_text(text)


def test_instances_are_added_and_removed_beside_the_others(start_server, repository):
    """Whose pids stay; readiness, statistics and configuration are those of the new number."""
    write_model(repository, "model", config=config(2))
    server = start_server(repository, *EXPLICIT)
    first = pids(server, "model")
    configure(repository, config(4))
    assert load(server) == 200
    four = pids(server, "model")
    assert four[:2] == first
    assert len(set(four)) == 4
    told = server.call("GET", "/v2/models/model/config")[1]
    assert told["instance_group"][0]["count"] == 4
    assert server.infer("model", X)[0] == 200
    configure(repository, config(1))
    assert load(server) == 200
    assert pids(server, "model") == first[:1]
    wait_until(lambda: len(server.stubs()) == 1)
    assert server.infer("model", X)[0] == 200
    assert server.call("GET", "/v2/health/ready")[0] == 200
    assert load(server) == 200, "and one that changes nothing starts anew"
    assert pids(server, "model") != first[:1]
    assert server.stop() == 0


def test_requests_end_on_the_instances_that_go(start_server, repository, tmp_path):
    """Those that they have; new ones go to those that stay."""
    go = tmp_path / "go"
    body = IDENTITY.replace(
        "        answers = []\n",
        f"""        answers = []
        x = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        while x[0] < 0 and not os.path.exists({str(go)!r}):
            time.sleep(0.005)
""",
    )
    write_model(repository, "model", body, config(3))
    server = start_server(repository, *EXPLICIT)
    answers: list[tuple[int, object]] = []

    def wait() -> None:
        answers.append(server.infer("model", {"INPUT0": ("FP32", [1], [-1])}))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()

    def busy() -> int:
        status = server.call("GET", "/v2/actorserve/status")[1]
        return int(status["models"][0]["versions"][0]["scheduler"]["in_flight"])

    wait_until(lambda: busy() == 3)
    configure(repository, config(4))
    assert load(server) == 200
    kept = pids(server, "model")
    configure(repository, config(2))
    assert load(server) == 200
    assert pids(server, "model") == kept[:2]
    wait_until(lambda: len(server.stubs()) == 3)
    go.touch()
    for thread in threads:
        thread.join(20)
    assert answers == [(200, {"OUTPUT0": [-1]})] * 3
    wait_until(lambda: len(server.stubs()) == 2)
    assert pids(server, "model") == kept[:2]
    assert server.stop() == 0


def test_an_instance_that_does_not_come_up_changes_nothing(start_server, repository):
    """The load fails with the reason, the others serve on, and the next load may succeed."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        if args["model_instance_name"].endswith("_2") and os.path.exists(FLAG):
            raise ValueError("two are enough")
"""
    flag = repository.parent / "flag"
    flag.touch()
    source = f"FLAG = {str(flag)!r}\n{body}" + IDENTITY.partition("class TritonPythonModel:\n")[2]
    write_model(repository, "model", source, config(2))
    server = start_server(repository, *EXPLICIT)
    first = pids(server, "model")
    configure(repository, config(4))
    status, answer = server.call("POST", "/v2/repository/models/model/load")
    assert (status, "two are enough" in answer["error"]) == (400, True)
    assert pids(server, "model") == first
    wait_until(lambda: len(server.stubs()) == 2)
    assert server.call("GET", "/v2/health/ready")[0] == 200
    flag.unlink()
    assert load(server) == 200
    assert pids(server, "model")[:2] == first
    assert len(pids(server, "model")) == 4


@pytest.mark.parametrize("what", ["config", "model.py", "file"])
def test_any_other_change_starts_all_anew(start_server, repository, what):
    """Of the configuration, the model's code, or a file beside them."""
    folder = write_model(repository, "model", config=config(1))
    (folder / "labels.txt").write_text("a")
    server = start_server(repository, *EXPLICIT)
    before = pids(server, "model")
    configure(repository, config(2, "max_batch_size: 8\n" if what == "config" else ""))
    if what == "model.py":
        write_model(repository, "model", IDENTITY + "#", config(2))
    elif what == "file":
        (folder / "labels.txt").write_text("b, and more")
    assert load(server) == 200
    after = pids(server, "model")
    assert len(after) == 2
    assert not set(before) & set(after)


def test_versions_come_and_go_beside_the_others(start_server, repository):
    """By the policy, and by their folders; the pids of those that stay are the same."""
    policy = "version_policy: {{ {} }}\n"
    write_model(repository, "model", config=config(1), versions=(1, 2))
    server = start_server(repository, *EXPLICIT)
    second = pids(server, "model")
    assert len(second) == 1
    configure(repository, config(1, policy.format("all: {}")))
    assert load(server) == 200
    both = pids(server, "model")
    assert both[1:] == second
    assert server.call("GET", "/v2/models/model")[1]["versions"] == ["1", "2"]
    write_model(repository, "model", config=None, versions=(3,))
    assert load(server) == 200
    assert pids(server, "model")[:2] == both
    assert server.call("GET", "/v2/models/model/versions/1")[1]["versions"] == ["1", "2", "3"]
    configure(repository, config(1, policy.format("specific: { versions: [1, 3] }")))
    assert load(server) == 200
    assert pids(server, "model")[0] == both[0]
    assert server.call("GET", "/v2/models/model/versions/2")[0] == 404
    assert server.call("GET", "/v2/models/model/ready")[0] == 200
    wait_until(lambda: not Path(f"/proc/{both[1]}").exists())
    assert server.stop() == 0
