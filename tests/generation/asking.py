# SPDX-License-Identifier: Apache-2.0
"""What the tests of executors ask for, and how they look at answers."""

from __future__ import annotations

from actorserve.actors.generation import GenerationExecutor, GenerationResult, SamplingParams

LONG = SamplingParams(max_tokens=1_000_000)
PATIENCE_S = 30.0


def short(count: int = 4) -> SamplingParams:
    """Ask for a few tokens."""
    return SamplingParams(max_tokens=count)


def tokens_of(result: GenerationResult, seq: int = 0) -> list[int]:
    """Return the tokens of one sequence."""
    return result.outputs[seq].token_ids


def is_idle(executor: GenerationExecutor) -> bool:
    """Whether nothing is in flight."""
    return executor.stats().in_flight == 0
