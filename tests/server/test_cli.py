# SPDX-License-Identifier: Apache-2.0
"""The command as people type it: options, variables, mistakes, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import actorserve
from actorserve import Supervisor, cli
from actorserve.config import OPTIONS, Settings
from actorserve.frontend.arguments import IGNORED_FLAGS, make_parser
from tests.server.harness import EXAMPLES, IDENTITY_CONFIG, write_model

COMMANDS = ("start", "check", "status", "health", "chat", "new", "completion")
INPUT = {"INPUT0": ("FP32", [1], [5])}


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "actorserve", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=40,
        env={**os.environ, **env},
    )


def one_line(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the one line on stderr of a command that ended with `code` and said nothing else."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.rstrip("\n")


@pytest.fixture
def model(repository: Path) -> Path:
    """Return a repository with one model."""
    write_model(repository, "model")
    return repository


# --- the command itself --------------------------------------------------------------------------


def test_version():
    """Name and version on stdout."""
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"actorserve {actorserve.__version__}\n")


def test_the_installed_command_is_the_module():
    """`actorserve` and `python -m actorserve` are one."""
    script = Path(sys.executable).with_name("actorserve")
    if not script.exists():
        pytest.skip("actorserve is not installed as a command here")
    done = subprocess.run([script, "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"actorserve {actorserve.__version__}\n"


def test_no_command_shows_the_help():
    """And is wrong usage."""
    done = run()
    assert done.returncode == 2
    assert "    start        serve a model repository\n" in done.stdout
    for command in COMMANDS:
        assert re.search(rf"^    {command} +[a-z]", done.stdout, re.MULTILINE), command


def test_help_lists_every_option_with_its_default():
    """Also those that say the opposite of what they set; not those without meaning here."""
    done = run("start", "--help")
    assert done.returncode == 0
    text = re.sub(r"\s+", " ", done.stdout)
    for option in OPTIONS:
        assert option.flag in text
    assert "auto_complete_config (default: false)" in text
    assert "(default: 8000)" in text
    assert "(default: 0:30)" in text
    assert "--grpc-port" not in text


def test_options_are_grouped():
    """Under the headings of the table that they come from, each once."""
    lines = run("start", "--help").stdout.splitlines()
    for group in dict.fromkeys(option.group for option in OPTIONS):
        assert lines.count(f"{group}:") == 1
        begin = lines.index(f"{group}:")
        part = lines[begin : lines.index("", begin)]
        for option in OPTIONS:
            is_listed = any(re.match(rf"  {option.flag}[ ,]", line) for line in part)
            assert is_listed == (option.group == group), option.flag


@pytest.mark.parametrize(
    ("command", "columns"),
    [*[(command, "100") for command in COMMANDS], ("start", "40"), ("check", "250")],
)
def test_help_teaches(command, columns):
    """A paragraph that says what it is for, and real commands; whatever the terminal."""
    done = run(command, "--help", COLUMNS=columns)
    assert (done.returncode, done.stderr) == (0, "")
    usage, paragraph, *_, examples = done.stdout.split("\n\n")
    assert usage.startswith(f"usage: actorserve {command} ")
    assert len(paragraph) > 60
    assert max(map(len, paragraph.splitlines())) <= min(int(columns), 100)
    assert examples.startswith("examples:\n  ")
    assert 2 <= examples.strip().count("\n") <= 3
    assert f"actorserve {command}" in examples


def test_examples_of_the_help_parse(tmp_path, monkeypatch):
    """Each is a command line that this version understands."""
    (tmp_path / "repo").mkdir()
    monkeypatch.chdir(tmp_path)
    parser = make_parser()
    count = 0
    for command in COMMANDS:
        text = parser.get_default("commands").choices[command].epilog
        for found in re.findall(r"actorserve ((?:(?! 2?>)[^'#)\n])+)", text):
            words = found.split()
            assert parser.parse_known_args(words)[1] == [], found
            count += 1
    assert count >= 15


def test_help_has_no_colours_in_a_pipe():
    """Those of newer Pythons' argparse neither."""
    assert "\x1b" not in run("start", "--help", NO_COLOR="", FORCE_COLOR="").stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("start", "actorserve start: name a model repository, as in 'actorserve start repo/'"),
        (
            "start repo --no-such-flag",
            "actorserve start: unknown argument: --no-such-flag (try 'actorserve start --help')",
        ),
        (
            "start repo --http-prot=1",
            "actorserve start: unknown argument: --http-prot=1; did you mean --http-port? "
            "(try 'actorserve start --help')",
        ),
        (
            "status --wacth",
            "actorserve status: unknown argument: --wacth; did you mean --watch? (try",
        ),
        ("status --wat 1", "actorserve status: unknown argument: --wat; did you mean --watch?"),
        (
            "strat repo",
            "actorserve: unknown command: strat; did you mean start? (try 'actorserve --help')",
        ),
        ("zzz", "actorserve: unknown command: zzz (try 'actorserve --help')"),
        ("/usr", "actorserve: unknown command: /usr; did you mean 'actorserve start /usr'?"),
        ("completion tcsh", "actorserve completion: argument shell: invalid choice: 'tcsh'"),
        ("status --watch=0", "actorserve status: argument --watch: expected seconds, more than 0"),
        (
            "start repo --http-port abc",
            "actorserve start: --http-port: expected a whole number from 0 to 65535, got 'abc'",
        ),
        (
            "start repo --exit-timeout-secs=never",
            "actorserve start: --exit-timeout-secs: expected seconds, 0 or more, got 'never'",
        ),
        (
            "start repo --model-control-mode=all",
            "actorserve start: --model-control-mode: expected one of none, explicit, poll, got",
        ),
        (
            "start repo --load-model=a",
            "actorserve start: --load-model needs --model-control-mode=explicit: else all models",
        ),
        ("health --url=ftp://x", "actorserve health: --url 'ftp://x': expected something like"),
        ("health --url=http://h:99999", "actorserve health: --url 'http://h:99999': expected"),
        ("health --url=http://", "actorserve health: --url 'http://': expected something like"),
        ("health --timeout-s=0", "actorserve health: argument --timeout-s: expected seconds"),
        ("status --url=http://h:99999", "actorserve status: --url 'http://h:99999': expected"),
        ("check /nowhere", "actorserve check: model repository '/nowhere' is not a directory"),
    ],
)
def test_wrong_usage_is_one_line(arguments, line, capfd):
    """Exit code 2, and what was expected; as `main` of the command, in this process."""
    try:
        code = cli.main(arguments.split())
    except SystemExit as end:
        code = int(str(end.code))
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert err.startswith(line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("repo", "--no-such-flag"), "actorserve start: unknown argument: --no-such-flag (try"),
        (
            ("/nowhere/at/all",),
            "actorserve start: model repository '/nowhere/at/all' is not a directory",
        ),
        (
            ("repo", "--http-port=0", "--log-file=/nowhere/log"),
            "actorserve start: --log-file '/nowhere/log': No such file or directory",
        ),
        (
            ("repo", "--http-port=0", "--ready-file=/nowhere/ready"),
            "actorserve start: --ready-file '/nowhere/ready': its folder is missing or not",
        ),
        (
            (
                str(EXAMPLES),
                "--http-port=0",
                "--metrics-port=0",
                "--backend-config=python,shm-size=1",
            ),
            "actorserve start: --backend-config=python,shm-size=1: unknown key 'shm-size', "
            "expected one of shm-default-byte-size, shm-growth-byte-size",
        ),
        (
            ("repo", "--http-port=0", "--host=no.such.host.invalid"),
            "actorserve start: cannot listen on no.such.host.invalid:0: ",
        ),
    ],
)
def test_a_server_that_cannot_be_is_one_line(arguments, line):
    """Exit code 2 before any model is looked at."""
    assert one_line(run("start", *arguments), 2).startswith(line)


