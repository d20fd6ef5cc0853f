# SPDX-License-Identifier: Apache-2.0
"""`actorserve check`: what would load, and the dry run with its warm-up samples."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import wait_until
from tests.server.harness import EXAMPLES, IDENTITY, IDENTITY_CONFIG, write_model
from tests.server.terminal import CTRL_C, Terminal

CASES = Path(__file__).parents[1] / "cases" / "repository"
COMMAND = (sys.executable, "-m", "actorserve", "check")
HANG = "while True: threading.Event().wait(60)"
BATCHED = f"max_batch_size: 4\n{IDENTITY_CONFIG}"


PRINTS = """
class TritonPythonModel:
    def initialize(self, args):
        print("looking for weights")
        raise ValueError
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command and return what it printed, in lines that are long enough."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "COLUMNS": "300"},
    )


def row(done: subprocess.CompletedProcess[str], model: str) -> list[str]:
    """Return the cells of a model's row."""
    line = next(line for line in done.stdout.splitlines() if line.startswith(f"{model} "))
    return re.split(" {2,}", line)


def sample(name: str, data: str = "zero_data: true", dims: str = "[ 3 ]", **members: object) -> str:
    """Return a warm-up sample for the input of the identity model."""
    more = " ".join(f"{key}: {value}" for key, value in {"batch_size": 1, **members}.items())
    tensor = f'key: "INPUT0" value: {{ data_type: TYPE_FP32 dims: {dims} {data} }}'
    return f'model_warmup {{ name: "{name}" {more} inputs {{ {tensor} }} }}\n'


