# SPDX-License-Identifier: Apache-2.0
"""The log as people read it: three formats, a model's own lines, crash files."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import wait_until
from tests.server.harness import TELL_CONFIG, write_model
from tests.server.test_recorded_cases import difference, load_cases, send

TALKS = """
print("imported")
class TritonPythonModel:
    def initialize(self, args):
        print("out", 1)
        print("err", file=sys.stderr)
        pb_utils.Logger.log_info("an info")
        pb_utils.Logger.log_warn("a warning")
        pb_utils.Logger.log_error("an error")
        pb_utils.Logger.log_verbose("a detail")
        pb_utils.Logger.log("two\\nlines \\"quoted\\" \\x1b[31mred", pb_utils.Logger.INFO)
        os.write(1, b"no newline at the end, not UTF-8: \\xff")
    def execute(self, requests):
        print("x" * 20000)
        os.kill(os.getpid(), signal.SIGKILL)
"""
LINE = r"{letter}\d{{4}} \d\d:\d\d:\d\d\.\d{{6}} \d+ {place}\] {text}"


def _has(log: str, letter: str, place: str, text: str) -> bool:
    pattern = LINE.format(letter=letter, place=place, text=re.escape(json.dumps(text)))
    return re.search(f"^{pattern}$", log, re.MULTILINE) is not None


@pytest.fixture(scope="module")
def server(start_shared, tmp_path_factory):
    """Return a server of a talkative model, as it is by default."""
    repository = tmp_path_factory.mktemp("logs")
    write_model(repository, "talks", TALKS, TELL_CONFIG)
    return start_shared(repository)


@pytest.mark.parametrize(
    ("letter", "place", "text"),
    [
        ("I", "talks_0 stdout", "imported"),
        ("I", "talks_0 stdout", "out 1"),
        ("I", "talks_0 stderr", "err"),
        ("I", r"talks_0 model\.py:\d+", "an info"),
        ("W", r"talks_0 model\.py:\d+", "a warning"),
        ("E", r"talks_0 model\.py:\d+", "an error"),
        ("I", r"talks_0 model\.py:\d+", 'two\nlines "quoted" \x1b[31mred'),
    ],
)
def test_what_a_model_says_is_in_the_log(server, letter, place, text):
    """With the instance's name, where it was said, and nothing that could forge a line."""
    assert _has(server.wait_log("lines"), letter, place, text), server.log()


def test_verbose_lines_are_off_by_default(server):
    """log_verbose needs --log-verbose."""
    assert "a detail" not in server.log()


def test_a_dead_stub_s_last_words_are_kept(start_server, repository, tmp_path):
    """The log (ISO 8601, verbose) names a file with its output, also what had no newline yet."""
    write_model(repository, "talks", TALKS, TELL_CONFIG)
    server = start_server(repository, flags=["--log-format=ISO8601", "--log-verbose=1"])
    status, error = server.infer("talks", {"INPUT0": ("FP32", [1], [0])})
    assert status == 503
    assert "stub 'talks_0'" in error
    assert "killed by SIGKILL" in error
    log = server.wait_log("its last output is kept in")
    file = re.search(r"its last output is kept in ([^\"]+)\"", log)
    assert file is not None
    assert file[1].startswith(str(tmp_path / "crashes"))
    with open(file[1]) as stream:
        text = stream.read()
    assert text.startswith("instance: talks_0\npid: ")
    assert "end: killed by SIGKILL" in text
    assert "no newline at the end, not UTF-8: \\xff" in text
    assert max(map(len, text.splitlines())) < 17 << 10
    when = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.search(rf'^{when} I \d+ talks_0 model\.py:\d+\] "an info"$', log, re.M)
    assert re.search(rf'^{when} V \d+ talks_0 model\.py:\d+\] "a detail"$', log, re.M)


