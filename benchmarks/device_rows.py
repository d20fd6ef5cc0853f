# SPDX-License-Identifier: Apache-2.0
"""The rows of tensors on a device, and which section finds them."""

from __future__ import annotations

from benchmarks.devices import COST, HANDOFF, HOST_ARENA
from benchmarks.rows import Row, Section, Target

SECTIONS: tuple[Section, ...] = (
    Section(
        "benchmarks.devices:handoff",
        (
            Row(
                HANDOFF,
                "call with 64 MiB on an emulated device, by reference",
                "µs",
                (Target(0.05, False, HOST_ARENA),),
            ),
            Row(
                COST,
                "a reference from stub to stub and its release back: Python, in one process",
                "µs",
                (Target(30.0, False),),
            ),
        ),
        180.0,
    ),
)
