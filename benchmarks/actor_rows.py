# SPDX-License-Identifier: Apache-2.0
"""The rows of the actor framework, and which section finds them."""

from __future__ import annotations

from benchmarks.actor_load import OUTSTANDING, TASKS, THREADS
from benchmarks.rows import KILO, Row, Section

CASES = {
    "loop": ("an actor in the loop", f"{TASKS} tasks"),
    "thread": ("an actor in a thread, from a thread", f"{THREADS} threads"),
    "process": ("an actor in a process, from a loop", f"{TASKS} tasks"),
    "process-sync": ("an actor in a process, from a thread", f"{THREADS} threads"),
}
"""What is asked from where, and who the many senders are."""

PLACES = ("loop", "thread", "process")
ARRAY_WINDOWS = (1, 4)


def ask_rows(case: str) -> tuple[Row, ...]:
    """Return a case's rows: p50 and p99 alone, then the rates."""
    whom, senders = CASES[case]
    name, title = f"actors-{case}", f"ask {whom}: {{}}"
    return (
        Row(f"{name}-p50", title.format("1 outstanding, p50"), "µs"),
        Row(f"{name}-p99", title.format("1 outstanding, p99"), "µs"),
        Row(f"{name}-pipelined", title.format(f"{OUTSTANDING} outstanding"), "k/s", scale=KILO),
        Row(
            f"{name}-senders",
            title.format(senders),
            "k/s",
            scale=KILO,
        ),
    )


def tell_rows() -> tuple[Row, ...]:
    """Return a row of tells for each place."""
    return tuple(
        Row(f"actors-tell-{place}", f"tell an actor in a {place}", "k/s", scale=KILO)
        for place in PLACES
    )


def stream_rows() -> tuple[Row, ...]:
    """Return a row of streamed items for each place."""
    return tuple(
        Row(f"actors-stream-{place}", f"stream of an actor in a {place}, items", "k/s", scale=KILO)
        for place in PLACES
    )


def array_rows() -> tuple[Row, ...]:
    """Return a row of large arrays for each number of outstanding asks."""
    title = "ask an actor in a process about 16 MiB: {} outstanding"
    return tuple(
        Row(f"actors-array-{window}", title.format(window), "GB/s") for window in ARRAY_WINDOWS
    )


SECTIONS: tuple[Section, ...] = (
    Section("benchmarks.actors:in_loop", ask_rows("loop")),
    Section("benchmarks.actors:in_thread", ask_rows("thread")),
    Section("benchmarks.actors:in_process", ask_rows("process")),
    Section("benchmarks.actors:in_process_from_thread", ask_rows("process-sync")),
    Section("benchmarks.actor_flow:tells", tell_rows()),
    Section("benchmarks.actor_flow:streams", stream_rows()),
    Section("benchmarks.actor_flow:arrays", array_rows()),
)
