# SPDX-License-Identifier: Apache-2.0
"""The models' own metrics: families and series, who holds them, and how long they last. Pure.

    process ─ Session ─ handles ─► Family ─► Series (value, or buckets)
    (one life)                       ▲ claims by holder (an instance, over all its lives)

Whoever asks for a family of a known name and kind gets the one that is there, whichever model made
it; the same is true of a series with the same labels. What is there lasts as long as somebody
holds it:

- A handle that is closed no longer counts. A family's handle takes the handles of its series along.
- A process that dies has closed nothing: what it held is kept in trust for the instance that it
  was a life of. The next life takes over what it opens again, and finds the values where they
  were; what it does not open is kept for as long as the instance is.
- An instance that is taken down for good leaves its trust.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

from actorserve.errors import InvalidArgument
from actorserve.state.metrics import Family, Histogram, Labels, MetricKind, Sample

Holder = Hashable
Key = tuple[tuple[str, str], ...]


class Change(enum.IntEnum):
    """What happens to a handle without an answer."""

    INCREMENT = 0
    SET = 1
    OBSERVE = 2
    CLOSE_METRIC = 3
    CLOSE_FAMILY = 4


class Claims:
    """Who holds a thing: open handles, and what is kept in trust."""

    __slots__ = ("_open", "_trust")

    def __init__(self) -> None:
        self._open = 0
        self._trust: set[Holder] = set()

    def __bool__(self) -> bool:
        return self._open > 0 or bool(self._trust)

    def open(self, holder: Holder) -> None:
        """Count a handle; it takes the holder's trust over."""
        self._open += 1
        self._trust.discard(holder)

    def close(self) -> None:
        """Count a handle out."""
        self._open -= 1

    def entrust(self, holder: Holder) -> None:
        """Count a handle of a dead process out, and keep its claim."""
        self._open -= 1
        self._trust.add(holder)

    def leave(self, holder: Holder) -> None:
        """Drop what is kept for a holder."""
        self._trust.discard(holder)


class Series:
    """One metric: a number, or a histogram."""

    __slots__ = ("claims", "histogram", "labels", "value")

    def __init__(self, labels: Labels, buckets: Sequence[float] | None) -> None:
        self.labels = labels
        self.claims = Claims()
        self.value = 0.0
        self.histogram = None if buckets is None else Histogram(buckets)

    def samples(self) -> Iterator[Sample]:
        """Yield its lines."""
        if self.histogram is None:
            yield Sample("", self.labels, self.value)
        else:
            yield from self.histogram.samples(self.labels)


class MetricFamily:
    """Series of one name and kind, by their labels."""

    __slots__ = ("claims", "description", "kind", "name", "series")

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.claims = Claims()
        self.series: dict[Key, Series] = {}


class MetricRegistry:
    """All families of a server. Names in `reserved` are not for models."""

    def __init__(self, reserved: Iterable[str] = ()) -> None:
        self._reserved = frozenset(reserved)
        self._families: dict[str, MetricFamily] = {}

    def session(self, holder: Holder) -> Session:
        """Return the handles of a new process, which is a life of `holder`."""
        return Session(self, holder)

    def retire(self, holder: Holder) -> None:
        """Drop what is kept for a holder that has no further life."""
        for family in list(self._families.values()):
            family.claims.leave(holder)
            for series in list(family.series.values()):
                series.claims.leave(holder)
                self.sweep(family, series)
            self.sweep(family)

    def family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """Return the family of that name; a new one where there is none.

        Raises InvalidArgument for a name that cannot be one, or that something else has.
        """
        found = self._families.get(name)
        if found is not None and found.kind is kind:
            return found
        if not is_name(name, colons=True):
            raise InvalidArgument(
                f"'{name}' is no name for metrics: expected letters, digits, '_' and ':', and no "
                "digit at first"
            )
        if found is not None:
            raise InvalidArgument(
                f"the metric family '{name}' exists already, with the kind {found.kind.name}"
            )
        self._check_free(name, kind)
        family = self._families[name] = MetricFamily(name, description, kind)
        return family

    def _check_free(self, name: str, kind: MetricKind) -> None:
        """Raise InvalidArgument where a line of the family could be taken for another's."""
        wanted = shown_names(name, kind)
        if not self._reserved.isdisjoint(wanted):
            raise InvalidArgument(f"'{name}' is the name of a metric of the server's own")
        for other in self._families.values():
            if not shown_names(other.name, other.kind).isdisjoint(wanted):
                raise InvalidArgument(
                    f"'{name}' would be taken for the metric family '{other.name}'"
                )

    def sweep(self, family: MetricFamily, series: Series | None = None) -> None:
        """Drop a family or series that nobody holds."""
        if series is not None and not series.claims:
            family.series.pop(tuple(series.labels), None)
        if not family.claims and self._families.get(family.name) is family:
            del self._families[family.name]

    def families(self) -> list[Family]:
        """Return everything as it is shown, by name."""
        return [
            Family(
                family.name,
                family.kind.name.lower(),
                family.description,
                [sample for series in family.series.values() for sample in series.samples()],
            )
            for _, family in sorted(self._families.items())
        ]


