# SPDX-License-Identifier: Apache-2.0
"""Custom metrics of real models: over instances, restarts, reloads, threads, and their ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.server.harness import Launcher, Server, write_model
from tests.server.scrape import scrape

LAB = """
import gc
class TritonPythonModel:
    def initialize(self, args):
        self.space = {"pb_utils": pb_utils, "threading": threading, "gc": gc, "os": os}

    def execute(self, requests):
        answers = []
        for request in requests:
            try:
                exec(json.loads(request.parameters())["code"], self.space)
                text = repr(self.space.pop("out", None))
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            tensor = pb_utils.Tensor("OUTPUT0", np.array([text.encode()], object))
            answers.append(pb_utils.InferenceResponse([tensor]))
        return answers
"""
CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ASYNC_LAB = LAB.replace("def execute", "async def execute")

LIFE = """
class TritonPythonModel:
    def initialize(self, args):
        kind = pb_utils.MetricFamily.COUNTER
        self.family = pb_utils.MetricFamily("life_total", "A life", kind)
        self.metric = self.family.Metric({"instance": args["model_instance_name"]})
        self.shared = self.family.Metric()
        self.metric.increment(1)
        self.shared.increment(1)
        assert self.metric.value() >= 1

    def execute(self, requests):
        self.shared.increment(len(requests))
        text = str(self.shared.value()).encode()
        tensor = pb_utils.Tensor("OUTPUT0", np.array([text], object))
        return [pb_utils.InferenceResponse([tensor]) for _ in requests]

    def finalize(self):
        self.shared.increment(100)
        print("at the end:", self.shared.value(), flush=True)
"""
MADE = """
family = pb_utils.MetricFamily(name="NAME", description="d", kind=pb_utils.MetricFamily.KIND)
metric = family.Metric(labels={"a": "1"})
"""


@pytest.fixture(scope="module")
def server(start_shared: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Return a server with the models that the tests of this module share."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "lab", LAB, CONFIG)
    write_model(repository, "other", LAB, CONFIG)
    write_model(repository, "async_lab", ASYNC_LAB, CONFIG)
    return start_shared(repository)


def run(server: Server, code: str, model: str = "lab") -> str:
    """Run code in a model; returns the repr of its `out`, or the exception that it raised."""
    status, outputs = server.infer(model, {"INPUT0": ("FP32", [1], [0])}, parameters={"code": code})
    assert status == 200, outputs
    return str(outputs["OUTPUT0"][0])


def made(name: str, kind: str = "COUNTER") -> str:
    """Return the code that makes a family and a metric."""
    return MADE.replace("NAME", name).replace("KIND", kind)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["lab", "async_lab"])
def test_what_a_request_measured_is_there_when_it_is_answered(server: Server, model: str) -> None:
    """Nobody has to wait for a bundle to be sent."""
    name = f"seen_{model}"
    assert run(server, made(name), model) == "None"
    for count in range(1, 6):
        assert run(server, "metric.increment(2)", model) == "None"
        assert scrape(server)[f'{name}{{a="1"}}'] == 2 * count
    assert run(server, "metric.increment(0.5); out = metric.value()", model) == "10.5"
    assert run(server, "del metric, family", model) == "None"


def test_a_histogram_is_shown_with_its_buckets(server: Server) -> None:
    """Count, sum and cumulative buckets, by labels."""
    run(
        server,
        "family = pb_utils.MetricFamily('hist', 'd', pb_utils.MetricFamily.HISTOGRAM)\n"
        "metric = family.Metric(labels={'example2': 'x', 'example1': 'y'}, buckets=[0.1, 1, 2.5])\n"
        "for value in (0.05, 1, 2, 100): metric.observe(value)",
    )
    text = server.request("GET", "/metrics").body.decode()
    labels = 'example1="y",example2="x"'
    for line in (
        "# TYPE hist histogram",
        f"hist_count{{{labels}}} 4",
        f"hist_sum{{{labels}}} 103.05",
        f'hist_bucket{{{labels},le="0.1"}} 1',
        f'hist_bucket{{{labels},le="1"}} 2',
        f'hist_bucket{{{labels},le="2.5"}} 3',
        f'hist_bucket{{{labels},le="+Inf"}} 4',
    ):
        assert f"{line}\n" in text
    run(server, "del metric, family")


def test_labels_and_descriptions_are_escaped(server: Server) -> None:
    """Whatever a model puts there, Prometheus can read the page."""
    run(
        server,
        "kind = pb_utils.MetricFamily.GAUGE\n"
        'family = pb_utils.MetricFamily("odd", "one\\nline \\\\ more", kind)\n'
        'metric = family.Metric(labels={"a": "q\\"b\\\\s\\nn", "b": "zażółć"})\n'
        "metric.set(3)",
    )
    found = scrape(server)
    assert found['odd{a="q"b\\s\nn",b="zażółć"}'] == 3
    run(server, "del metric, family")


@pytest.mark.parametrize("model", ["lab", "async_lab"])
def test_threads_may_measure_and_ask(server: Server, model: str) -> None:
    """Each of them, at the same time, and nothing is lost."""
    code = made(f"threads_{model}") + (
        "values = []\n"
        "def work():\n"
        "    for _ in range(300): metric.increment(1)\n"
        "    values.append(metric.value())\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[each.start() for each in threads]\n"
        "[each.join() for each in threads]\n"
        "out = (metric.value(), max(values), min(values) >= 300)\n"
        "del metric, family"
    )
    assert run(server, code, model) == "(1200.0, 1200.0, True)"


def test_a_measuring_thread_is_heard_while_nobody_asks(server: Server) -> None:
    """What happens between requests arrives with the next beat."""
    code = made("background") + (
        "wake = threading.Event()\n"
        "def work():\n"
        "    wake.wait(30)\n"
        "    metric.increment(7)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()"
    )
    run(server, code)
    assert scrape(server)['background{a="1"}'] == 0
    run(server, "wake.set(); thread.join()")
    wait_until(lambda: scrape(server)['background{a="1"}'] == 7)
    run(server, "del metric, family")


def test_many_changes_in_one_request_arrive(server: Server) -> None:
    """More than one message holds, in their order."""
    code = made("many", "GAUGE") + (
        "second = family.Metric(labels={'a': '2'})\n"
        "for n in range(10000): metric.set(n); second.increment(1)\n"
        "out = (metric.value(), second.value())\n"
    )
    assert run(server, code) == "(9999.0, 10000.0)"
    run(server, "del metric, second, family")


# --- sharing and ends ----------------------------------------------------------------------------


def test_models_share_a_family_and_its_series(server: Server) -> None:
    """The values add up, and `value` is the server's; the first description is kept."""
    run(server, made("shared").replace('"d"', '"first"'))
    run(server, made("shared").replace('"d"', '"second"'), "other")
    run(server, "metric.increment(1)")
    assert run(server, "metric.increment(2); out = metric.value()", "other") == "3.0"
    assert run(server, "out = metric.value()") == "3.0"
    assert "# HELP shared first\n" in server.request("GET", "/metrics").body.decode()
    run(server, "del metric, family; gc.collect()")
    assert scrape(server)['shared{a="1"}'] == 3
    run(server, "del metric, family; gc.collect()", "other")
    wait_until(lambda: "shared" not in server.request("GET", "/metrics").body.decode())