def test_json_lines(start_server, repository, tmp_path):
    """One object a line, in a file of its own; the table stays on stderr."""
    write_model(repository, "talks", TALKS, TELL_CONFIG)
    file = tmp_path / "server.jsonl"
    server = start_server(repository, flags=["--log-format=json", f"--log-file={file}"])
    assert server.stop() == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert {tuple(record) for record in records} == {
        ("time", "level", "pid", "instance", "source", "message")
    }
    assert {record["pid"] for record in records} == {server.process.pid}
    said = {(each["level"], each["instance"], each["message"]) for each in records}
    assert ("WARNING", "talks_0", "a warning") in said
    assert ("INFO", "talks_0", 'two\nlines "quoted" \x1b[31mred') in said
    assert server.log().startswith("MODEL")


# --- every phase of a model's life ----------------------------------------------------------------

PHASES = """
import asyncio, atexit, ctypes, gc, multiprocessing, subprocess
say = pb_utils.Logger.log_warn
say("at import")
atexit.register(say, "exit function that is the Logger's own")
atexit.register(lambda: say("exit function"))

def in_child(number):
    say(f"in child {number}")
    print(f"printed in child {number}")
    return number

class Dying:
    def __del__(self):
        say("in a finalizer")

class TritonPythonModel:
    def __init__(self):
        say("in __init__")

    @staticmethod
    def auto_complete_config(config):
        say("in auto_complete_config")
        print("printed in auto_complete_config")
        return config

    def initialize(self, args):
        say("in initialize")
        with multiprocessing.get_context("fork").Pool(2) as pool:
            pool.map(in_child, range(4), 1)
            pool.close()
            pool.join()

    def is_ready(self):
        say("in is_ready")
        return True

    def execute(self, requests):
        say("in execute")
        thread = threading.Thread(target=lambda: say("in a thread"))
        thread.start()
        thread.join()
        dying = Dying()
        dying.me = dying
        del dying
        gc.collect()
        async def coroutine():
            say("in a coroutine")
        asyncio.run(coroutine())
        os.write(1, b"written by os.write\\n")
        ctypes.CDLL(None).puts(b"written by C")
        ctypes.CDLL(None).fflush(None)
        subprocess.run(["echo", "written by a program"], check=True)
        print("\\0\\x1b[2J\\udcff")
        return [pb_utils.InferenceResponse([]) for _ in requests]

    def finalize(self):
        say("in finalize")
        print("printed in finalize")
"""
NO_OUTPUT_CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


@pytest.fixture(scope="module")
def phases_log(start_shared, tmp_path_factory):
    """Return the log of a server whose model talks in all phases of its life."""
    repository = tmp_path_factory.mktemp("phases")
    write_model(repository, "phases", PHASES, NO_OUTPUT_CONFIG)
    server = start_shared(repository)
    assert server.call("GET", "/v2/models/phases/ready")[0] == 200
    assert server.infer("phases", ONE_INPUT) == (200, {})
    assert server.stop() == 0
    return server.log()


ONE_INPUT = {"INPUT0": ("FP32", [1], [0])}


@pytest.mark.parametrize(
    ("name", "place", "text"),
    [
        *[
            ("phases_0", r"model\.py:\d+", text)
            for text in (
                "at import",
                "in __init__",
                "in initialize",
                "in is_ready",
                "in execute",
                "in a thread",
                "in a finalizer",
                "in a coroutine",
                "in finalize",
                "exit function",
            )
        ],
        ("phases_0", r"child\.py:\d+", "exit function that is the Logger's own"),
        ("phases_auto", r"model\.py:\d+", "in auto_complete_config"),
    ],
)
def test_the_logger_works_in_every_phase(phases_log, name, place, text):
    """With the instance's name, at its level."""
    assert _has(phases_log, "W", f"{name} {place}", text), phases_log


@pytest.mark.parametrize(
    ("place", "text"),
    [
        *[("phases_0 stdout", f"printed in child {number}") for number in range(4)],
        ("phases_0 stdout", "printed in finalize"),
        ("phases_auto stdout", "printed in auto_complete_config"),
        ("phases_0 stdout", "written by os.write"),
        ("phases_0 stdout", "written by C"),
        ("phases_0 stdout", "written by a program"),
    ],
)
def test_whatever_writes_is_heard(phases_log, place, text):
    """The model, its children, C, other programs."""
    assert _has(phases_log, "I", place, text), phases_log