class Session:
    """The handles of one process, by the numbers that it gave them."""

    def __init__(self, registry: MetricRegistry, holder: Holder) -> None:
        self._registry = registry
        self._holder = holder
        self._families: dict[int, MetricFamily] = {}
        self._metrics: dict[int, tuple[int, Series]] = {}

    # --- what is answered ------------------------------------------------------------------------

    def open_family(self, number: int, name: str, description: str, kind: MetricKind) -> None:
        """Open a handle of a family. Raises InvalidArgument; see MetricRegistry.family."""
        if number in self._families:
            raise InvalidArgument(f"the family's number {number} is taken")
        family = self._registry.family(name, description, kind)
        family.claims.open(self._holder)
        self._families[number] = family

    def open_metric(
        self,
        number: int,
        family_number: int,
        labels: Mapping[str, str],
        buckets: Sequence[float] | None,
    ) -> None:
        """Open a handle of a series; one with the same labels is shared, with its buckets.

        Raises InvalidArgument for labels or buckets that cannot be.
        """
        family = self._families.get(family_number)
        if family is None or number in self._metrics:
            raise InvalidArgument("its family has been deleted")
        _check_labels(labels, family.kind)
        if (buckets is not None) is not (family.kind is MetricKind.HISTOGRAM):
            raise InvalidArgument("buckets are for histograms, and for all of them")
        key = tuple(sorted(labels.items()))
        series = family.series.get(key)
        if series is None:
            try:
                series = Series(key, buckets)
            except ValueError as error:
                raise InvalidArgument(str(error)) from None
            family.series[key] = series
        series.claims.open(self._holder)
        self._metrics[number] = (family_number, series)

    def value(self, number: int) -> float:
        """Return a series' value. Raises InvalidArgument where there is none."""
        found = self._metrics.get(number)
        if found is None or found[1].histogram is not None:
            raise InvalidArgument("the metric has no value")
        return found[1].value

    # --- what is not -----------------------------------------------------------------------------

    def apply(self, changes: Iterable[tuple[int, int, float]]) -> None:
        """Take changes: (what, the handle's number, the amount), in order.

        What is said of a handle that is closed is dropped: a thread of the model's came late.
        """
        metrics = self._metrics
        for change, number, amount in changes:
            if change == Change.CLOSE_FAMILY:
                self._close_family(number)
                continue
            found = metrics.get(number)
            if found is None:
                continue
            series = found[1]
            if change == Change.CLOSE_METRIC:
                self._close_metric(number)
            elif series.histogram is not None:
                if change == Change.OBSERVE:
                    series.histogram.observe(amount)
            elif change == Change.INCREMENT:
                series.value += amount
            elif change == Change.SET:
                series.value = amount

    def _close_metric(self, number: int) -> None:
        family_number, series = self._metrics.pop(number)
        series.claims.close()
        self._registry.sweep(self._families[family_number], series)

    def _close_family(self, number: int) -> None:
        if number not in self._families:
            return
        for metric, (family_number, _) in list(self._metrics.items()):
            if family_number == number:
                self._close_metric(metric)
        family = self._families.pop(number)
        family.claims.close()
        self._registry.sweep(family)

    def lose(self) -> None:
        """Keep what is open in trust: the process is dead."""
        for _, series in self._metrics.values():
            series.claims.entrust(self._holder)
        for family in self._families.values():
            family.claims.entrust(self._holder)
        self._metrics.clear()
        self._families.clear()


def is_name(text: str, *, colons: bool = False) -> bool:
    """Whether a metric or a label may be called that."""
    plain = text.replace(":", "_") if colons else text
    return plain.isascii() and plain.isidentifier()


def shown_names(name: str, kind: MetricKind) -> set[str]:
    """Return the names of a family's lines."""
    if kind is not MetricKind.HISTOGRAM:
        return {name}
    return {name, f"{name}_bucket", f"{name}_count", f"{name}_sum"}


def _check_labels(labels: Mapping[str, str], kind: MetricKind) -> None:
    for label in labels:
        if not is_name(label) or label.startswith("__"):
            raise InvalidArgument(
                f"'{label}' is no name for a label: expected letters, digits and '_', and neither "
                "a digit nor '__' at first"
            )
        if label == "le" and kind is MetricKind.HISTOGRAM:
            raise InvalidArgument("the label 'le' of a histogram is its buckets' own")
