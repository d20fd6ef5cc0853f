# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C anywhere in a submit: the request is over, and the executor serves on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from actorserve.actors.generation import GenerationResult, SamplingParams
from tests.conftest import wait_until
from tests.generation.asking import LONG, PATIENCE_S, is_idle, short
from tests.generation.conftest import Make


def is_interrupted(function: Callable[[], object], place: int) -> bool:
    """Call a function with a KeyboardInterrupt at its call or return number `place`.

    False where it has not so many.
    """
    seen = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen
        seen += 1
        if seen == place:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
        seen = -1_000_000  # what comes now is not its own
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("params", [short(), LONG])
def test_an_interrupted_submit_leaves_nothing(make: Make, params: SamplingParams):
    """Wherever it comes: nothing stays in flight, and the next request does not wait for ever."""
    executor = make()
    results: list[GenerationResult] = []
    place = 1
    while is_interrupted(lambda: results.append(executor.generate_async([1], params)), place):
        results.clear()  # it may have been there already
        if place % 4 == 0:  # often with an engine that sleeps, and often with one that does not
            wait_until(lambda: is_idle(executor))
        after = executor.generate_async([5], short(2)).result(PATIENCE_S)
        assert after.outputs[0].token_ids == [6, 7]
        place += 1
    assert place > 50
    results.clear()
    wait_until(lambda: is_idle(executor))
