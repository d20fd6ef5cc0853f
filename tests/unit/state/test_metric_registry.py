# SPDX-License-Identifier: Apache-2.0
"""Who shares a family or a series, and how long it lasts."""

from __future__ import annotations

import random

import pytest

from actorserve.errors import InvalidArgument
from actorserve.state.metric_registry import Change, MetricRegistry, Session
from actorserve.state.metrics import MetricKind, number_text

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


def shown(registry: MetricRegistry) -> dict[str, float]:
    """Return every line by its name and labels."""
    return {
        f"{family.name}{sample.suffix}"
        + ",".join(f" {name}={value}" for name, value in sample.labels): sample.value
        for family in registry.families()
        for sample in family.samples
    }


def opened(session: Session, kind: MetricKind = COUNTER, name: str = "n", **labels: str) -> Session:
    """Open family 1 and metric 2 in a session."""
    session.open_family(1, name, "help", kind)
    session.open_metric(2, 1, labels, [1.0] if kind is HISTOGRAM else None)
    return session


def test_equal_series_are_one() -> None:
    """Two instances with the same family and labels add up."""
    registry = MetricRegistry()
    first = opened(registry.session("a"), x="1")
    second = opened(registry.session("b"), x="1")
    first.apply([(Change.INCREMENT, 2, 2.0)])
    second.apply([(Change.INCREMENT, 2, 3.0)])
    assert first.value(2) == second.value(2) == 5
    assert shown(registry) == {"n x=1": 5}


def test_labels_tell_series_apart_whatever_their_order() -> None:
    """They are sorted by name where they are shown."""
    registry = MetricRegistry()
    session = registry.session("a")
    session.open_family(1, "n", "help", GAUGE)
    session.open_metric(2, 1, {"b": "1", "a": "2"}, None)
    session.open_metric(3, 1, {"a": "2", "b": "1"}, None)
    session.open_metric(4, 1, {}, None)
    session.apply([(Change.SET, 2, 4.0), (Change.INCREMENT, 3, -1.0), (Change.SET, 4, 9.0)])
    assert shown(registry) == {"n a=2 b=1".replace(" b", ", b"): 3, "n": 9}


def test_the_first_description_is_kept() -> None:
    """A later one of the same family does not replace it."""
    registry = MetricRegistry()
    registry.session("a").open_family(1, "n", "first", COUNTER)
    registry.session("b").open_family(1, "n", "second", COUNTER)
    assert [family.help for family in registry.families()] == ["first"]


def test_the_first_buckets_are_kept() -> None:
    """A histogram that is there already goes on with what it has."""
    registry = MetricRegistry()
    session = opened(registry.session("a"), HISTOGRAM)
    session.open_metric(3, 1, {}, [5.0, 6.0])
    session.apply([(Change.OBSERVE, 3, 5.5), (Change.OBSERVE, 2, 0.5)])
    assert shown(registry) == {
        "n_count": 2,
        "n_sum": 6.0,
        "n_bucket le=1": 1,
        "n_bucket le=+Inf": 2,
    }


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("n", GAUGE, "exists already, with the kind COUNTER"),
        ("h", COUNTER, "exists already, with the kind HISTOGRAM"),
        ("h_sum", COUNTER, "would be taken for the metric family 'h'"),
        ("own", GAUGE, "the server's own"),
        ("ow", HISTOGRAM, "the server's own"),
        ("", GAUGE, "no name for metrics"),
        ("1a", GAUGE, "no name for metrics"),
        ("a-b", GAUGE, "no name for metrics"),
        ("zażółć", GAUGE, "no name for metrics"),
        ("a\nb", GAUGE, "no name for metrics"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, kind: MetricKind, reason: str) -> None:
    """What is wrong is said, and nothing is left of it."""
    registry = MetricRegistry({"own", "ow_bucket"})
    other = registry.session("a")
    other.open_family(1, "n", "", COUNTER)
    other.open_family(2, "h", "", HISTOGRAM)
    with pytest.raises(InvalidArgument, match=reason):
        registry.session("b").open_family(1, name, "", kind)
    assert [family.name for family in registry.families()] == ["h", "n"]


@pytest.mark.parametrize(
    ("labels", "buckets", "kind", "reason"),
    [
        ({"a-b": ""}, None, GAUGE, "no name for a label"),
        ({"__name__": ""}, None, GAUGE, "no name for a label"),
        ({"a:b": ""}, None, GAUGE, "no name for a label"),
        ({"le": ""}, [], HISTOGRAM, "buckets' own"),
        ({}, [2.0, 1.0], HISTOGRAM, "strictly ascending"),
        ({}, None, HISTOGRAM, "buckets are for histograms"),
        ({}, [], GAUGE, "buckets are for histograms"),
    ],
)
def test_a_metric_that_cannot_be_is_refused(
    labels: dict[str, str], buckets: list[float] | None, kind: MetricKind, reason: str
) -> None:
    """Labels and buckets are checked here too: what comes over a wire may be anything."""
    registry = MetricRegistry()
    session = registry.session("a")
    session.open_family(1, "n", "", kind)
    with pytest.raises(InvalidArgument, match=reason):
        session.open_metric(2, 1, labels, buckets)
    with pytest.raises(InvalidArgument, match="deleted"):
        session.open_metric(2, 9, {}, None)
    with pytest.raises(InvalidArgument):
        session.value(2)


