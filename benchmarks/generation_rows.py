# SPDX-License-Identifier: Apache-2.0
"""The rows of the generation executor, and which section finds them."""

from __future__ import annotations

from benchmarks.generation import BARE, MODEL_STREAMS, STREAMS
from benchmarks.generation_peers import CONNECTION, ZMQ
from benchmarks.rows import KILO, Row, Section, Target

MICRO = 1e6

_ROAD_TARGETS = {
    256: (
        Target(5.0, peer=CONNECTION, note="5x pickle over multiprocessing.connection"),
        Target(3.0, peer=ZMQ, note="3x pyzmq with msgpack"),
    )
}


def road_rows() -> tuple[Row, ...]:
    """Return two rows for each number of streams with the scripted engine."""
    found = []
    for streams in STREAMS:
        title = f"tokens of {streams} stream{'s' if streams > 1 else ''}, scripted engine"
        name = f"generation-{streams}"
        found.append(Row(name, title, "k/s", _ROAD_TARGETS.get(streams, ()), scale=KILO))
        found.append(Row(f"{name}-cpu", f"{title}: CPU a token", "µs"))
    return tuple(found)


def model_rows() -> tuple[Row, ...]:
    """Return a row for each number of streams with TinyGPT."""
    target = Target(0.9, peer=BARE, note="0.9x the bare loop")
    return tuple(
        Row(
            f"generation-tinygpt-{streams}",
            f"tokens of {streams} stream{'s' if streams > 1 else ''}, TinyGPT",
            "k/s",
            (target,),
            scale=KILO,
        )
        for streams in MODEL_STREAMS
    )


SUBMIT_ROWS = (
    Row("generation-submit-p50", "submit, p50", "µs", scale=MICRO),
    Row(
        "generation-submit-most",
        "submit, the longest of 2 000",
        "µs",
        (Target(1000.0, at_least=False),),
        scale=MICRO,
    ),
    Row(
        "generation-idle",
        "executor and rank, idle",
        "% CPU",
        (Target(0.5, at_least=False),),
    ),
)

SECTIONS: tuple[Section, ...] = (
    Section("benchmarks.generation:scripted", road_rows(), 400.0),
    Section("benchmarks.generation:tinygpt", model_rows(), 200.0),
    Section("benchmarks.generation:submit", SUBMIT_ROWS),
)
