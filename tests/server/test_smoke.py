# SPDX-License-Identifier: Apache-2.0
"""One serve: start, infer, stop. What has to work on every Python."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

import actorserve
from actorserve import Supervisor

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"


def test_a_server_starts_answers_and_stops(start_server):
    """The main job, through the public door, ends with exit code 0."""
    server = start_server(EXAMPLES)
    status, outputs = server.infer(
        "add_sub",
        {"INPUT0": ("FP32", [4], [1, 2, 3, 4]), "INPUT1": ("FP32", [4], [10, 20, 30, 40])},
    )
    assert status == 200, outputs
    assert outputs == {"OUTPUT0": [11, 22, 33, 44], "OUTPUT1": [-9, -18, -27, -36]}
    assert server.stop() == 0


def test_a_server_is_embedded():
    """The same models answer in process."""

    async def main():
        async with Supervisor(EXAMPLES) as server:
            assert server.failures == {}
            x = np.arange(4, dtype=np.float32)
            outputs = await server.infer("add_sub", {"INPUT0": x, "INPUT1": x})
            assert np.array_equal(outputs["OUTPUT0"], 2 * x)

    asyncio.run(main())


def test_the_package_names_its_version():
    """The version is the package's own."""
    assert actorserve.__version__
