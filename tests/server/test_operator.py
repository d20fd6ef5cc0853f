# SPDX-License-Identifier: Apache-2.0
"""What an operator types: status and new; as in a pipe and as on a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import wait_until
from tests.server.harness import EXAMPLES, write_model
from tests.server.terminal import CTRL_C, Terminal

COMMAND = (sys.executable, "-m", "actorserve")
RED, GREEN = "\x1b[31m", "\x1b[32m"
OFFICIAL_CLIENT = """
import sys
import numpy as np
try:
    from tritonclient import http
except ModuleNotFoundError:
    sys.exit(print("skipped"))
given = http.InferInput("INPUT", [2, 3], "FP32")
given.set_data_from_numpy(np.ones((2, 3), np.float32))
with http.InferenceServerClient(sys.argv[1]) as client:
    print(client.infer("my_model", [given]).as_numpy("OUTPUT").tolist())
"""


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command and return what it printed."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **env},
    )


@pytest.fixture(autouse=True)
def own_crash_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Keep what dead stubs said last away from the user's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


# --- new -----------------------------------------------------------------------------------------


def test_new_writes_a_model_that_works(tmp_path: Path, start_server):
    """It loads and answers, also the official client; a folder that is there is never touched."""
    folder = tmp_path / "my repo" / "my_model"
    done = run("new", str(folder))
    assert done.returncode == 0, done.stderr
    assert f"actorserve check '{folder.parent}' --dry-run" in done.stdout
    before = {path: path.read_bytes() for path in folder.rglob("*.p*")}
    again = run("new", str(folder))
    assert again.returncode == 2 and "is there already" in again.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*.p*")} == before
    checked = run("check", "--dry-run", str(folder.parent))
    assert checked.returncode == 0, checked.stdout
    server = start_server(folder.parent)
    assert server.infer("my_model", {"INPUT": ("FP32", [1, 2], [1, 2])}) == (
        200,
        {"OUTPUT": [2.0, 4.0]},
    )
    command = [sys.executable, "-c", OFFICIAL_CLIENT, server.address]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert asked.stdout.strip() in ("[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]", "skipped"), asked.stderr
    body = {"INPUT": ("FP32", np.full((1, 1), np.inf, np.float32))}
    assert server.infer_binary("my_model", body).error == "INPUT must be finite"


def test_the_sample_that_new_suggests_works(tmp_path: Path):
    """What is commented out in the template needs only its hashes taken away."""
    folder = tmp_path / "my_model"
    run("new", str(folder))
    config = folder / "config.pbtxt"
    text = config.read_text()
    for block in re.findall(r"^# model_warmup.*?^# \} \]$|^# parameters.*?$", text, re.M | re.S):
        text = text.replace(block, re.sub("^# ", "", block, flags=re.M))
    assert "\nmodel_warmup" in text and "\nparameters" in text
    config.write_text(text)
    done = run("check", "--dry-run", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert re.search("  ok  +warm-up sample 'two rows': ", done.stdout)


@pytest.mark.parametrize("name", ["my model", "a/..", "-x", ".hidden", "a;b", "ü", "x" * 201])
def test_new_refuses_bad_names(tmp_path: Path, name: str):
    """One line with the rule; nothing is written."""
    done = run("new", "--", str(tmp_path / name) if name != "a/.." else f"{tmp_path}/a/..")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "is no name for a model: expected letters, digits, '_', '-' and '.'" in done.stderr
    assert list(tmp_path.iterdir()) == []


# --- status --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(start_shared, tmp_path_factory: pytest.TempPathFactory):
    """Return a server with a model that failed and one whose stub was killed once."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "model")
    write_model(repository, "broken", "raise ValueError('no weights')\n")
    server = start_shared(repository, flags=["--exit-on-error=false"])
    pid = server.stubs()["model_0"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.call("GET", "/v2/models/model/ready")[0] == 200 and restarts(server))
    return server


def restarts(server) -> int:
    """Return how often the model's stub was started again."""
    status, document = server.call("GET", "/v2/actorserve/status")
    assert status == 200
    models = {model["name"]: model for model in document["models"]}
    instance = models["model"]["versions"][0]["instances"][0]
    return instance["restarts"] if instance["state"] == "RUNNING" else 0


def test_status_says_how_the_last_process_ended(killed):
    """The reason of a restart outlives it, with its age; a model that failed has its own."""
    done = run("status", "--url", killed.address)
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("model_0 v1"))
    assert re.search(r"RUNNING +\d+ +1 .* died \d+ s ago: killed by SIGKILL", row), row
    assert re.search(r"^broken +UNAVAILABLE +- +ValueError: no weights$", done.stdout, re.M)
    document = json.loads(run("status", "--json", "--url", killed.address).stdout)
    models = {model["name"]: model for model in document["models"]}
    instance = models["model"]["versions"][0]["instances"][0]
    assert instance["last_exit"].startswith("killed by SIGKILL")
    assert instance["last_exit_age_s"] > 0


