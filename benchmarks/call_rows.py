# SPDX-License-Identifier: Apache-2.0
"""The rows of calls between models and of streams, and which section finds them."""

from __future__ import annotations

from benchmarks.calls import CALLERS, CALLS, FANS, OUTSTANDING, STREAMS
from benchmarks.rows import KILO, Row, Section, Target

TRITON_REQUESTS_WITH_1_CALL = 1.0
TRITON_CALLS_BY_8 = 1.9
"""In thousands per second."""

TRITON_FAN_OUTS_OF_32 = 26

_WAYS = {"sync": "one after the other", "async": "at once"}
_TARGETS = {
    1: Target(3 * TRITON_REQUESTS_WITH_1_CALL, note="3x Triton"),
    8: Target(2 * TRITON_CALLS_BY_8, note="2x Triton"),
}
_RECORDED = {1: "1.1 k/s (8 clients)", 8: "1.8-1.9 k/s"}
_FANS_RECORDED = {32: "26 /s while its stub lives", 512: "its stub dies"}


def bls_rows() -> tuple[Row, ...]:
    """Return the rows for each way of calling and number of calls."""
    return tuple(row for form in CALLERS for count in CALLS for row in _bls_rows(form, count))


def _bls_rows(form: str, count: int) -> tuple[Row, ...]:
    name = f"bls-{form}-{count}"
    calls = f"{count} calls each {_WAYS[form]}" if count > 1 else f"1 call each, {form}"
    recorded = _RECORDED[count] if form == "sync" else ""
    return (
        Row(name, f"{OUTSTANDING} requests, {calls}", "k/s", (_TARGETS[count],), recorded, KILO),
        Row(f"{name}-cpu", f"{OUTSTANDING} requests, {calls}: CPU a call", "µs"),
    )


def stream_rows() -> tuple[Row, ...]:
    """Return the rows for each number of streams."""
    return tuple(row for count in STREAMS for row in _stream_rows(count))


def _stream_rows(count: int) -> tuple[Row, ...]:
    name = f"stream-{count}"
    title = f"streamed responses, embedded, {count} stream{'s' if count > 1 else ''}"
    return (
        Row(name, title, "k/s", (Target(100.0),), "3.7 k/s (gRPC)", KILO),
        Row(f"{name}-cpu", f"{title}: CPU a response", "µs"),
    )


def fan_out_rows() -> tuple[Row, ...]:
    """Return the rows for each number of streams that a request opens."""
    return tuple(row for count in FANS for row in _fan_out_rows(count))


def _fan_out_rows(count: int) -> tuple[Row, ...]:
    name, title = f"fan-out-{count}", f"requests that open {count} streams at once"
    target = Target(3.0 * TRITON_FAN_OUTS_OF_32, note="3x Triton")
    return (
        Row(name, title, "/s", (target,) if count == 32 else (), _FANS_RECORDED[count]),
        Row(f"{name}-cpu", f"{title}: CPU a stream", "µs"),
    )


SECTIONS: tuple[Section, ...] = (
    Section("benchmarks.calls:calls", bls_rows(), 180.0),
    Section("benchmarks.calls:streams", stream_rows()),
    Section("benchmarks.calls:fan_out", fan_out_rows(), 180.0),
)
