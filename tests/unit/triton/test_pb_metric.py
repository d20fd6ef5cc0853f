# SPDX-License-Identifier: Apache-2.0
"""Custom metrics as a model sees them, with a store of this process."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from actorserve.errors import Unavailable
from actorserve.state.metric_registry import Change
from actorserve.triton import c_names, pb_utils
from actorserve.triton.error import TritonModelException
from actorserve.triton.metric import LocalStore, set_metric_store

Family = pb_utils.MetricFamily
KINDS = {"counter": Family.COUNTER, "gauge": Family.GAUGE, "histogram": Family.HISTOGRAM}


@pytest.fixture(autouse=True)
def store() -> Iterator[LocalStore]:
    """Give each test metrics of its own."""
    store = LocalStore()
    set_metric_store(store)
    yield store
    set_metric_store(None)


def make(kind: str, **labels: str) -> tuple[Any, Any]:
    """Return a family and a metric of it."""
    family = Family(name="n", description="d", kind=KINDS[kind])
    return family, family.Metric(labels=labels, buckets=[1.0] if kind == "histogram" else None)


def refused(call: Any) -> str:
    """Return the text of the exception that a call raises."""
    with pytest.raises(TritonModelException) as caught:
        call()
    return str(caught.value)


# --- operations ----------------------------------------------------------------------------------


def test_a_counter_grows() -> None:
    """By any amount that is not negative, of any type of number."""
    _family, metric = make("counter")
    assert metric.value() == 0.0
    for amount in (1, 2.5, 0, np.float32(0.5), np.int64(3), True):
        metric.increment(amount)
    assert metric.value() == 8.0
    assert type(metric.value()) is float


@pytest.mark.parametrize("amount", [-1, -0.1, float("nan")])
def test_a_counter_does_not_shrink(amount: float) -> None:
    """The value stays as it was."""
    _family, metric = make("counter")
    metric.increment(2)
    assert refused(lambda: metric.increment(amount)).startswith(
        "Failed to increment metric value: "
    )
    assert metric.value() == 2


def test_a_gauge_goes_up_and_down_and_is_set() -> None:
    """In any order."""
    _family, metric = make("gauge")
    metric.increment(-3)
    assert metric.value() == -3
    metric.set(10.5)
    metric.increment(1)
    assert metric.value() == 11.5


@pytest.mark.parametrize(
    ("kind", "verb", "prefix"),
    [
        ("counter", "set", "Failed to set metric value: "),
        ("counter", "observe", "Failed to observe metric value: "),
        ("gauge", "observe", "Failed to observe metric value: "),
        ("histogram", "increment", "Failed to increment metric value: "),
        ("histogram", "set", "Failed to set metric value: "),
        ("histogram", "value", "Failed to get metric value: "),
    ],
)
def test_what_a_kind_cannot_do_is_refused(kind: str, verb: str, prefix: str) -> None:
    """With the documented beginning."""
    _family, metric = make(kind)
    arguments = () if verb == "value" else (1.0,)
    assert refused(lambda: getattr(metric, verb)(*arguments)).startswith(prefix)


@pytest.mark.parametrize("value", ["1", b"1", None, [1]])
def test_what_is_no_number_is_a_type_error(value: Any) -> None:
    """For every operation that takes one."""
    for kind, verb in (("counter", "increment"), ("gauge", "set"), ("histogram", "observe")):
        family, metric = make(kind)
        with pytest.raises(TypeError):
            getattr(metric, verb)(value)
        del family, metric


def test_threads_lose_nothing() -> None:
    """Increments from many threads add up."""
    _family, metric = make("counter")

    def work() -> None:
        for _ in range(200):
            metric.increment(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric.value() == 800


# --- making them ---------------------------------------------------------------------------------


def test_equal_labels_are_one_metric() -> None:
    """Whatever their order, and for a second family of the same name, too."""
    family, metric = make("gauge", a="1", b="2")
    again = family.Metric(labels={"b": "2", "a": "1"})
    other_family, other = make("gauge", a="1", b="2")
    different = family.Metric()
    metric.increment(1)
    again.increment(2)
    other.increment(4)
    assert (metric.value(), again.value(), other.value()) == (7, 7, 7)
    assert different.value() == 0
    assert other_family is not family


def test_a_name_has_one_kind() -> None:
    """Another one is refused, until the family is gone."""
    family, metric = make("counter")
    text = refused(lambda: Family("n", "d", Family.GAUGE))
    assert text.startswith("Error when creating MetricFamily: ")
    assert "exists already, with the kind COUNTER" in text
    del family, metric
    make("gauge")


@pytest.mark.parametrize("name", ["", "a b", "9a"])
def test_a_family_s_name_is_checked(name: str) -> None:
    """Prometheus could not read it."""
    assert "no name for metrics" in refused(lambda: Family(name, "d", Family.COUNTER))


@pytest.mark.parametrize(
    "arguments",
    [(None, "d", Family.COUNTER), ("n", None, Family.COUNTER), ("n", "d", 0), ("n", "d")],
)
def test_wrong_types_of_a_family_are_type_errors(arguments: tuple[Any, ...]) -> None:
    """As with the real module."""
    with pytest.raises(TypeError):
        Family(*arguments)


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        ("counter", {"labels": ["a"]}, "Failed to create metric. Labels must be a dictionary."),
        ("counter", {"labels": {"a": 1}}, "Failed to create metric. Labels must be a dictionary."),
        ("counter", {"labels": {1: "a"}}, "Failed to create metric. Labels must be a dictionary."),
        ("counter", {"buckets": [1]}, "Failed to create metric. Unexpected buckets found."),
        ("gauge", {"buckets": []}, "Failed to create metric. Unexpected buckets found."),
        ("histogram", {}, "Failed to create metric. Missing required buckets."),
        ("histogram", {"buckets": (1, 2)}, "Failed to create metric. Buckets must be a list."),
        ("histogram", {"buckets": 5}, "Failed to create metric. Buckets must be a list."),
        ("histogram", {"buckets": ["x"]}, "Failed to create metric. Buckets must be a list."),
        ("histogram", {"buckets": [2, 1]}, "Error when creating Metric: buckets must be strictly"),
        ("histogram", {"buckets": [1, 1]}, "Error when creating Metric: buckets must be strictly"),
        ("counter", {"labels": {"a-b": "1"}}, "Error when creating Metric: 'a-b' is no name"),
        ("histogram", {"labels": {"le": "1"}, "buckets": []}, "Error when creating Metric: "),
    ],
)
def test_a_metric_that_cannot_be_is_refused(kind: str, arguments: Any, text: str) -> None:
    """With the documented words."""
    family = Family("n", "d", KINDS[kind])
    assert refused(lambda: family.Metric(**arguments)).startswith(text)


def test_a_histogram_may_have_no_buckets() -> None:
    """Then there is only the last one."""
    family = Family("n", "d", Family.HISTOGRAM)
    family.Metric(buckets=[]).observe(3)


def test_a_metric_is_only_made_by_its_family() -> None:
    """The class is there for annotations; both modules have it."""
    with pytest.raises(TypeError, match="MetricFamily"):
        pb_utils.Metric()
    assert c_names.Metric is pb_utils.Metric
    assert Family.MetricKind is pb_utils.MetricKind


# --- lifetimes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "verb", "prefix"),
    [
        ("counter", "increment", "Failed to increment metric value: "),
        ("gauge", "set", "Failed to set metric value: "),
        ("histogram", "observe", "Failed to observe metric value: "),
        ("gauge", "value", "Failed to get metric value: "),
    ],
)
def test_a_metric_is_of_no_use_without_its_family(kind: str, verb: str, prefix: str) -> None:
    """It says so in the documented words."""
    family, metric = make(kind)
    del family
    gc.collect()
    arguments = () if verb == "value" else (1.0,)
    assert refused(lambda: getattr(metric, verb)(*arguments)) == (
        f"{prefix}Invalid metric operation as the corresponding 'MetricFamily' has been deleted. "
        "The 'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have "
        "been deleted."
    )


def test_values_last_as_long_as_a_handle() -> None:
    """A metric that is made again while another one holds it goes on; else it begins anew."""
    family, metric = make("counter")
    metric.increment(5)
    other_family, other = make("counter")
    del metric
    assert family.Metric().value() == 5
    del other
    gc.collect()
    assert family.Metric().value() == 0
    del other_family


def test_ends_are_said_once_and_metrics_go_with_their_family() -> None:
    """What the store hears of a family that goes first is the family's end alone."""
    closed: list[tuple[Change, int]] = []

    class Noting(LocalStore):
        def close(self, change: Change, number: int) -> None:
            closed.append((change, number))

    set_metric_store(Noting())
    family, metric = make("counter")
    del family, metric
    second_family, second = make("counter")
    del second, second_family
    assert closed == [
        (Change.CLOSE_FAMILY, 1),
        (Change.CLOSE_METRIC, 4),
        (Change.CLOSE_FAMILY, 3),
    ]


def test_errors_of_the_store_get_the_operation_s_words() -> None:
    """As when the model has forked and its child measures."""

    class Gone(LocalStore):
        def change(self, change: Change, number: int, amount: float) -> None:
            raise Unavailable("no way")

        def value(self, metric: int) -> float:
            raise Unavailable("no way")

    set_metric_store(Gone())
    _family, metric = make("gauge")
    assert refused(lambda: metric.increment(1)) == "Failed to increment metric value: no way"
    assert refused(lambda: metric.set(1)) == "Failed to set metric value: no way"
    assert refused(metric.value) == "Failed to get metric value: no way"
