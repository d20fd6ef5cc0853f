# SPDX-License-Identifier: Apache-2.0
"""The repository API over HTTP: index, load, unload, overrides, who may ask, and in which mode."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.server.control_models import pids
from tests.server.harness import IDENTITY, MODEL_HEAD, Server, write_model

X = {"INPUT0": ("FP32", [2], [1.5, 2.5])}
EXPLICIT = ("--model-control-mode", "explicit")
REFUSED = "explicit model load / unload is not allowed if polling is enabled"
CONFIG = {
    "backend": "python",
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}
ADD = MODEL_HEAD + IDENTITY.replace("as_numpy()", "as_numpy() + {}")


def control(server: Server, model: str, action: str, **parameters: object) -> tuple[int, object]:
    """Load or unload; returns the status, and the error's text or b""."""
    path = f"/v2/repository/models/{model}/{action}"
    body = {"parameters": parameters} if parameters else None
    status, answer = server.call("POST", path, body)
    return status, answer["error"] if status != 200 else answer


def index(server: Server, **body: object) -> dict[str, dict[str, str]]:
    """Return the lines of the index by name and version."""
    status, lines = server.call("POST", "/v2/repository/index", body or None)
    assert status == 200, lines
    return {"/".join(filter(None, (x.pop("name"), x.get("version")))): x for x in lines}


def file(text: str) -> str:
    """Return a file's content as the API has it."""
    return base64.b64encode(text.encode()).decode()


def private_folders() -> list[Path]:
    """Return what servers keep of models that came with requests."""
    return list(Path(tempfile.gettempdir()).glob("actorserve-models-*"))