def test_forked_children_log_to_stderr(phases_log):
    """In the line format, with their own process and place."""
    for number in range(4):
        line = rf'W\d{{4}} [\d:.]+ \d+ model\.py:\d+\] \\"in child {number}\\"'
        assert re.search(rf'^I.* phases_0 stderr\] "{line}"$', phases_log, re.MULTILINE)


def test_control_characters_are_escaped(phases_log):
    """Nothing that a model prints reaches the terminal as it is."""
    assert "\\u0000\\u001b[2J\\\\udcff" in phases_log
    assert "\x1b" not in phases_log
    assert "\0" not in phases_log


# --- death ----------------------------------------------------------------------------------------

DIES = """
class TritonPythonModel:
    def execute(self, requests):
        for number in range(300):
            print("line", number)
        os.write(1, b"\\xfe" * 3 + b"x" * (1 << 20) + b"\\n")
        pb_utils.Logger.log_error("the last word")
        os.write(2, b"not a whole")
        os.write(2, b" line")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_written_before_a_kill_comes_before_the_kill(start_server, repository, tmp_path):
    """In order, cut where it is long; the crash file has the last 200 lines."""
    write_model(repository, "dies", DIES, NO_OUTPUT_CONFIG)
    server = start_server(repository)
    assert server.infer("dies", ONE_INPUT)[0] == 503
    log = server.wait_log("its last output is kept in")
    lines = [json.loads(text) for text in re.findall(r'^I.*dies_0 stdout\] (".*")$', log, re.M)]
    assert lines[:300] == [f"line {number}" for number in range(300)]
    assert "".join(lines[300:]) == "\\xfe" * 3 + "x" * (1 << 20)
    assert max(map(len, lines)) <= 17 << 10
    ends = [log.index(text) for text in ("not a whole line", "the last word")]
    killed = log.index("dies_0: killed by SIGKILL")
    assert max(ends) < killed
    assert log.rindex("dies_0 stdout") < killed
    (file,) = (tmp_path / "crashes").iterdir()
    kept = file.read_text().splitlines()[4:]
    assert len(kept) == 200
    assert "not a whole line" in kept
    assert any(re.fullmatch(r"model\.py:\d+\] the last word", line) for line in kept)


# --- floods ---------------------------------------------------------------------------------------

FLOODS = """
class TritonPythonModel:
    def initialize(self, args):
        def flood():
            number = 0
            while True:
                number += 1
                pb_utils.Logger.log_info(f"chatter {number} " + "x" * 200)
                if number % 10 == 0:
                    print(f"noise {number}")
        threading.Thread(target=flood, daemon=True).start()
        pb_utils.Logger.log_error("a grave word")
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_a_flood_of_lines_hurts_nobody(start_server, repository):
    """Inferences of all models go on, what is left out is counted, and other levels are heard."""
    write_model(repository, "floods", FLOODS, NO_OUTPUT_CONFIG)
    write_model(repository, "calm")
    server = start_server(repository)
    server.wait_log("lines of level INFO were left out here")
    server.wait_log("lines were left out here)")
    assert _has(server.log(), "E", r"floods_0 model\.py:\d+", "a grave word")
    for _ in range(20):
        assert server.infer("calm", ONE_INPUT)[0] == 200
        assert server.infer("floods", ONE_INPUT) == (200, {})
    assert server.stop() == 0


# --- /v2/logging ----------------------------------------------------------------------------------

SPEAKS = """
class TritonPythonModel:
    def execute(self, requests):
        for write in (
            pb_utils.Logger.log_verbose, pb_utils.Logger.log_info,
            pb_utils.Logger.log_warn, pb_utils.Logger.log_error,
        ):
            write("said " + str(self.said))
        print("said", self.said)
        self.said += 1
        return [pb_utils.InferenceResponse([]) for _ in requests]
    said = 0
"""
DEFAULTS = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}
URL = "/v2/logging"


