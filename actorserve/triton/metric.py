# SPDX-License-Identifier: Apache-2.0
"""Custom metrics: what a model measures itself, and where the numbers go.

    MetricFamily ─ Metric(labels) ─► increment, set, observe ─► the store
                                     value ◄──────────────────── the store

A stub's store sends changes to the server and does not wait; the server holds the values. Where no
server is (a test, a throw-away stub), a store of this process does the same. A family's metrics
are of use only as long as the model keeps the family itself.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from actorserve.errors import ActorserveError
from actorserve.state.metric_registry import Change, MetricRegistry
from actorserve.state.metrics import MetricKind, check_buckets
from actorserve.triton.error import TritonModelException, exact_str

__all__ = ["Metric", "MetricFamily", "MetricKind", "MetricStore", "set_metric_store"]

# MetricFamily has members MetricKind and Metric, which would hide the names from its annotations.
_Kind = MetricKind

_DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)


class MetricStore(Protocol):
    """Where metrics live. Any thread may use it. Raises ActorserveError with the reason."""

    def open_family(self, name: str, description: str, kind: _Kind) -> int:
        """Return the number of a new handle of a family."""

    def open_metric(self, family: int, labels: dict[str, str], buckets: list[float] | None) -> int:
        """Return the number of a new handle of a metric."""

    def change(self, change: Change, number: int, amount: float) -> None:
        """Take a change, without waiting."""

    def close(self, change: Change, number: int) -> None:
        """Take the end of a handle; called by finalizers, so it must not lock."""

    def value(self, metric: int) -> float:
        """Return the metric's value, with all that this process has changed."""


class LocalStore:
    """A store of this process alone."""

    def __init__(self) -> None:
        self._session = MetricRegistry().session("here")
        self._numbers = itertools.count(1)

    def open_family(self, name: str, description: str, kind: _Kind) -> int:
        """Open it here."""
        number = next(self._numbers)
        self._session.open_family(number, name, description, kind)
        return number

    def open_metric(self, family: int, labels: dict[str, str], buckets: list[float] | None) -> int:
        """Open it here."""
        number = next(self._numbers)
        self._session.open_metric(number, family, labels, buckets)
        return number

    def change(self, change: Change, number: int, amount: float) -> None:
        """Apply it."""
        self._session.apply([(change, number, amount)])

    def close(self, change: Change, number: int) -> None:
        """Apply it."""
        self._session.apply([(change, number, 0.0)])

    def value(self, metric: int) -> float:
        """Return it."""
        return self._session.value(metric)


_store: MetricStore = LocalStore()


def set_metric_store(store: MetricStore | None) -> None:
    """Keep every metric that is made from now on there; None means in this process again."""
    global _store
    _store = LocalStore() if store is None else store


class _FamilyHandle:
    """A family's handle, as its metrics see it: they must not keep the family alive."""

    __slots__ = ("is_deleted", "kind", "number", "store")

    def __init__(self, store: MetricStore, number: int, kind: _Kind) -> None:
        self.store = store
        self.number = number
        self.kind = kind
        self.is_deleted = False