def test_a_port_in_use_is_one_line():
    """Exit code 2 before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(run("start", str(EXAMPLES), f"--http-port={port}"), 2)
        assert (
            line == f"actorserve start: cannot listen on 127.0.0.1:{port}: Address already in use"
        )


def test_whoever_reads_may_stop():
    """A pipe that is closed early, as by `head`, is no error to speak of."""
    command = f"{sys.executable} -m actorserve completion bash | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


# --- options and variables -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def configured(start_shared, tmp_path_factory):
    """Return a server with many options, and its soft limit of open files as it came to it."""
    root = tmp_path_factory.mktemp("configured")
    write_model(root / "first", "model")
    write_model(root / "second", "other")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        return start_shared(
            flags=[
                "--id=from the flag",
                "--grpc-port=8001",
                "--grpc-port",
                "8001",
                "--allow-gpu-metrics=false",
                "--cache-config=local,size=1048576",
                "--strict-readiness",
            ],
            env={
                "ACTORSERVE_MODEL_REPOSITORY": f"{root / 'first'},{root / 'second'}",
                "ACTORSERVE_ID": "from the variable",
                "ACTORSERVE_HTTP_MAX_INPUT_SIZE": "1000",
                "ACTORSERVE_HTTP_PORT": "not a number, and never read",
                "ACTORSERVE_LOG_FORMAT": "",
                "ACTORSERVE_BACKEND_CONFIG": "python,shm-default-byte-size=2097152 "
                "python,stub-timeout-seconds=5",
            },
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_variables_set_options_and_flags_beat_them(configured):
    """ACTORSERVE_ and the flag's name; lists have commas; an empty one counts as none."""
    assert configured.request("GET", "/v2").json["name"] == "from the flag"
    assert configured.request("POST", "/v2/models/model/infer", b"x" * 1001).status == 413
    assert configured.infer("model", INPUT)[0] == 200
    assert configured.infer("other", INPUT)[0] == 200
    assert (
        '"--backend-config=python,stub-timeout-seconds=5 is ignored: models have the parameters '
        'SPAWN_TIMEOUT_S and FINALIZE_TIMEOUT_S"' in configured.log()
    )


