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


def bls_rows() -> tuple[Row, ...]:
    """Return a row for each way of calling and number of calls."""
    return tuple(
        Row(
            f"bls-{form}-{count}",
            f"calls: {OUTSTANDING} requests, {count} call{'s' if count > 1 else ''} each"
            + (f" {_WAYS[form]}" if count > 1 else f", {form}"),
            "k/s",
            (_TARGETS[count],),
            _RECORDED[count] if form == "sync" else "",
            KILO,
        )
        for form in CALLERS
        for count in CALLS
    )


def stream_rows() -> tuple[Row, ...]:
    """Return a row for each number of streams."""
    return tuple(
        Row(
            f"stream-{count}",
            f"streamed responses, embedded, {count} stream{'s' if count > 1 else ''}",
            "k/s",
            (Target(100.0),),
            "3.7 k/s (gRPC)",
            KILO,
        )
        for count in STREAMS
    )


def fan_out_rows() -> tuple[Row, ...]:
    """Return a row for each number of streams that a request opens."""
    targets = {32: (Target(3.0 * TRITON_FAN_OUTS_OF_32, note="3x Triton"),)}
    recorded = {32: "26 /s while its stub lives", 512: "its stub dies"}
    return tuple(
        Row(
            f"fan-out-{count}",
            f"fan-out: requests that open {count} streams at once",
            "/s",
            targets.get(count, ()),
            recorded[count],
        )
        for count in FANS
    )


SECTIONS: tuple[Section, ...] = (
    Section("benchmarks.calls:calls", bls_rows()),
    Section("benchmarks.calls:streams", stream_rows()),
    Section("benchmarks.calls:fan_out", fan_out_rows(), 180.0),
)