def test_a_name_of_another_kind_is_refused_where_it_is_made(server: Server) -> None:
    """Also where the other one is another model's, and only as long as that one has it."""
    run(server, made("kinds"))
    text = run(server, made("kinds", "GAUGE"), "other")
    assert text.startswith("TritonModelException: Error when creating MetricFamily: ")
    assert "exists already, with the kind COUNTER" in text
    run(server, "del metric, family")
    assert run(server, made("kinds", "GAUGE"), "other") == "None"
    assert run(server, "del metric, family", "other") == "None"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "pb_utils.MetricFamily('nv_inference_count', 'd', pb_utils.MetricFamily.COUNTER)",
            "Error when creating MetricFamily: 'nv_inference_count' is the name of a metric of",
        ),
        (
            "pb_utils.MetricFamily('a b', 'd', pb_utils.MetricFamily.COUNTER)",
            "Error when creating MetricFamily: 'a b' is no name for metrics",
        ),
        (
            "pb_utils.MetricFamily('n\\ud800', 'd', pb_utils.MetricFamily.COUNTER)",
            "Error when creating MetricFamily: ",
        ),
        (
            "pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.COUNTER)"
            ".Metric(labels={'a-b': 'c'})",
            "Error when creating Metric: 'a-b' is no name for a label",
        ),
        (
            "pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.COUNTER).Metric(labels=[1])",
            "Failed to create metric. Labels must be a dictionary.",
        ),
        (
            "pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.GAUGE).Metric(buckets=[1])",
            "Failed to create metric. Unexpected buckets found.",
        ),
        (
            "pb_utils.MetricFamily('n', 'd', pb_utils.MetricFamily.HISTOGRAM).Metric()",
            "Failed to create metric. Missing required buckets.",
        ),
    ],
)
def test_what_cannot_be_made_says_so(server: Server, code: str, text: str) -> None:
    """In the model, at once, with the documented beginning; the model goes on."""
    assert run(server, code).startswith(f"TritonModelException: {text}")
    assert run(server, "out = 1") == "1"