def test_colons_are_for_families() -> None:
    """As in `vllm:requests`."""
    registry = MetricRegistry()
    opened(registry.session("a"), name="vllm:requests")
    assert shown(registry) == {"vllm:requests": 0}


def test_a_family_lasts_as_long_as_anybody_holds_it() -> None:
    """Whoever closes the last handle ends it, and a new one begins at zero."""
    registry = MetricRegistry()
    first, second = opened(registry.session("a")), opened(registry.session("b"))
    first.apply([(Change.INCREMENT, 2, 1.0), (Change.CLOSE_METRIC, 2, 0.0)])
    first.apply([(Change.CLOSE_FAMILY, 1, 0.0)])
    assert shown(registry) == {"n": 1}
    second.apply([(Change.CLOSE_METRIC, 2, 0.0)])
    assert [family.name for family in registry.families()] == ["n"]
    second.apply([(Change.CLOSE_FAMILY, 1, 0.0)])
    assert registry.families() == []
    opened(registry.session("c"), GAUGE)
    assert shown(registry) == {"n": 0}


def test_a_closed_family_takes_its_metrics_along() -> None:
    """Those of the same process; what it says of them afterwards is dropped."""
    registry = MetricRegistry()
    first, second = opened(registry.session("a"), x="1"), opened(registry.session("b"), x="2")
    first.apply([(Change.CLOSE_FAMILY, 1, 0.0), (Change.INCREMENT, 2, 1.0)])
    first.apply([(Change.CLOSE_METRIC, 2, 0.0), (Change.CLOSE_FAMILY, 1, 0.0)])
    assert shown(registry) == {"n x=2": 0}
    assert second.value(2) == 0


def test_values_survive_the_death_of_their_process() -> None:
    """The next life of the instance finds them where they were."""
    registry = MetricRegistry()
    first = opened(registry.session("a"))
    first.apply([(Change.INCREMENT, 2, 4.0)])
    first.lose()
    assert shown(registry) == {"n": 4}
    second = opened(registry.session("a"))
    second.apply([(Change.INCREMENT, 2, 1.0)])
    assert shown(registry) == {"n": 5}
    # It has taken over what was kept: its own handles are all there is now.
    second.apply([(Change.CLOSE_FAMILY, 1, 0.0)])
    assert registry.families() == []


def test_what_the_next_life_does_not_open_is_kept_until_the_instance_ends() -> None:
    """A counter by label does not vanish because its process died before it was asked again."""
    registry = MetricRegistry()
    first = opened(registry.session("a"), x="old")
    first.apply([(Change.INCREMENT, 2, 4.0)])
    first.lose()
    second = opened(registry.session("a"), x="new")
    assert shown(registry) == {"n x=old": 4, "n x=new": 0}
    second.lose()
    registry.retire("a")
    assert registry.families() == []


def test_retiring_one_instance_leaves_the_others() -> None:
    """What another one holds, or another one's dead process held, stays."""
    registry = MetricRegistry()
    dead, live = opened(registry.session("a")), opened(registry.session("b"), x="1")
    dead.lose()
    registry.retire("a")
    registry.retire("nobody")
    assert shown(registry) == {"n x=1": 0}
    live.lose()
    assert shown(registry) == {"n x=1": 0}


@pytest.mark.parametrize("change", [Change.INCREMENT, Change.SET, Change.OBSERVE, 99])
def test_unknown_changes_change_nothing(change: int) -> None:
    """Handles that are not there, kinds that do not fit: a stub's nonsense does no harm."""
    registry = MetricRegistry()
    session = opened(registry.session("a"), HISTOGRAM if change != Change.OBSERVE else GAUGE)
    before = shown(registry)
    session.apply([(change, 2, 1.0), (change, 77, 1.0)])
    assert shown(registry) == before


def test_nothing_is_left_whatever_happens() -> None:
    """Random lives of random processes end with an empty registry."""
    chance = random.Random(3)
    for _ in range(60):
        registry = MetricRegistry()
        sessions: list[tuple[str, Session]] = []
        number = 0
        for _ in range(chance.randrange(40)):
            action = chance.randrange(6)
            if action == 0 or not sessions:
                holder = chance.choice("abc")
                sessions.append((holder, registry.session(holder)))
                continue
            _, session = chance.choice(sessions)
            number += 1
            try:
                if action == 1:
                    session.open_family(
                        number, chance.choice("xyz"), "", chance.choice([*MetricKind])
                    )
                elif action == 2:
                    session.open_metric(number, chance.randrange(number), {"l": "1"}, None)
                else:
                    session.apply([(chance.randrange(5), chance.randrange(number), 1.0)])
            except InvalidArgument:
                continue
            if action == 5:
                session.lose()
        for _, session in sessions:
            session.lose()
        for holder in "abc":
            registry.retire(holder)
        assert registry.families() == []


def test_numbers_of_handles_are_not_reused() -> None:
    """A second family under the same number is a fault of the stub's."""
    session = opened(MetricRegistry().session("a"))
    with pytest.raises(InvalidArgument, match="taken"):
        session.open_family(1, "m", "", GAUGE)
    assert number_text(session.value(2)) == "0"