@pytest.fixture
def own_tmp(tmp_path, monkeypatch):
    """Give this test and its servers a temporary directory of their own."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    tempfile.tempdir = None


def test_models_are_loaded_and_unloaded(start_server, repository):
    """What is not loaded has only a name; an unloaded one says so; answers have no body."""
    write_model(repository, "a")
    write_model(repository, "b")
    server = start_server(repository, *EXPLICIT, "--load-model", "a")
    ready = {"version": "1", "state": "READY"}
    assert index(server) == {"a/1": ready, "b": {}}
    assert control(server, "b", "load") == (200, b"")
    assert index(server) == {"a/1": ready, "b/1": ready}
    assert server.infer("b", X)[0] == 200
    assert control(server, "a", "unload", unload_dependents=True) == (200, b"")
    wait_until(lambda: index(server)["a/1"]["state"] == "UNAVAILABLE")
    assert index(server)["a/1"]["reason"] == "unloaded"
    assert index(server, ready=True) == {"b/1": ready}
    assert server.infer("a", X)[0] in (404, 503)
    assert server.call("GET", "/v2/health/ready")[0] == 200
    assert control(server, "nobody", "unload") == (200, b"")
    assert server.stop() == 0


def test_what_is_wrong_with_a_request_is_said(start_server, repository):
    """Statuses and texts; nothing is loaded by any of them."""
    write_model(repository, "a")
    server = start_server(repository, *EXPLICIT)
    for name in ("nobody", "a%20b"):
        status, text = control(server, name, "load")
        assert (status, text) == (
            404,
            f"failed to load '{name.replace('%20', ' ')}', failed to poll from model repository",
        )
    for name in ("..", "%2e%2e", "a%2fb", "a%00", "x" * 300):
        assert control(server, name, "load")[0] == 400
    unsupported = "'repository_name' specification is not supported"
    for path in ("index", "models/a/load", "models/a/unload"):
        answer = server.call("POST", f"/v2/repository/mine/{path}")
        assert answer == (501, {"error": unsupported})
        assert server.call("GET", f"/v2/repository/{path}")[0] == 405
    answer = server.call("POST", "/v2/repository/index", {"ready": "yes"})
    assert answer == (400, {"error": "Invalid value for 'ready': expected a boolean"})
    for parameters, text in (
        ({"x": "y"}, "Unrecognized load parameter 'x' with type 'STRING'"),
        ({"x": True}, "Unrecognized load parameter 'x' with type 'BOOL'"),
        ({"config": 3}, "Unrecognized load parameter 'config' with type 'INT'"),
        ({"config": "{"}, "Invalid config override: "),
        ({"config": '{"max_batch_size": "many"}'}, "Invalid config override: "),
        ({"file:1/model.py": file("x")}, "files need the model's configuration with them"),
        ({"config": "{}", "file:1/model.py": "?"}, "the parameter 'file:1/model.py' is no base64"),
        ({"config": "{}", "file:/etc/x": file("x")}, "expected a relative path"),
        ({"config": "{}", "file:a/../b": file("x")}, "expected a relative path"),
        ({"config": "{}", "file:a": file("x"), "file:a/b": file("x")}, "a file and a folder"),
    ):
        status, said = control(server, "a", "load", **parameters)
        assert status == 400
        assert text in str(said)
    for body in (b"{", b"[]", b'{"parameters": 3}', b"[" * 100_000, b"\xff"):
        answer = server.request("POST", "/v2/repository/models/a/load", body)
        assert (answer.status, bool(answer.error)) == (400, True)
    status, said = control(server, "a", "unload", unload_dependents=3)
    assert (status, said) == (400, "Invalid value for 'unload_dependents': expected a boolean")
    assert index(server) == {"a": {}}


def test_bodies_are_bounded(start_server, repository):
    """As those of inferences are."""
    write_model(repository, "a")
    server = start_server(repository, *EXPLICIT, "--http-max-input-size", "100000")
    big = file("x" * 200_000)
    body = json.dumps({"parameters": {"config": "{}", "file:x": big}}).encode()
    assert server.request("POST", "/v2/repository/models/a/load", body).status == 413
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(
            b"POST /v2/repository/models/a/load HTTP/1.1\r\nhost: localhost\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        reply = b""
        try:
            for _ in range(10):
                connection.sendall(b"%x\r\n%s\r\n" % (65536, b" " * 65536))
            while part := connection.recv(65536):
                reply += part
        except OSError:
            pass
        assert reply == b"" or b" 413 " in reply
    assert control(server, "a", "load") == (200, b"")


def test_only_the_explicit_mode_loads_by_request(start_server, repository):
    """503 with the documented text; the index can always be read."""
    write_model(repository, "a")
    for mode in ("none", "poll"):
        server = start_server(repository, "--model-control-mode", mode)
        for action in ("load", "unload"):
            status, text = control(server, "a", action)
            assert status == 503
            assert text.startswith(REFUSED)
            assert f"--model-control-mode is {mode}" in text
        assert index(server) == {"a/1": {"version": "1", "state": "READY"}}
        assert server.stop() == 0


def test_others_need_the_token(start_server, repository, tmp_path):
    """What runs code is for the server's operator: here, by a proxy that speaks for a stranger."""
    write_model(repository, "a")
    token = tmp_path / "token"
    token.write_text("secret\n")
    server = start_server(repository, *EXPLICIT, "--admin-token-file", str(token))
    forwarded = {"X-Forwarded-For": "10.1.2.3"}
    for path in ("index", "models/a/load", "models/a/unload"):
        assert server.call("POST", f"/v2/repository/{path}", None, forwarded)[0] == 403
        wrong = {"Authorization": "Bearer wrong"}
        assert server.call("POST", f"/v2/repository/{path}", None, wrong)[0] == 403
        right = {**forwarded, "Authorization": "Bearer secret"}
        assert server.call("POST", f"/v2/repository/{path}", None, right)[0] == 200


def test_a_web_page_is_no_operator(start_server, repository):
    """A page that is open on the server's machine must not have files of its own executed."""
    write_model(repository, "a")
    server = start_server(repository, *EXPLICIT)
    code = base64.b64encode(b"raise SystemExit").decode()
    evil = json.dumps({"parameters": {"config": "{}", "file:1/model.py": code}}).encode()
    pages = (
        {"Origin": "http://evil.example", "Content-Type": "text/plain"},
        {"Host": f"evil.example:{server.port}"},
        {"Sec-Fetch-Site": "cross-site"},
    )
    for headers in pages:
        status, _ = server.call("POST", "/v2/repository/models/x/load", evil, headers)
        assert status == 403
        assert server.call("GET", "/v2/actorserve/status", None, headers)[0] == 403
    assert set(index(server)) == {"a"}