@pytest.fixture(autouse=True)
def own_crash_files(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Keep what dead stubs said last away from the user's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


# --- without running anything --------------------------------------------------------------------


def test_check_says_what_would_load():
    """Every example would; nothing of their code runs, and stderr is silent."""
    done = run(EXAMPLES)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["MODEL", "VERSIONS", "RESULT", "DETAIL"]
    assert row(done, "add_sub") == ["add_sub", "1", "ok", "can be read; not run"]
    assert lines[-2] == f"{len(list(EXAMPLES.iterdir()))} models: {len(lines) - 4} ok"
    assert lines[-1] == "Nothing was run: --dry-run loads each model."


def test_check_says_what_would_not_load_and_why(tmp_path: Path):
    """A broken configuration is shown with its place, a broken file with its line."""
    write_model(tmp_path, "bad_config", config='backend: "python"\nmax_batch: 3\n')
    write_model(tmp_path, "bad_file", "class TritonPythonModel\n")
    (tmp_path / "no_version").mkdir()
    policy = "version_policy { specific { versions: [1, 7] } }"
    write_model(tmp_path, "works", config=BATCHED + policy)
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "config.pbtxt:2:1" in row(done, "bad_config")[3]
    assert re.search(r"bad_file/1/model.py:4: SyntaxError: ", row(done, "bad_file")[3])
    assert row(done, "no_version")[2] == "failed"
    assert row(done, "works")[2:] == ["ok", "can be read; not run"]
    assert re.search("^ +warning  version 7 has no folder$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-2] == "4 models: 1 ok, 3 failed"


def test_bad_samples_are_warned_of(tmp_path: Path):
    """Serving ignores them, so the model would load."""
    write_model(tmp_path, "model", config=IDENTITY_CONFIG + sample("wrong", dims="[ 1, 2 ]"))
    done = run(tmp_path)
    assert done.returncode == 0
    assert "warning  model_warmup is ignored" in done.stdout
    assert "warning  warm-up sample 'wrong': input 'INPUT0': dims [1, 2] do not" in done.stdout


def test_a_missing_repository_is_one_line():
    """Exit code 2, no stack."""
    done = run("/nowhere/at/all")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "/nowhere/at/all" in done.stderr


def test_an_empty_repository_is_said(tmp_path: Path):
    """With a dry run, too; that is no failure."""
    for arguments in ((), ("--dry-run",)):
        done = run(*arguments, tmp_path)
        assert (done.returncode, done.stdout) == (0, "There are no models.\n")


def test_reasons_are_wrapped(tmp_path: Path):
    """To the width of the terminal, below each other; the columns before stay free."""
    write_model(tmp_path, "model", f"raise ValueError({'many words ' * 20!r})\n")
    with Terminal([*COMMAND, "--dry-run", str(tmp_path)], columns=70) as terminal:
        code, text = terminal.read_all()
    assert code == 1
    lines = [re.sub("\x1b\\[[0-9]*[mK]|\r", "", line) for line in text.splitlines()]
    begin = next(n for n, line in enumerate(lines) if line.startswith("model  1  "))
    place = lines[begin].index("ValueError")
    part = lines[begin + 1 : begin + 4]
    assert all(line.startswith(" " * (place + 2) + "m") or "many" in line for line in part)
    assert all(len(line) <= 70 and not line[:place].strip() for line in part)


# --- the dry run ---------------------------------------------------------------------------------


def test_a_dry_run_initializes_every_model():
    """What only running code shows is found too; a model without samples says so."""
    done = run("--dry-run", CASES)
    assert (done.returncode, done.stderr) == (1, "")
    for name in ("init_raise", "import_error", "no_class", "ctor_raise", "init_sysexit"):
        assert row(done, name)[2] == "failed"
    assert "module_that_does_not_exist" in row(done, "import_error")[3]
    assert re.fullmatch(r"initialized in [\d.]+ m?s; no warm-up samples", row(done, "add_sub")[3])
    assert "Traceback" not in done.stdout and "<frozen" not in done.stdout


def test_samples_reach_the_model(tmp_path: Path):
    """Zeros, random numbers and files, in batches, as often as asked; then it finalizes."""
    told = tmp_path / "told"
    body = f"""
class TritonPythonModel:
    def tell(self, text):
        with open({str(told)!r}, "a") as stream:
            stream.write(text + "\\n")

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            self.tell(f"{{x.dtype}} {{x.shape}} {{x.flatten().tolist()}}")
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        return answers

    def finalize(self):
        self.tell("finalized")
"""
    samples = sample("zeros", count=2) + sample("file", 'input_data_file: "some/x"', batch_size=2)
    folder = write_model(tmp_path / "repo", "model", body, BATCHED + samples)
    (folder / "warmup" / "some").mkdir(parents=True)
    np.array([1, 2, 3], "<f4").tofile(folder / "warmup" / "some" / "x")
    done = run("--dry-run", tmp_path / "repo")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert told.read_text().splitlines() == [
        "float32 (1, 3) [0.0, 0.0, 0.0]",
        "float32 (1, 3) [0.0, 0.0, 0.0]",
        "float32 (2, 3) [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]",
        "finalized",
    ]
    assert re.search(r"^ +ok +warm-up sample 'zeros': [\d.]+ m?s, 2 runs$", done.stdout, re.M)
    assert re.search(r"^ +ok +warm-up sample 'file': [\d.]+ m?s$", done.stdout, re.M)


def test_samples_that_fail_say_why(tmp_path: Path):
    """Those that do not fit, and what the model answers; the others go on, the exit code is 1."""
    body = """
class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        if x.shape[1] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if x.shape[1] == 8:
            raise ValueError("eight is too many")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)])]
"""
    samples = [
        'model_warmup { name: "strange" batch_size: 1 inputs { key: "Z" value: '
        "{ data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }",
        'model_warmup { name: "empty" batch_size: 1 }',
        sample("file", 'input_data_file: "x"'),
        sample("seven", dims="[ 7 ]"),
        sample("eight", dims="[ 8 ]"),
        sample("none", batch_size=0),
        sample("good", "random_data: true"),
    ]
    folder = write_model(tmp_path, "model", body, BATCHED + "\n".join(samples))
    (folder / "warmup").mkdir()
    (folder / "warmup" / "x").write_bytes(b"12345")
    done = run("--dry-run", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert row(done, "model")[2] == "failed"
    assert row(done, "model")[3].endswith("; 5 of 7 warm-up samples failed")
    for result, title, reason in (
        ("failed", "strange", "the model has no input 'Z' (its inputs: INPUT0)"),
        ("failed", "empty", "expected 1 inputs but got 0 inputs for model 'model'"),
        ("failed", "file", "input 'INPUT0': input_data_file 'x' has 5 bytes, but its dims need 12"),
        ("failed", "seven", "stub 'model_0' died while it had the request: killed by SIGKILL"),
        ("failed", "eight", ".*ValueError: eight is too many"),
    ):
        pattern = rf"^ +{result} +warm-up sample '{title}': [\d.]+ m?s: "
        escaped = reason if reason.startswith(".*") else re.escape(reason)
        assert re.search(pattern + escaped, done.stdout, re.MULTILINE), (title, done.stdout)
    assert re.search("^ +skipped +warm-up sample 'none': its batch_size is 0$", done.stdout, re.M)
    assert re.search(r"^ +ok +warm-up sample 'good': [\d.]+ m?s$", done.stdout, re.MULTILINE)


def test_what_hangs_is_given_up(tmp_path: Path):
    """An initialize and an execute; whatever comes after the latter is skipped."""
    write_model(
        tmp_path,
        "init",
        f"class TritonPythonModel:\n    def initialize(self, args):\n        {HANG}\n",
    )
    write_model(
        tmp_path,
        "execute",
        f"class TritonPythonModel:\n    def execute(self, requests):\n        {HANG}\n",
        IDENTITY_CONFIG + sample("first") + sample("second"),
    )
    done = run("--dry-run", "--timeout-s=1.5", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert row(done, "init")[2:] == ["failed", "it was not ready within 1.5 s"]
    assert re.search(
        r"failed +warm-up sample 'first': 1\.\d+ s: not answered within 1.5 s", done.stdout
    )
    assert "skipped  warm-up sample 'second': an earlier one hangs" in done.stdout


@pytest.mark.parametrize("place", ["import", "initialize", "execute", "auto_complete_config"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(
    tmp_path: Path, place: str, number: signal.Signals, code: int
):
    """Whatever a model hangs in; to the whole group, as Ctrl-C sends it."""
    mark = tmp_path / "hangs"
    hang = f"open({str(mark)!r}, 'w').close(); threading.Event().wait()"
    head = {
        "import": "if True:",
        "auto_complete_config": "@staticmethod\n    def auto_complete_config(config):",
        "initialize": "def initialize(self, args):",
        "execute": "def execute(self, requests):",
    }[place]
    body = f"class TritonPythonModel:\n    {head}\n        {hang}\n"
    config = IDENTITY_CONFIG + sample("one")
    write_model(tmp_path / "repo", "model", body, config)
    write_model(tmp_path / "repo", "works")
    with subprocess.Popen(
        [*COMMAND, "--dry-run", str(tmp_path / "repo")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_until(mark.exists, 30)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert out == ""
    assert err == ("actorserve check: interrupted\n" if number == signal.SIGINT else "")
    assert not any(child.is_running() for child in children)


def test_the_log_is_shown_on_demand(tmp_path: Path):
    """What a model prints says more than its last error, sometimes."""
    write_model(tmp_path, "model", PRINTS)
    done = run("--dry-run", tmp_path)
    assert "looking for weights" not in done.stdout + done.stderr
    assert done.stdout.endswith("--verbose shows what the models print.\n")
    done = run("--dry-run", "--verbose", tmp_path)
    assert "looking for weights" in done.stderr
    assert "--verbose" not in done.stdout


# --- on a terminal -------------------------------------------------------------------------------


def test_a_terminal_shows_progress_and_colours(tmp_path: Path):
    """What is being tried, in one line that is taken away at the end."""
    write_model(tmp_path, "model", IDENTITY, IDENTITY_CONFIG + sample("one"))
    write_model(tmp_path, "broken", "raise ValueError\n")
    with Terminal([*COMMAND, "--dry-run", str(tmp_path)]) as terminal:
        terminal.read_until("of 2 models done; trying ")
        code, text = terminal.read_all()
    assert code == 1
    table = text[text.index("\r\x1b[KMODEL") :]
    assert "trying" not in table
    assert re.search(r"^model   1         \x1b\[32mok\x1b\[0m +initialized", table, re.MULTILINE)
    assert re.search(r"^broken  1         \x1b\[31mfailed\x1b\[0m +ValueError", table, re.MULTILINE)


def test_ctrl_c_at_a_terminal(tmp_path: Path):
    """The progress line is taken away, and one line says what became of the command."""
    write_model(tmp_path, "model", HANG + "\n")
    with Terminal([*COMMAND, "--dry-run", str(tmp_path)]) as terminal:
        terminal.read_until("0 of 1 models done; trying model")
        terminal.type(CTRL_C)
        code, text = terminal.read_all()
    assert code == 130
    assert text.endswith("\r\x1b[Kactorserve check: interrupted\r\n")


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("pb_utils.Tensor('OUTPUT1', x)", "the response has no output 'OUTPUT0'"),
        ("pb_utils.Tensor('OUTPUT0', x.astype(np.float64))", "output 'OUTPUT0' is FP64, where"),
        ("pb_utils.Tensor('OUTPUT0', x[0])", "has the shape [3], where"),
    ],
)
def test_outputs_that_are_not_the_configured_ones_are_found(tmp_path: Path, output, reason):
    """The server would hand them on as they are, as the real one does."""
    body = f"""
class TritonPythonModel:
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "INPUT0").as_numpy()
        return [pb_utils.InferenceResponse([{output}])]
"""
    write_model(tmp_path / "repo", "model", body, BATCHED + sample("zeros"))
    done = run("--dry-run", tmp_path / "repo")
    assert done.returncode == 1
    assert reason in done.stdout