class MetricFamily:
    """A named group of metrics of one kind."""

    __slots__ = ("__weakref__", "_handle")

    MetricKind: ClassVar[type[_Kind]] = MetricKind
    COUNTER: ClassVar[_Kind] = MetricKind.COUNTER
    GAUGE: ClassVar[_Kind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[_Kind] = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: _Kind) -> None:
        """Make a family, or share the one of that name and kind, with its description.

        Raises TritonModelException for a name that cannot be, or is another kind's, TypeError for
        arguments of a wrong type.
        """
        name = exact_str(name, "the name of a MetricFamily")
        description = exact_str(description, "the description of a MetricFamily")
        if not isinstance(kind, _Kind):
            raise TypeError(
                f"kind must be MetricFamily.COUNTER, GAUGE or HISTOGRAM, got {type(kind)}"
            )
        store = _store
        try:
            number = store.open_family(name, description, kind)
        except ActorserveError as error:
            raise TritonModelException(
                f"Error when creating MetricFamily: {error.message}"
            ) from None
        self._handle = _FamilyHandle(store, number, kind)

    def Metric(
        self, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> Metric:
        """Make a metric with these labels, or share the one that has them.

        `buckets` are a histogram's upper bounds, strictly ascending, maybe none. Raises
        TritonModelException.
        """
        checked = _checked_labels(labels)
        bounds = _checked_buckets(buckets, self._handle.kind)
        try:
            number = self._handle.store.open_metric(self._handle.number, checked, bounds)
        except ActorserveError as error:
            raise TritonModelException(f"Error when creating Metric: {error.message}") from None
        return Metric._of(self._handle, number)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it could not be made
            handle = self._handle
            handle.is_deleted = True
            handle.store.close(Change.CLOSE_FAMILY, handle.number)


class Metric:
    """One time series of a family, made by `MetricFamily.Metric`."""

    __slots__ = ("__weakref__", "_family", "_number")

    _family: _FamilyHandle
    _number: int

    def __init__(self) -> None:
        raise TypeError("a Metric is made by MetricFamily.Metric: it has no constructor")

    @classmethod
    def _of(cls, family: _FamilyHandle, number: int) -> Metric:
        metric = cls.__new__(cls)
        metric._family = family
        metric._number = number
        return metric

    def increment(self, value: float) -> None:
        """Add to a counter (0 or more) or a gauge. Raises TritonModelException."""
        amount = _number(value)
        kind = self._family.kind
        if kind is _Kind.COUNTER and not amount >= 0:
            self._refuse("increment", f"a counter only grows, got {amount:g}")
        if kind is _Kind.HISTOGRAM:
            self._refuse("increment", "a histogram has no increment: use observe")
        self._change("increment", Change.INCREMENT, amount)

    def set(self, value: float) -> None:
        """Set a gauge. Raises TritonModelException."""
        amount = _number(value)
        if self._family.kind is not _Kind.GAUGE:
            self._refuse("set", f"only a gauge can be set, this is a {self._kind_name}")
        self._change("set", Change.SET, amount)

    def observe(self, value: float) -> None:
        """Count a value into a histogram's buckets. Raises TritonModelException."""
        amount = _number(value)
        if self._family.kind is not _Kind.HISTOGRAM:
            self._refuse("observe", f"only a histogram observes, this is a {self._kind_name}")
        self._change("observe", Change.OBSERVE, amount)

    def value(self) -> float:
        """Return the value of a counter or gauge, over all processes that have it.

        Asks the server and waits for the answer. Raises TritonModelException.
        """
        if self._family.kind is _Kind.HISTOGRAM:
            self._refuse("get", "a histogram has no single value")
        self._check_family("get")
        try:
            return self._family.store.value(self._number)
        except ActorserveError as error:
            self._refuse("get", error.message)
            raise AssertionError from None

    def _change(self, verb: str, change: Change, amount: float) -> None:
        self._check_family(verb)
        try:
            self._family.store.change(change, self._number, amount)
        except ActorserveError as error:
            self._refuse(verb, error.message)

    @property
    def _kind_name(self) -> str:
        return self._family.kind.name.lower()

    def _check_family(self, verb: str) -> None:
        if self._family.is_deleted:
            self._refuse(verb, _DELETED)

    def _refuse(self, verb: str, reason: str) -> None:
        raise TritonModelException(f"Failed to {verb} metric value: {reason}") from None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            family = self._family
            if not family.is_deleted:  # else its handle took ours along
                family.store.close(Change.CLOSE_METRIC, self._number)


def _number(value: Any) -> float:
    """Return an amount. Raises TypeError for what is no number."""
    if isinstance(value, (str, bytes, bytearray)):
        raise TypeError(f"a metric's value must be a number, got {type(value)}")
    return float(value)


def _checked_labels(labels: Any) -> dict[str, str]:
    """Return labels as a plain dictionary. Raises TritonModelException."""
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    checked = {}
    for name, value in labels.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TritonModelException(
                "Failed to create metric. Labels must be a dictionary. Its keys and values must be "
                f"str, got {type(name)} and {type(value)}"
            )
        checked[exact_str(name, "a label")] = exact_str(value, "a label")
    return checked


def _checked_buckets(buckets: Any, kind: _Kind) -> list[float] | None:
    """Return a histogram's bounds, None for other kinds. Raises TritonModelException."""
    if kind is not _Kind.HISTOGRAM:
        if buckets is not None:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return None
    if buckets is None:
        raise TritonModelException("Failed to create metric. Missing required buckets.")
    if not isinstance(buckets, list):
        raise TritonModelException("Failed to create metric. Buckets must be a list.")
    bounds = _bounds(buckets)
    try:
        check_buckets(bounds)
    except ValueError as error:
        raise TritonModelException(f"Error when creating Metric: {error}") from None
    return bounds


def _bounds(buckets: Sequence[Any]) -> list[float]:
    try:
        return [_number(each) for each in buckets]
    except (TypeError, ValueError):
        raise TritonModelException(
            "Failed to create metric. Buckets must be a list. Its elements must be numbers."
        ) from None