def test_status_has_colours_on_a_terminal_only(killed):
    """Green for what runs, red for what failed; the variables beat what it is."""
    arguments = ("status", "--url", killed.address)
    plain = {"NO_COLOR": "", "FORCE_COLOR": "", "TERM": "xterm"}
    assert "\x1b" not in run(*arguments, **plain).stdout
    forced = run(*arguments, **{**plain, "FORCE_COLOR": "1"}).stdout
    assert f"{GREEN}RUNNING" in forced and f"{RED}UNAVAILABLE" in forced
    assert "\x1b" not in run(*arguments, **{**plain, "FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    for env, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        with Terminal([*COMMAND, *arguments], env=env) as terminal:
            code, text = terminal.read_all()
        assert code == 0
        assert (f"{GREEN}RUNNING" in text, f"{RED}UNAVAILABLE" in text) == (is_coloured,) * 2
        assert ("\x1b" in text) is is_coloured


def test_reasons_stand_below_where_they_have_no_room(killed):
    """A narrow terminal shows whole rows, and no line is broken."""
    with Terminal([*COMMAND, "status", "--url", killed.address], columns=80) as terminal:
        lines = terminal.read_all()[1].replace("\x1b[0m", "").splitlines()
    assert "    ValueError: no weights" in lines
    assert any(re.match(r"    died \d+ s ago: killed by SIGKILL", line) for line in lines)


def test_watch_redraws_in_place(killed):
    """The screen is cleared once; then each draw begins at its top. Ctrl-C is its end: 0."""
    command = [*COMMAND, "status", "--url", killed.address, "--watch", "0.05"]
    with Terminal(command) as terminal:
        first = terminal.read_until("\x1b[J")
        assert first.startswith("\x1b[2J\x1b[H")
        for _ in range(2):
            again = terminal.read_until("\x1b[J")
            assert again.startswith("\x1b[H") and "\x1b[2J" not in again
        terminal.type(CTRL_C)
        code, rest = terminal.read_all()
    assert code == 0
    assert rest.endswith("^C\r\n") and "Traceback" not in rest


def test_watch_of_a_low_terminal_is_cut(killed):
    """What is longer than the screen would scroll it."""
    command = [*COMMAND, "status", "--url", killed.address, "--watch"]
    with Terminal(command, rows=6, columns=60) as terminal:
        drawn = terminal.read_until("\x1b[J")
        terminal.type(CTRL_C)
        terminal.read_all()
    assert drawn.count("\n") <= 5
    assert "more lines" in drawn


def test_watch_appends_in_a_pipe(killed):
    """Plain tables one after the other, and SIGINT ends it as on a terminal."""
    command = [*COMMAND, "status", "--url", killed.address, "--watch", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        heads = 0
        for line in process.stdout:
            assert "\x1b" not in line
            heads += line.startswith("INSTANCE ")
            if heads == 3:
                break
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 0


def test_watch_outlives_the_server(start_server, repository: Path):
    """Somebody who looks at a restart sees that nobody answers, not the end of the watch."""
    write_model(repository, "model")
    server = start_server(repository)
    command = [*COMMAND, "status", "--url", server.address, "--watch", "0.1"]
    with Terminal(command) as terminal:
        terminal.read_until("RUNNING")
        server.stop()
        terminal.read_until("no server answers at")
        assert terminal.process.poll() is None
        terminal.type(CTRL_C)
        assert terminal.read_all()[0] == 0


def test_status_shows_stubs_and_counts(start_server):
    """A table for people, the document for programs, an error where nobody answers."""
    server = start_server(EXAMPLES)
    server.infer("async_double", {"INPUT": ("INT64", [1], [21])})
    done = run("status", "--url", server.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ready; shared memory: none needed yet")
    row = next(line for line in done.stdout.splitlines() if line.startswith("async_double_0"))
    assert row.split()[2] == "RUNNING"
    document = json.loads(run("status", "--json", "--url", server.address).stdout)
    assert {model["name"] for model in document["models"]} >= {"add_sub", "tokenizer"}
    server.stop()
    gone = run("status", "--url", server.address)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert gone.stderr == (
        f"actorserve status: no server answers at {server.address}: Connection refused\n"
    )
    watched = run("status", "--watch", "--url", server.address)
    assert (watched.returncode, watched.stderr) == (1, gone.stderr)


def test_status_is_for_operators_only(start_server, tmp_path: Path):
    """Who speaks for somebody else needs the token."""
    token = tmp_path / "token"
    token.write_text("sesame\n")
    server = start_server(EXAMPLES, "--admin-token-file", str(token))
    path, other = "/v2/actorserve/status", {"X-Forwarded-For": "192.0.2.1"}
    assert server.call("GET", path)[0] == 200
    status, answer = server.call("GET", path, headers=other)
    assert status == 403 and "--admin-token-file" in answer["error"]
    assert server.call("GET", path, headers={**other, "Authorization": "Bearer no"})[0] == 403
    assert server.call("GET", path, headers={**other, "Authorization": "Bearer sesame"})[0] == 200


# --- what start shows ----------------------------------------------------------------------------


def test_start_has_colours_on_a_terminal_only(repository: Path, killed):
    """Its table of models and its greeting."""
    assert "\x1b" not in killed.log()
    write_model(repository, "model")
    with Terminal(
        [*COMMAND, "start", str(repository), "--http-port=0", "--metrics-port=0"]
    ) as terminal:
        assert f"{GREEN}READY\x1b[0m" in terminal.read_until("INSTANCES") + terminal.read_until(
            "1/1"
        )
        terminal.read_until(f"{GREEN}Ready:\x1b[0m http://127.0.0.1:")
        terminal.type(CTRL_C)
        code, _ = terminal.read_all()
    assert code == 0
