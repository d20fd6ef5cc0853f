# SPDX-License-Identifier: Apache-2.0
"""A program that owns a group of ranks, prints their pids and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from tests.generation.groups import Group, Home, run_group


async def _wait(group: Group) -> None:
    group.submit(1, 1, 1_000_000_000)
    await group.until(lambda: 1 in group.outputs)
    print(*group.group.pids, flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    options: dict[str, Any] = {"all_reduce": True}
    if sys.argv[1] == "hang":
        options = {"hang_poll": 1, "all_reduce": True}
    run_group(_wait, size=2, options=options, home=Home())
