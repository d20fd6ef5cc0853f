# SPDX-License-Identifier: Apache-2.0
"""What an operator types: check, status, new."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parents[1] / "cases" / "repository"
EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command and return what it printed."""
    command = [sys.executable, "-m", "actorserve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_check_says_what_would_load():
    """Every example would; nothing of their code runs."""
    done = run("check", str(EXAMPLES))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["MODEL", "VERSIONS", "WOULD", "LOAD"]
    assert "add_sub       1         yes" in done.stdout


def test_check_says_what_would_not_load_and_why(tmp_path: Path):
    """A broken configuration is shown with its place, a broken file with its line."""
    (tmp_path / "bad_config" / "1").mkdir(parents=True)
    (tmp_path / "bad_config" / "config.pbtxt").write_text('backend: "python"\nmax_batch: 3\n')
    (tmp_path / "bad_file" / "1").mkdir(parents=True)
    (tmp_path / "bad_file" / "1" / "model.py").write_text("class TritonPythonModel\n")
    done = run("check", str(tmp_path))
    assert done.returncode == 1
    assert "config.pbtxt:2:1" in done.stdout
    assert "SyntaxError" in done.stdout and "line 1" in done.stdout


def test_a_dry_run_initializes_every_model():
    """What only running code shows is found too."""
    done = run("check", "--dry-run", str(CASES))
    assert done.returncode == 1
    for name in ("init_raise", "import_error", "no_class", "ctor_raise", "init_sysexit"):
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert row.split()[-1] == "no", row
    assert "module_that_does_not_exist" in done.stdout


def test_a_missing_repository_is_one_line():
    """Exit code 2, no stack."""
    done = run("check", "/nowhere/at/all")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "/nowhere/at/all" in done.stderr


def test_new_writes_a_model_that_works(tmp_path: Path, start_server):
    """The template loads and answers; a folder that is there is never overwritten."""
    folder = tmp_path / "repo" / "my_model"
    done = run("new", str(folder))
    assert done.returncode == 0, done.stderr
    again = run("new", str(folder))
    assert again.returncode == 2 and "is there already" in again.stderr
    server = start_server(folder.parent)
    assert server.infer("my_model", {"INPUT": ("FP32", [1, 2], [1, 2])}) == (
        200,
        {"OUTPUT": [2.0, 4.0]},
    )


def test_status_shows_stubs_and_counts(start_server, tmp_path: Path):
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
    assert gone.returncode == 1 and "no server answers" in gone.stderr


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