def test_a_wrong_variable_is_named(monkeypatch, capfd):
    """Not the flag that nobody gave."""
    monkeypatch.setenv("ACTORSERVE_EXIT_ON_ERROR", "perhaps")
    assert cli.main(["start", "repo"]) == 2
    assert capfd.readouterr().err == (
        "actorserve start: ACTORSERVE_EXIT_ON_ERROR: expected true or false, got 'perhaps'\n"
    )


def test_flags_of_the_real_server_are_warned_of_once(configured):
    """Those without meaning here are accepted, in every spelling."""
    lines = [line for line in configured.log().splitlines() if "has no meaning here" in line]
    assert [line.partition('"')[2].split()[0] for line in lines] == [
        "--grpc-port",
        "--allow-gpu-metrics",
        "--cache-config",
    ]
    assert all(line.startswith("W") for line in lines)


def test_the_limit_of_open_files_is_raised(configured):
    """A soft limit of 256 would do for a dozen stubs; the hard one is the administrator's."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = psutil.Process(configured.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert limits == (min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16, hard)


def test_health_of_a_ready_server(configured):
    """Exit code 0."""
    done = run("health", f"--url=http://{configured.address}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_known_flags_are_whole_names():
    """No name is cut in two, and none is one of our own."""
    assert all(re.fullmatch(r"[a-z]+\d?(-[a-z0-9]+)*", name) for name in IGNORED_FLAGS)
    assert {"grpc-root-cert", "trace-config", "response-cache-byte-size"} <= set(IGNORED_FLAGS)
    assert len(set(IGNORED_FLAGS)) == len(IGNORED_FLAGS)
    own = {flag[2:] for option in OPTIONS for flag in (option.flag, *option.aliases)}
    assert own.isdisjoint(IGNORED_FLAGS)


# --- models at start -----------------------------------------------------------------------------


def test_a_model_that_fails_ends_the_server(start_server, model):
    """--exit-on-error is true by default: exit code 1, with the reason."""
    write_model(model, "broken", "raise ValueError('no weights')\n")
    server = start_server(model, wait=False)
    assert server.wait() == 1
    log = server.log()
    assert "broken: ValueError: no weights" in log
    errors = [line for line in log.splitlines() if re.match(r"E\d{4} .*no weights", line)]
    assert len(errors) == 1, errors
    assert "failed to load 'broken': ValueError: no weights" in errors[0]
    assert '"exiting, since these models did not load: broken"' in log
    assert re.search(r"^model   1        READY        1/1$", log, re.MULTILINE)
    assert re.search(r"^broken  -        UNAVAILABLE  -$", log, re.MULTILINE)
    assert "Ready" not in log
    assert not server.ready_file.exists()


def test_explicit_mode_loads_what_is_named(start_server, model):
    """Others are not there, and do not count for readiness."""
    write_model(model, "second")
    write_model(model, "broken", "raise ValueError\n")
    flags = ["--model-control-mode=explicit", "--load-model=second", "--load-model=second"]
    server = start_server(model, flags=flags)
    assert server.call("GET", "/v2/health/ready")[0] == 200
    assert server.infer("second", INPUT)[0] == 200
    assert server.infer("model", INPUT)[0] == 404


@pytest.mark.parametrize(
    ("names", "expected", "missing"),
    [((), set(), []), (("*",), {"model", "second"}, []), (("nobody",), set(), ["nobody"])],
)
def test_explicit_mode(model, tmp_path, names, expected, missing):
    """None, all, and one that is not there; embedded, with the same settings."""
    write_model(model, "second")
    settings = Settings(
        model_control_mode="explicit", load_model=names, crash_dir=str(tmp_path / "crashes")
    )

    async def main() -> None:
        async with Supervisor(model, settings) as server:
            ready = {name for name in ("model", "second") if server.is_model_ready(name)}
            assert ready == expected
            assert list(server.failures) == missing
            assert server.is_ready() is not bool(missing)
            for name in missing:
                assert "failed to poll from model repository" in server.failures[name]

    asyncio.run(main())


# --- the ready file ------------------------------------------------------------------------------


def test_the_ready_file_is_written_whole_at_the_end(start_server, model, tmp_path):
    """One that an earlier server left is gone while this one loads; no part of it is left."""
    (tmp_path / "ready-0.json").write_text('{"stale": true}')
    slow = "class TritonPythonModel:\n    def initialize(self, args): sys.stdin.read()\n"
    body = slow.replace(
        "sys.stdin.read()", "[None for _ in iter(lambda: os.path.exists(GO), True)]"
    )
    go = tmp_path / "go"
    write_model(model, "slow", f"GO = {str(go)!r}\n{body}")
    server = start_server(model, wait=False)
    server.wait_listening()
    assert not server.ready_file.exists()
    go.touch()
    server.wait_ready()
    assert json.loads(server.ready_file.read_text()) == {
        "pid": server.process.pid,
        "http": {"host": "127.0.0.1", "port": server.port},
        "metrics": {"host": "127.0.0.1", "port": server.metrics_port},
    }
    assert [path.name for path in tmp_path.glob("ready*")] == ["ready-0.json"]


# --- health --------------------------------------------------------------------------------------


def test_health_is_an_exit_code(start_server, model):
    """0 and "ready", or 1 and why not; --live asks for less."""
    write_model(model, "broken", "raise ValueError\n", IDENTITY_CONFIG)
    server = start_server(model, flags=["--exit-on-error=false"])
    url = f"--url=http://{server.address}"
    done = run("health", url)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "not ready: HTTP status 503; `actorserve status` says why\n",
    )
    done = run("health", url, "--live")
    assert (done.returncode, done.stdout, done.stderr) == (0, "live\n", "")
    server.stop()
    line = one_line(run("health", f"--url={server.address}"), 1)
    assert line == f"not ready: {server.address}: Connection refused"


def test_health_gives_up_in_time():
    """A server that accepts and says nothing is not ready."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        line = one_line(run("health", f"--url=127.0.0.1:{port}", "--timeout-s=0.2"), 1)
        assert line == f"not ready: 127.0.0.1:{port}: timed out"