def test_a_metric_without_its_family_says_so(server: Server) -> None:
    """In the documented words."""
    text = run(server, made("orphan") + "del family; gc.collect(); metric.increment(1)")
    assert text == (
        "TritonModelException: Failed to increment metric value: Invalid metric operation as the "
        "corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object should be "
        "deleted AFTER its corresponding 'Metric' objects have been deleted."
    )
    run(server, "del metric")
    assert not any(key.startswith("orphan") for key in scrape(server))


def test_a_forked_child_is_told_that_it_cannot_measure(server: Server) -> None:
    """It has no connection to the server; its parent goes on."""
    code = made("forked") + (
        "reader, writer = os.pipe()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    try:\n"
        "        metric.increment(1)\n"
        "    except pb_utils.TritonModelException as error:\n"
        "        os.write(writer, str(error).encode())\n"
        "    os._exit(0)\n"
        "os.close(writer)\n"
        "out = os.read(reader, 4096).decode()\n"
        "os.close(reader)\n"
        "os.waitpid(pid, 0)\n"
    )
    assert "Failed to increment metric value: " in run(server, code)
    assert run(server, "metric.increment(1); out = metric.value()") == "1.0"
    run(server, "del metric, family")


@pytest.mark.parametrize(
    "measures",
    ["metric.increment(1)", "metric.value()", "family.Metric(labels={'a': 'b'}).increment(1)"],
)
def test_a_job_of_a_pool_fails_where_it_measures(server: Server, measures: str) -> None:
    """The pool's user hears why, by the ways of multiprocessing; nothing is lost in silence."""
    code = made("pooled") + (
        "import builtins, multiprocessing\n"
        "def job(n):\n"
        f"    {measures}\n"
        "builtins.pooled_job = job\n"
        "job.__module__, job.__qualname__ = 'builtins', 'pooled_job'\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    try:\n"
        "        out = pool.map(job, [1])\n"
        "    except pb_utils.TritonModelException as error:\n"
        "        out = str(error)\n"
        "    pool.close(); pool.join()\n"
    )
    assert "that the model has forked" in run(server, code)
    assert run(server, "out = metric.value()") == "0.0"
    run(server, "del metric, family")


# --- instances, restarts, reloads ----------------------------------------------------------------


def test_instances_add_up_and_restarts_keep_the_values(
    start_server: Launcher, repository: Path
) -> None:
    """What a dead stub counted is still there, and its next life goes on from it."""
    write_model(repository, "pair", LIFE, CONFIG + "instance_group [ { count: 2 } ]\n")
    server = start_server(repository)

    def lives() -> dict[str, float]:
        found = scrape(server)
        return {key: value for key, value in found.items() if key.startswith("life_total")}

    own = [f'life_total{{instance="pair_0_{n}"}}' for n in (0, 1)]
    assert lives() == {own[0]: 1, own[1]: 1, "life_total": 2}
    for count in range(1, 9):
        assert server.tell("pair") == f"{2 + count}.0"
    for round_ in (1, 2):
        os.kill(server.stubs()["pair_0_0"], signal.SIGKILL)
        wait_until(lambda n=round_: lives()[own[0]] == 1 + n, 30, "the next life")  # type: ignore[misc]
    assert lives() == {own[0]: 3, own[1]: 1, "life_total": 12}
    assert server.tell("pair") == "13.0"


def test_a_failed_initialize_leaves_no_metrics(start_server: Launcher, repository: Path) -> None:
    """What a model that does not load has made goes with it."""
    body = LIFE.replace(
        "assert self.metric.value() >= 1", "raise ValueError(str(self.metric.value()))"
    )
    write_model(repository, "broken", body, CONFIG)
    server = start_server(repository, "--exit-on-error=false")
    assert "ValueError: 1.0" in server.log()
    assert not any(key.startswith("life_total") for key in scrape(server))


def test_finalize_may_measure(start_server: Launcher, repository: Path) -> None:
    """And ask, until it returns."""
    write_model(repository, "life", LIFE, CONFIG)
    write_model(repository, "async_life", LIFE.replace("def execute", "async def execute"), CONFIG)
    server = start_server(repository)
    assert server.stop() == 0
    ends = [line for line in server.log().splitlines() if "at the end: " in line]
    assert len(ends) == 2
    assert any("102.0" in line for line in ends)


def test_metrics_may_be_made_while_the_model_is_imported(
    start_server: Launcher, repository: Path
) -> None:
    """A class that has its family as an attribute works, and its throw-away stub adds nothing."""
    body = """
FAMILY = pb_utils.MetricFamily("early", "d", pb_utils.MetricFamily.COUNTER)
METRIC = FAMILY.Metric()
METRIC.increment(1)
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        METRIC.increment(10)
        return config

    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
    write_model(repository, "early", body, CONFIG)
    assert scrape(start_server(repository))["early"] == 1
