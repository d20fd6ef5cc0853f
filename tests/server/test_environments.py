# SPDX-License-Identifier: Apache-2.0
"""Models that run in a Python environment of their own: EXECUTION_ENV_PATH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.server.harness import EXAMPLES, TELL, TELL_CONFIG, parameter, write_model

pytestmark = pytest.mark.slow

WHERE = """
    def tell(self, request):
        import special
        return json.dumps({
            "prefix": sys.prefix,
            "environment": os.environ.get("VIRTUAL_ENV"),
            "path": os.environ["PATH"].split(":")[0],
            "special": special.WORD,
            "foreign": [p for p in sys.path if p.startswith(os.environ["SERVER_PREFIX"])],
        })
"""


@pytest.fixture(scope="module")
def make_environment(tmp_path_factory):
    """Return a function that makes a venv, with the packages that a stub needs or without."""

    def make(has_packages: bool = True) -> Path:
        path = tmp_path_factory.mktemp("venv") / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)
        site = next((path / "lib").glob("python3*")) / "site-packages"
        (site / "special.py").write_text("WORD = 'only here'\n")
        if has_packages:
            ours = Path(sysconfig.get_path("purelib"))
            for name in ("numpy", "numpy.libs", "msgspec"):
                if (ours / name).exists():
                    (site / name).symlink_to(ours / name)
        return path

    return make


def test_a_model_runs_in_its_own_environment(start_server, repository, make_environment):
    """Its interpreter, packages and variables; nothing of the server's site-packages."""
    environment = make_environment()
    write_model(
        repository,
        "elsewhere",
        TELL + WHERE,
        TELL_CONFIG
        + parameter("EXECUTION_ENV_PATH", environment)
        + "instance_group [ {count: 2} ]",
    )
    inside = write_model(
        repository,
        "inside",
        TELL + WHERE,
        TELL_CONFIG + parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env"),
    )
    (inside / "env").symlink_to(environment)
    site = sysconfig.get_path("purelib")
    server = start_server(repository, EXAMPLES, env={"SERVER_PREFIX": site})
    told = json.loads(server.tell("elsewhere"))
    assert told == {
        "prefix": str(environment),
        "environment": str(environment),
        "path": str(environment / "bin"),
        "special": "only here",
        "foreign": [],
    }
    assert json.loads(server.tell("inside"))["special"] == "only here"
    x = [1, 2, 3, 4]
    add = {"INPUT0": ("FP32", [4], x), "INPUT1": ("FP32", [4], x)}
    assert server.infer("add_sub", add)[1]["OUTPUT0"] == [2, 4, 6, 8]
    assert server.stop() == 0


def test_its_stub_is_restarted_there(start_server, repository, make_environment):
    """A killed stub comes back in the same environment."""
    environment = make_environment()
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", environment)
    body = TELL + "    def tell(self, request): return f'{sys.prefix} {os.getpid()}'\n"
    write_model(repository, "model", body, config)
    server = start_server(repository, flags=["--restart-backoff-s=0:0"])
    prefix, pid = server.tell("model").split()
    os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: server.stubs().get("model_0") not in (None, int(pid)))
    wait_until(lambda: server.call("GET", "/v2/models/model/ready")[0] == 200)
    again, new_pid = server.tell("model").split()
    assert again == prefix == str(environment)
    assert new_pid != pid
    assert server.stop() == 0


def test_an_environment_without_the_packages_says_what_is_missing(
    start_server, repository, make_environment
):
    """The reason names the package and the environment."""
    environment = make_environment(has_packages=False)
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", environment)
    write_model(repository, "model", TELL + WHERE, config)
    server = start_server(repository, wait=False)
    assert server.wait() == 1
    reason = server.log().partition("\nmodel: ")[2].partition("\n\n")[0]
    assert "msgspec" in reason or "numpy" in reason
    assert str(environment) in reason
    assert "5 times" not in reason
