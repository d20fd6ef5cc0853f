# SPDX-License-Identifier: Apache-2.0
"""How a stub's changes of metrics are bundled on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.actors.stub_metrics import BUNDLE, CONTROL_THREAD, StubMetrics
from actorserve.errors import InvalidArgument, Unavailable
from actorserve.state.metric_registry import Change
from actorserve.state.metrics import MetricKind
from actorserve.wire.messages import MetricsChanged
from actorserve.wire.questions import OpenFamily, OpenMetric, ReadMetric

INCREMENT, SET, OBSERVE = Change.INCREMENT, Change.SET, Change.OBSERVE


class FakeEnd:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.is_severed = False
        self.sent: list[list[tuple[int, int, float]]] = []
        self.wakes = 0

    def send(self, message: MetricsChanged) -> None:
        self.sent.append(message.changes)

    def wake_control(self) -> None:
        self.wakes += 1


class FakeQuestions:
    """Answers with what it is told to, and calls `before` as the real ones do."""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None
        self.asked: list[Any] = []
        self.answer: Any = None

    def ask(self, question: Any) -> Any:
        self.before()
        self.asked.append(question)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def end() -> FakeEnd:
    """Return a channel's end."""
    return FakeEnd()


@pytest.fixture
def questions() -> FakeQuestions:
    """Return somebody to ask."""
    return FakeQuestions()


@pytest.fixture
def metrics(end: FakeEnd, questions: FakeQuestions) -> StubMetrics:
    """Return a stub's store."""
    return StubMetrics(end, questions)  # type: ignore[arg-type]


def test_nothing_is_sent_for_nothing(metrics: StubMetrics, end: FakeEnd) -> None:
    """Most models have no metrics, and pay nothing for them."""
    metrics.flush()
    assert end.sent == []


def test_changes_of_one_metric_in_a_row_are_one(metrics: StubMetrics, end: FakeEnd) -> None:
    """Increments add up, and a setting hides what was before it; observations stay single."""
    for change, number, amount in [
        (INCREMENT, 1, 1.0),
        (INCREMENT, 1, 2.0),
        (SET, 1, 5.0),
        (INCREMENT, 1, 1.0),
        (OBSERVE, 2, 1.0),
        (OBSERVE, 2, 1.0),
        (INCREMENT, 1, 4.0),
        (SET, 3, 1.0),
        (SET, 3, 2.0),
    ]:
        metrics.change(change, number, amount)
    metrics.flush()
    assert end.sent == [
        [(SET, 1, 6.0), (OBSERVE, 2, 1.0), (OBSERVE, 2, 1.0), (INCREMENT, 1, 4.0), (SET, 3, 2.0)]
    ]
    metrics.flush()
    assert len(end.sent) == 1


def test_the_end_of_a_handle_keeps_its_place(metrics: StubMetrics, end: FakeEnd) -> None:
    """Behind what was done with it."""
    metrics.change(INCREMENT, 1, 1.0)
    metrics.close(Change.CLOSE_METRIC, 1)
    metrics.close(Change.CLOSE_FAMILY, 1)
    metrics.flush()
    assert end.sent == [
        [(INCREMENT, 1, 1.0), (Change.CLOSE_METRIC, 1, 0.0), (Change.CLOSE_FAMILY, 1, 0.0)]
    ]


def test_large_heaps_go_in_bundles(metrics: StubMetrics, end: FakeEnd) -> None:
    """No message is too large, and the control thread is woken before the heap grows."""
    for number in range(2 * BUNDLE + 5):
        metrics.change(SET, number, 1.0)
    assert end.wakes == 2
    metrics.flush()
    assert [len(bundle) for bundle in end.sent] == [BUNDLE, BUNDLE, 5]


def test_questions_come_behind_the_changes(
    metrics: StubMetrics, end: FakeEnd, questions: FakeQuestions
) -> None:
    """A value has all that was done before it was asked for."""
    family = metrics.open_family("n", "d", MetricKind.GAUGE)
    metric = metrics.open_metric(family, {"a": "b"}, None)
    metrics.change(INCREMENT, metric, 1.0)
    questions.answer = 7
    assert metrics.value(metric) == 7.0
    assert end.sent == [[(INCREMENT, metric, 1.0)]]
    assert questions.asked == [
        OpenFamily(family, "n", "d", 1),
        OpenMetric(metric, family, {"a": "b"}, None),
        ReadMetric(metric),
    ]
    assert family != metric


def test_a_refusal_is_raised(metrics: StubMetrics, questions: FakeQuestions) -> None:
    """As the server said it."""
    questions.answer = InvalidArgument("no")
    with pytest.raises(InvalidArgument, match="no"):
        metrics.open_family("n", "d", MetricKind.GAUGE)


def test_a_forked_child_measures_nothing(metrics: StubMetrics, end: FakeEnd) -> None:
    """It says so; the ends of its copies of handles are nobody's business."""
    end.is_severed = True
    with pytest.raises(Unavailable, match="forked"):
        metrics.change(INCREMENT, 1, 1.0)
    metrics.close(Change.CLOSE_FAMILY, 1)
    metrics.flush()
    assert end.sent == []


def test_the_control_thread_never_waits_for_itself(
    metrics: StubMetrics, questions: FakeQuestions
) -> None:
    """A finalizer that runs there and asks gets an error."""
    seen: list[str] = []

    def ask() -> None:
        with pytest.raises(Unavailable) as caught:
            metrics.value(1)
        seen.append(str(caught.value))

    thread = threading.Thread(target=ask, name=CONTROL_THREAD)
    thread.start()
    thread.join()
    assert seen == ["a finalizer on the control thread cannot wait for the server"]
    assert questions.asked == []
