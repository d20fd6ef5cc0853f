# SPDX-License-Identifier: Apache-2.0
"""Poll mode: what changes on disk is loaded and unloaded, when it is quiet."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.server.control_models import pids
from tests.server.harness import IDENTITY, IDENTITY_CONFIG, Server, write_model

X = {"INPUT0": ("FP32", [2], [1.5, 2.5])}
POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "0.2")


@pytest.fixture
def server(start_server, repository):
    """Return a server that looks five times a second, with a model."""
    write_model(repository, "model")
    return start_server(repository, *POLL)


def state(server: Server, model: str) -> str:
    """Return a model's state, "" for one that has none."""
    lines = server.call("POST", "/v2/repository/index")[1]
    return next((x.get("state", "") for x in lines if x["name"] == model), "")


def test_models_that_are_added_and_deleted_are_noticed(server, repository):
    """Nobody else is disturbed."""
    before = pids(server, "model")
    write_model(repository, "added")
    wait_until(lambda: server.infer("added", X)[0] == 200)
    shutil.rmtree(repository / "added")
    wait_until(lambda: server.infer("added", X)[0] != 200)
    wait_until(lambda: state(server, "added") in ("", "UNAVAILABLE"))
    write_model(repository, "added")
    wait_until(lambda: server.infer("added", X)[0] == 200)
    assert pids(server, "model") == before
    assert server.call("GET", "/v2/health/ready")[0] == 200
    assert server.stop() == 0


@pytest.mark.parametrize("what", ["model.py", "config", "same size and time", "version", "touch"])
def test_changes_are_noticed(server, repository, what):
    """Of code, of the configuration, of a version's folder."""
    before = pids(server, "model")
    file = repository / "model" / "1" / "model.py"
    config = repository / "model" / "config.pbtxt"
    if what == "model.py":
        file.write_text(file.read_text().replace("as_numpy()", "as_numpy() + 1"))
    elif what == "config":
        config.write_text(IDENTITY_CONFIG + "max_batch_size: 8\n")
    elif what == "same size and time":
        status = config.stat()
        config.write_text(IDENTITY_CONFIG.replace("-1 ]", "02 ]"))
        os.utime(config, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif what == "version":
        write_model(repository, "model", IDENTITY, None, versions=(2,))
    else:
        os.utime(file)
    x = {"INPUT0": ("FP32", [1, 2] if what == "config" else [2], [1.5, 2.5])}
    wait_until(lambda: not set(before) & set(pids(server, "model")))
    wait_until(lambda: not Path(f"/proc/{before[0]}").exists())
    assert server.infer("model", x)[0] == 200
    assert server.call("GET", "/v2/health/ready")[0] == 200


def test_what_an_import_leaves_behind_is_no_change(server, repository):
    """Nor is a look that finds the same."""
    before = pids(server, "model")
    (repository / "model" / "1" / "__pycache__").mkdir(exist_ok=True)
    (repository / "model" / "1" / "__pycache__" / "model.pyc").write_bytes(b"x")
    write_model(repository, "later")
    wait_until(lambda: server.infer("later", X)[0] == 200)
    assert pids(server, "model") == before


def test_a_model_that_is_still_written_is_left_alone(server, repository):
    """Until it has been quiet from one look to the next."""
    write_model(repository, "growing", "raise ValueError('half-written')\n")
    file = repository / "growing" / "1" / "model.py"
    pause = threading.Event()
    for number in range(20):
        with file.open("a") as stream:
            stream.write(f"# {number}\n")
        pause.wait(0.05)
    write_model(repository, "growing")
    wait_until(lambda: server.infer("growing", X)[0] == 200)
    assert "half-written" not in server.log()


def test_a_change_that_cannot_be_loaded_leaves_what_serves(server, repository):
    """And is not tried again and again, but the next change is."""
    folder = repository / "model"
    good = (folder / "1" / "model.py").read_text()
    (folder / "1" / "model.py").write_text("raise ValueError('so it is')")
    server.wait_log("failed to load 'model': ValueError: so it is")
    assert server.infer("model", X) == (200, {"OUTPUT0": [1.5, 2.5]})
    write_model(repository, "later")
    wait_until(lambda: server.infer("later", X)[0] == 200)
    assert server.log().count("failed to load 'model'") == 1
    (folder / "1" / "model.py").write_text(good.replace("as_numpy()", "as_numpy() + 1"))
    wait_until(lambda: server.infer("model", X) == (200, {"OUTPUT0": [2.5, 3.5]}))


def test_a_repository_that_cannot_be_read_unloads_nothing(server, repository, tmp_path):
    """It may be a file system that is away for a while."""
    before = pids(server, "model")
    away = tmp_path / "away"
    repository.rename(away)
    pause = threading.Event()
    pause.wait(1.0)
    assert pids(server, "model") == before
    assert server.infer("model", X)[0] == 200
    away.rename(repository)
    write_model(repository, "later")
    wait_until(lambda: server.infer("later", X)[0] == 200)
    assert pids(server, "model") == before


def test_only_the_number_of_instances_is_changed(server, repository):
    """As by a load that is asked for."""
    group = "instance_group [ {{ count: {} kind: KIND_CPU }} ]\n"
    write_model(repository, "counted", config=IDENTITY_CONFIG + group.format(1))
    wait_until(lambda: server.infer("counted", X)[0] == 200)
    before = pids(server, "counted")
    (repository / "counted" / "config.pbtxt").write_text(IDENTITY_CONFIG + group.format(2))
    wait_until(lambda: len(pids(server, "counted")) == 2)
    assert pids(server, "counted")[0] == before[0]


def test_links_that_lead_elsewhere_are_followed(start_server, tmp_path):
    """As repositories are mounted into containers: a link changes, and so does the model."""
    for name, body in (("old", IDENTITY), ("new", IDENTITY.replace("numpy()", "numpy() + 1"))):
        write_model(tmp_path / name, "model", body)
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "model").symlink_to(tmp_path / "old" / "model")
    server = start_server(repository, *POLL)
    assert server.infer("model", X) == (200, {"OUTPUT0": [1.5, 2.5]})
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new" / "model")
    Path(link).replace(repository / "model")
    wait_until(lambda: server.infer("model", X) == (200, {"OUTPUT0": [2.5, 3.5]}))