@pytest.fixture(scope="module")
def speaking(start_shared, tmp_path_factory):
    """Return a server of a model that logs at each level when it is asked."""
    repository = tmp_path_factory.mktemp("speaks")
    write_model(repository, "speaks", SPEAKS, NO_OUTPUT_CONFIG)
    return start_shared(repository)


def test_the_recorded_answer_is_ours(speaking):
    """Of the real server, with its defaults."""
    cases = [case for case in load_cases("network") if case["name"] == "srv_logging_get"]
    assert len(cases) == 1
    assert difference(cases[0], send(speaking.address, cases[0]["request"])) is None


def test_changes_take_effect_at_once(speaking):
    """Level by level, and the format; each reply shows all settings."""
    number = 0

    def heard() -> set[str]:
        nonlocal number
        assert speaking.infer("speaks", ONE_INPUT) == (200, {})
        mark = f"said {number}"
        number += 1
        found = re.findall(rf'^(.).*\] "{mark}"$', speaking.log(), re.MULTILINE)
        return set(found)

    def change(**settings) -> None:
        status, document = speaking.call("POST", URL, settings)
        assert status == 200
        assert document == {**speaking.call("GET", URL)[1], **settings}

    assert speaking.call("GET", URL) == (200, DEFAULTS)
    wait_until(lambda: heard() == {"I", "W", "E"})
    change(log_verbose_level=1)
    wait_until(lambda: heard() == {"V", "I", "W", "E"})
    change(log_info=False, log_warning=False)
    wait_until(lambda: heard() == {"V", "E"})
    change(log_verbose_level=0, log_error=False)
    wait_until(lambda: heard() == set())
    change(log_info=True, log_warning=True, log_error=True, log_format="ISO8601")
    assert speaking.infer("speaks", ONE_INPUT) == (200, {})
    wait_until(lambda: re.search(r"^\d{4}-\d\d-\d\dT.* E \d+ speaks_0", speaking.log(), re.M))
    change(log_format="json")
    assert speaking.infer("speaks", ONE_INPUT) == (200, {})
    wait_until(lambda: re.search(r'^{"time":.*"ERROR".*speaks_0', speaking.log(), re.M))
    change(log_format="default")
    assert speaking.call("POST", URL) == (200, DEFAULTS)
    assert speaking.call("POST", URL, {}) == (200, DEFAULTS)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"log_file": "/x"}, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, "'log_info' is true or false, got 1"),
        ({"log_error": None}, "'log_error' is true or false, got None"),
        ({"log_verbose_level": -1}, "'log_verbose_level' is a whole number from 0 to 100, got -1"),
        ({"log_verbose_level": True}, "'log_verbose_level' is a whole number"),
        ({"log_verbose_level": 1.5}, "'log_verbose_level' is a whole number"),
        ({"log_format": "xml"}, "'log_format' is one of default, ISO8601, json, got 'xml'"),
        ({"log_format": ["json"]}, "'log_format' is one of default, ISO8601, json"),
        ({"log_inof": True}, "there is no log setting 'log_inof', expected some of log_file, "),
        ({"log_info": False, "log_error": 3}, "'log_error' is true or false, got 3"),
        ([], "failed to parse the request JSON buffer"),
        (b"{", "failed to parse the request JSON buffer"),
        (b"\xff", "failed to parse the request JSON buffer"),
    ],
)
def test_what_is_wrong_changes_nothing(speaking, body, error):
    """Not even the part that is right."""
    reply = speaking.request("POST", URL, body)
    assert reply.status == 400
    assert error in reply.error
    assert speaking.call("GET", URL) == (200, DEFAULTS)


def test_the_log_is_the_operator_s(speaking):
    """Others may not ask, and not with other methods."""
    stranger = {"X-Forwarded-For": "192.0.2.1"}
    assert speaking.call("GET", URL, headers=stranger)[0] == 403
    assert speaking.call("POST", URL, {"log_info": False}, stranger)[0] == 403
    assert speaking.call("PUT", URL, {})[0] == 405
    assert speaking.call("HEAD", URL)[0] == 200
    assert speaking.call("GET", URL) == (200, DEFAULTS)