def test_a_load_that_fails_says_why(start_server, repository):
    """With version and reason; in the index, too. A later one makes it good."""
    write_model(repository, "a", "raise ValueError('so it is')")
    write_model(repository, "c", config="}")
    server = start_server(repository, *EXPLICIT)
    status, text = control(server, "a", "load")
    assert status == 400
    assert str(text).startswith(
        "load failed for model 'a': version 1 is at UNAVAILABLE state: Internal: ValueError: so"
    )
    line = index(server)["a/1"]
    assert line["state"] == "UNAVAILABLE"
    assert "so it is" in line["reason"]
    status, text = control(server, "c", "load")
    assert status == 400
    assert str(text).startswith("failed to load 'c', failed to poll from model repository: ")
    assert index(server)["c"]["state"] == "UNAVAILABLE"
    (repository / "d").mkdir()
    (repository / "d" / "config.pbtxt").write_text('backend: "python"')
    status, text = control(server, "d", "load")
    assert (status, str(text).split(":")[0]) == (
        500,
        "failed to load 'd', no version is available",
    )
    write_model(repository, "a")
    assert control(server, "a", "load") == (200, b"")
    assert index(server)["a/1"] == {"version": "1", "state": "READY"}
    write_model(repository, "a", "raise ValueError('again')")
    assert control(server, "a", "load")[0] == 400
    line = index(server)["a/1"]
    assert line["state"] == "READY", "what served serves on"
    assert "again" in line["reason"]
    assert server.infer("a", X)[0] == 200
    server.wait_log("failed to load 'a': ValueError: again")


def test_a_failed_load_is_tried_again_as_often_as_is_said(start_server, repository, tmp_path):
    """`--model-load-retry-count`; what is written down in the model counts."""
    count = tmp_path / "count"
    body = f"""
with open({str(count)!r}, "a") as file:
    file.write("x")
if os.path.getsize({str(count)!r}) < 4:
    raise ValueError("not yet")
"""
    write_model(repository, "a", body + IDENTITY)
    server = start_server(repository, *EXPLICIT, "--model-load-retry-count", "3")
    assert control(server, "a", "load") == (200, b"")
    assert server.infer("a", X)[0] == 200
    assert count.read_text() == "xxxxx"  # three that failed, one for the configuration, one more


def test_a_model_in_two_repositories_is_loaded_from_neither(start_server, tmp_path):
    """The index says why."""
    for name in ("one", "two"):
        write_model(tmp_path / name, "both")
    write_model(tmp_path / "two", "single")
    server = start_server(tmp_path / "one", tmp_path / "two", *EXPLICIT)
    reason = "model appears in two or more repositories"
    assert index(server)["both"] == {"state": "UNAVAILABLE", "reason": reason}
    status, text = control(server, "both", "load")
    assert (status, reason in str(text)) == (400, True)
    assert control(server, "single", "load") == (200, b"")
    shutil.rmtree(tmp_path / "one" / "both")
    assert control(server, "both", "load") == (200, b"")


def test_configurations_and_files_come_with_the_request(start_server, repository, own_tmp):
    """A configuration alone, or a whole directory, also of a model that is in no repository."""
    write_model(repository, "a")
    server = start_server(repository, *EXPLICIT, "--load-model", "a")
    renamed = {**CONFIG, "output": [{**CONFIG["output"][0], "dims": [2]}]}  # type: ignore[index]
    assert control(server, "a", "load", config=json.dumps(renamed)) == (200, b"")
    assert server.call("GET", "/v2/models/a")[1]["outputs"][0]["shape"] == [2]
    config = json.dumps(CONFIG)
    files = {"file:1/model.py": file(ADD.format(1)), "file:3/model.py": file(ADD.format(3))}
    for name in ("a", "new"):
        assert control(server, name, "load", config=config, **files) == (200, b"")
        assert server.infer(name, X) == (200, {"OUTPUT0": [4.5, 5.5]})
    assert index(server)["new/3"]["state"] == "READY"
    assert len([each for root in private_folders() for each in root.iterdir()]) == 2
    assert control(server, "new", "load", config=config, **{"file:1/x.py": file("x")})[0] == 400
    assert server.infer("new", X)[0] == 200, "what served serves on"
    assert len([each for root in private_folders() for each in root.iterdir()]) == 2
    assert control(server, "a", "load") == (200, b"")
    assert server.infer("a", X) == (200, {"OUTPUT0": [1.5, 2.5]})
    wait_until(lambda: len([x for root in private_folders() for x in root.iterdir()]) == 1)
    assert control(server, "new", "unload") == (200, b"")
    wait_until(lambda: not [x for root in private_folders() for x in root.iterdir()])
    assert control(server, "new", "load")[0] == 404, "it was in no repository"
    assert control(server, "new", "load", config=config, **files) == (200, b"")
    assert server.stop() == 0
    assert private_folders() == []


