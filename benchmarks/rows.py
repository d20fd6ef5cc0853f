# SPDX-License-Identifier: Apache-2.0
"""What is measured and shown: the rows, their targets, and which section finds them.

The targets are those of the design. `recorded` is what Triton Server 2.51 with its Python backend
did on a machine of this kind (2 cores, load generator on the same cores, medians of noisy runs):
it cannot run in the same run, so it is no peer but a figure to compare with.
"""

from __future__ import annotations

import msgspec


class Target(msgspec.Struct, frozen=True):
    """A bound for the median in the row's unit or, with `peer`, for its ratio to that peer's."""

    limit: float
    at_least: bool = True
    peer: str = ""
    note: str = ""


class Row(msgspec.Struct, frozen=True):
    """One row. Findings are multiplied by `scale` to be in `unit`."""

    name: str
    title: str
    unit: str
    targets: tuple[Target, ...] = ()
    recorded: str = ""
    scale: float = 1.0


class Section(msgspec.Struct, frozen=True):
    """Rows that are measured together by `entry` (module:function), within `limit_s`."""

    entry: str
    rows: tuple[Row, ...]
    limit_s: float = 120.0


PEERS = frozenset(
    (
        "C eventfd",
        "Python eventfd",
        "mp.Queue",
        "mp.Pipe",
        "pyzmq",
        "memcpy",
        "lane round trip",
        "mosec",
        "with 1 instance",
        "Pykka",
        "xoscar",
        "ThreadPoolExecutor",
        "ProcessPoolExecutor",
        "mp.connection",
        "pyzmq batched",
        "bare loop",
        "host arena",
    )
)
"""Labels that our figure is set against; any other label is a part of it, or goes with it."""

KILO = 1e-3
LOOPS = ("asyncio", "uvloop")
TRITON_IN_PROCESS_16_MIB_PER_S = 103
TRITON_HTTP_4_B_PER_S = 3800
TRITON_HTTP_1_MIB_PER_S = 306
TRITON_HTTP_16_MIB_PER_S = 12
TRITON_STREAM_PER_S = 3700


def _embedded_small(loop: str) -> tuple[Row, ...]:
    title = f"embedded infer 4 B, {{}}, {loop}"
    return (
        Row(
            f"infer-4b-1-{loop}",
            title.format("1 outstanding, p50"),
            "µs",
            (Target(2.0, False, "lane round trip"),),
            "250-300 µs",
        ),
        Row(
            f"infer-4b-8-{loop}",
            title.format("8 outstanding"),
            "k/s",
            recorded="4.2-4.8 k/s",
            scale=KILO,
        ),
        Row(
            f"infer-4b-32-{loop}",
            title.format("32 outstanding"),
            "k/s",
            (Target(25.0),),
            "4.2-4.8 k/s (8)",
            KILO,
        ),
        Row(f"infer-4b-cpu-{loop}", title.format("CPU a request"), "µs"),
    )


def _embedded_large(loop: str) -> tuple[Row, ...]:
    title = f"embedded infer 16 MiB, {{}}, {loop}"
    target = Target(3.0 * TRITON_IN_PROCESS_16_MIB_PER_S, note="3x Triton")
    return (
        Row(f"infer-16m-1-{loop}", title.format("1 outstanding"), "/s", (target,), "97 /s"),
        Row(f"infer-16m-8-{loop}", title.format("8 outstanding"), "/s", (target,), "93-103 /s"),
    )


