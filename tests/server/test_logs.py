# SPDX-License-Identifier: Apache-2.0
"""The log as people read it: three formats, a model's own lines, crash files."""

from __future__ import annotations

import json
import re

import pytest

from tests.server.harness import TELL_CONFIG, write_model

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