def test_what_a_killed_server_has_left_is_removed_by_the_next(start_server, repository, own_tmp):
    """And nothing of a server that lives."""
    write_model(repository, "a")
    body = {"config": json.dumps(CONFIG), "file:1/model.py": file(ADD.format(1))}
    servers = [start_server(repository, *EXPLICIT) for _ in range(2)]
    for server in servers:
        assert control(server, "new", "load", **body) == (200, b"")
    assert len(private_folders()) == 2
    servers[0].process.kill()
    servers[0].process.wait()
    third = start_server(repository, *EXPLICIT)
    wait_until(lambda: len(private_folders()) == 1)
    before = pids(servers[1], "new")
    assert control(servers[1], "new", "load")[0] != 200
    assert pids(servers[1], "new") == before
    assert servers[1].infer("new", X) == (200, {"OUTPUT0": [2.5, 3.5]})
    assert [third.stop(), servers[1].stop()] == [0, 0]
    assert private_folders() == []


def test_a_storm_of_loads_ends_with_one_model(start_server, repository):
    """Fifty loads of one model at once, with loads of another and unloads of a third meanwhile."""
    for name in ("a", "b", "c"):
        write_model(repository, name)
    server = start_server(repository, *EXPLICIT, "--load-model", "c")
    work = [("a", "load")] * 50 + [("b", "load")] * 5 + [("c", "unload"), ("c", "load")] * 3
    answers: list[tuple[int, object]] = []
    threads = [
        threading.Thread(target=lambda each=each: answers.append(control(server, *each)))
        for each in work
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert len(answers) == len(work)
    unloaded = "it was unloaded before it had loaded"
    assert all(status == 200 or unloaded in str(text) for status, text in answers), answers
    assert control(server, "c", "load") == (200, b"")
    for name in ("a", "b", "c"):
        assert len(pids(server, name)) == 1
        assert server.infer(name, X)[0] == 200
    wait_until(lambda: len(server.stubs()) == 3, what="old stubs end")


def test_an_unload_ends_a_load_in_progress(start_server, repository, tmp_path):
    """Who waits for it is told; nothing is left of it."""
    body = """
class TritonPythonModel:
    def initialize(self, args):
        threading.Event().wait()
    def execute(self, requests):
        pass
"""
    write_model(repository, "slow", body)
    server = start_server(repository, *EXPLICIT)
    answers: list[tuple[int, object]] = []
    loads = [
        threading.Thread(target=lambda: answers.append(control(server, "slow", "load")))
        for _ in range(3)
    ]
    for thread in loads:
        thread.start()
    wait_until(lambda: index(server).get("slow/1", {}).get("state") == "LOADING")
    assert control(server, "slow", "unload") == (200, b"")
    for thread in loads:
        thread.join(20)
    said = "failed to load 'slow': it was unloaded before it had loaded"
    assert answers == [(503, said)] * 3
    wait_until(lambda: not server.stubs())
    assert server.stop() == 0


def test_a_stop_ends_loads_in_progress(start_server, repository):
    """In little time, and nothing is started any more."""
    body = "threading.Event().wait()\n"
    write_model(repository, "slow", body)
    server = start_server(repository, *EXPLICIT)
    answers: list[tuple[int, object]] = []

    def load() -> None:
        answers.append(control(server, "slow", "load"))

    thread = threading.Thread(target=load)
    thread.start()
    wait_until(lambda: index(server).get("slow", {}).get("state") == "LOADING")
    assert server.stop() == 0
    thread.join(10)
    assert answers[0][0] == 503