SECTIONS: tuple[Section, ...] = (
    Section(
        "benchmarks.lanes:round_trip",
        (
            Row(
                "round-trip",
                "lane round trip 64 B, parked, two cores",
                "µs",
                (Target(2.0, False, "C eventfd"),),
            ),
        ),
    ),
    Section(
        "benchmarks.lanes:one_way",
        (
            Row(
                "one-way-raw",
                "one way 64 B, raw frames",
                "k/s",
                (Target(500), Target(4.0, peer="mp.Queue"), Target(0.9, peer="pyzmq")),
                scale=KILO,
            ),
            Row(
                "one-way-typed",
                "one way 64 B, typed messages",
                "k/s",
                (Target(300), Target(2.5, peer="mp.Queue")),
                scale=KILO,
            ),
        ),
        180.0,
    ),
    Section(
        "benchmarks.lanes:arrays",
        (
            Row(
                "arrays",
                "arrays of 16 MiB through an arena",
                "GB/s",
                (Target(0.9, peer="memcpy"),),
            ),
        ),
    ),
    Section(
        "benchmarks.infer:small",
        tuple(row for loop in LOOPS for row in _embedded_small(loop)),
        180.0,
    ),
    Section(
        "benchmarks.infer:large",
        tuple(row for loop in LOOPS for row in _embedded_large(loop)),
        180.0,
    ),
    Section(
        "benchmarks.http_serving:small",
        (
            Row(
                "http-4b-8",
                "HTTP identity 4 B, 8 clients",
                "k/s",
                (
                    Target(2 * TRITON_HTTP_4_B_PER_S / 1000, note="2x Triton"),
                    Target(2.0, peer="mosec"),
                ),
                "3.2-3.8 k/s",
                KILO,
            ),
            Row("http-4b-p99", "HTTP identity 4 B, 8 clients, p99", "ms", scale=KILO),
            Row("http-4b-cpu", "HTTP identity 4 B, CPU a request", "µs"),
        ),
        180.0,
    ),
    Section(
        "benchmarks.http_serving:large",
        (
            Row(
                "http-1m-8",
                "HTTP identity 1 MiB, 8 clients",
                "/s",
                (Target(2 * TRITON_HTTP_1_MIB_PER_S, note="2x Triton"),),
                "299-306 /s",
            ),
            Row(
                "http-16m-8",
                "HTTP identity 16 MiB, 8 clients",
                "/s",
                (Target(2 * TRITON_HTTP_16_MIB_PER_S, note="2x Triton"),),
                "12-12.8 /s",
            ),
        ),
        180.0,
    ),
    Section(
        "benchmarks.sse_serving:streams",
        (
            Row(
                "sse-1",
                "HTTP stream of 4 B responses, 1 client",
                "k/s",
                (Target(5 * TRITON_STREAM_PER_S / 1000, note="5x Triton"),),
                "3.7 k/s",
                KILO,
            ),
            Row(
                "sse-64",
                "HTTP streams of 4 B responses, 64 clients",
                "k/s",
                (Target(5 * TRITON_STREAM_PER_S / 1000, note="5x Triton"),),
                "3.7 k/s",
                KILO,
            ),
        ),
    ),
    Section(
        "benchmarks.restart:after_kill",
        (
            Row("restart-noticed", "stub killed: death noticed", "ms", (Target(10, False),)),
            Row("restart-ready", "stub killed: answers again", "ms", (Target(50, False),)),
        ),
    ),
    Section(
        "benchmarks.loading:load",
        (
            Row("load-1", "load of 1 model, zygote included", "s", (Target(0.4, False),)),
            Row("start-1", "command to ready, 1 model", "s", recorded="1.5 s"),
            Row("load-43", "load of 43 models", "s", (Target(10, False),), "44 s"),
        ),
        180.0,
    ),
    Section(
        "benchmarks.memory:footprint",
        (
            Row(
                "memory-stub",
                "private memory of an extra stub (USS)",
                "MiB",
                (Target(6, False),),
                "16.5 MiB",
            ),
            Row(
                "threads",
                "supervisor's threads with 8 instances",
                "",
                (Target(1.0, False, "with 1 instance"),),
                "307 (1 instance: 62)",
            ),
            Row("idle-cpu", "idle CPU, supervisor and 4 stubs", "%", (Target(0.5, False),)),
        ),
    ),
)
