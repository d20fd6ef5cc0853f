# SPDX-License-Identifier: Apache-2.0
"""What a tree of processes uses, and whether it has grown. Reading is apart from judging."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec
import psutil

from benchmarks import usage

MIB = 1 << 20
LEAST_SAMPLES = 6


class Footprint(msgspec.Struct, frozen=True):
    """One look: private bytes of the first process and of all below it, and their tables.

    `arena_bytes` are those of the supervisor's own segments; `held_blocks` and `in_flight` are
    entries of its tables.
    """

    main_bytes: int
    below_bytes: int
    fds: int
    threads: int
    arena_bytes: int
    held_blocks: int
    in_flight: int

    def line(self) -> str:
        """Return it for a terminal."""
        return (
            f"{self.main_bytes / MIB:5.1f} + {self.below_bytes / MIB:5.1f} MiB, "
            f"{self.fds} fds, {self.threads} threads, arena {self.arena_bytes / MIB:.0f} MiB, "
            f"{self.held_blocks} blocks, {self.in_flight} in flight"
        )


class Limits(msgspec.Struct, frozen=True):
    """What counts as flat: bytes of growth per process tree."""

    main_bytes: int = 12 * MIB
    below_bytes: int = 12 * MIB


def look(pid: int, stats: dict, without: int = 0) -> Footprint:  # type: ignore[type-arg]  # JSON
    """Look at a server by its process and its status; `without` another process and its tree."""
    main_bytes = below_bytes = fds = threads = 0
    left_out = usage.tree_of(without) if without else []
    for each in usage.tree_of(pid):
        if each in left_out:
            continue
        try:
            process = psutil.Process(each)
            used = process.memory_full_info().uss
            fds += process.num_fds()
            threads += process.num_threads()
        except psutil.Error:
            continue
        if each == pid:
            main_bytes = used
        else:
            below_bytes += used
    schedulers = [
        version["scheduler"] for model in stats["models"] for version in model["versions"]
    ]
    return Footprint(
        main_bytes,
        below_bytes,
        fds,
        threads,
        stats["exchange"]["arena"]["segment_bytes"],
        stats["exchange"]["held_blocks"],
        sum(each["in_flight"] + each["queued"] for each in schedulers),
    )


def growth(samples: Sequence[Footprint], limits: Limits) -> list[str]:
    """Return what has grown under load: the median of the last third against the first."""
    if len(samples) < LEAST_SAMPLES:
        return []
    third = len(samples) // 3
    found = []
    for name in ("main_bytes", "below_bytes"):
        first = statistics.median(getattr(each, name) for each in samples[:third])
        last = statistics.median(getattr(each, name) for each in samples[-third:])
        if last - first > getattr(limits, name):
            found.append(f"{name} grew from {first / MIB:.1f} to {last / MIB:.1f} MiB under load")
    return found


def leftovers(before: Footprint, after: Footprint, limits: Limits) -> list[str]:
    """Return what is more at rest than it was at rest before."""
    found = []
    for name in ("main_bytes", "below_bytes"):
        more = getattr(after, name) - getattr(before, name)
        if more > getattr(limits, name):
            found.append(f"{name} grew by {more / MIB:.1f} MiB between two rests")
    for name in ("fds", "threads", "arena_bytes"):
        if getattr(after, name) > getattr(before, name):
            found.append(f"{getattr(before, name)} {name} became {getattr(after, name)}")
    for name in ("held_blocks", "in_flight"):
        if getattr(after, name):
            found.append(f"{getattr(after, name)} {name} are left at rest")
    return found
