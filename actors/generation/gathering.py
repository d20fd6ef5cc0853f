# SPDX-License-Identifier: Apache-2.0
"""Several results: whichever is there first, and batches of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any, TypeVar

from actorserve.actors.generation.request import LoRARequest
from actorserve.actors.generation.result import GenerationResult
from actorserve.actors.generation.sampling_params import SamplingParams
from actorserve.actors.generation.wake import Waiters, Wake, take, wait_in_thread, wake_all
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, InvalidArgument, WaitTimeout
from actorserve.runtime.waiting import limit_of

T = TypeVar("T", SamplingParams, LoRARequest)


def first_completed(
    results: Iterable[GenerationResult], timeout: float | None
) -> Generator[GenerationResult, None, None]:
    """Yield each result once, when it is complete: those that are already at once.

    Nothing is polled: the thread sleeps. Raises WaitTimeout after `timeout` seconds in all.
    """
    limit_s = limit_of(timeout, "timeout")
    end_s = None if limit_s is None else monotonic_s() + limit_s
    waiting = dict.fromkeys(results)  # each once, in their order
    ready: deque[GenerationResult] = deque()
    while waiting:
        ready.extend(each for each in waiting if each.done())
        for result in ready:
            del waiting[result]
        while ready:
            result = ready.popleft()
            result.poll()
            yield result
        if waiting:
            _wait_for_any(list(waiting), end_s, limit_s)


def _wait_for_any(
    results: Sequence[GenerationResult], end_s: float | None, limit_s: float | None
) -> None:
    """Sleep until one of them ends, or looks as if it should. Raises WaitTimeout."""
    waiters: Waiters = []
    feeds = [each._feed for each in results]

    def wake() -> None:
        wakes: list[Wake] = []
        take(waiters, wakes)
        wake_all(wakes)

    for feed in feeds:
        feed.end_waiters.append(wake)
    try:
        while not any(each.is_ended for each in feeds):
            sleep_s = min(
                (limit for each in results if (limit := each._limit_s(end_s)) is not None),
                default=None,
            )
            if wait_in_thread(waiters, lambda: any(e.is_ended for e in feeds), sleep_s):
                return
            if end_s is not None and monotonic_s() >= end_s:
                raise WaitTimeout(f"none of {len(results)} requests was finished in {limit_s:g} s")
            for each in results:
                each._check_wait(None, None)
    finally:
        for feed in feeds:
            if wake in feed.end_waiters:
                feed.end_waiters.remove(wake)


def as_batch(prompts: Any) -> tuple[list[Any], bool]:
    """Return prompts as a list of them, and whether it was a single one that was given."""
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, (list, tuple)):
        dimensions = getattr(prompts, "ndim", None)
        if dimensions not in (1, 2):
            raise InvalidArgument(
                f"prompts are {type(prompts).__name__}, expected a prompt (a text, a list or an"
                " array of token ids) or a list of prompts"
            )
        return ([prompts], True) if dimensions == 1 else (list(prompts), False)
    if not len(prompts):
        raise InvalidArgument("there is no prompt: expected a prompt, or a list of prompts")
    is_single = not isinstance(prompts[0], (str, list, tuple)) and not getattr(
        prompts[0], "ndim", 0
    )
    return ([prompts], True) if is_single else (list(prompts), False)


def each_of(name: str, value: T | Sequence[T | None] | None, count: int) -> list[T | None]:
    """Return one value for each of `count` prompts. Raises InvalidArgument for another number."""
    if not isinstance(value, (list, tuple)):
        return [value] * count  # type: ignore[list-item]  # a single one, then
    if len(value) != count:
        raise InvalidArgument(f"there are {count} prompts and {len(value)} {name}")
    return list(value)


def cancel_all(results: Iterable[GenerationResult]) -> None:
    """End what nobody waits for any more."""
    for result in results:
        result.cancel()


def raise_first(errors: Iterable[ActorserveError | None]) -> None:
    """Raise the first error that is one."""
    for error in errors:
        if error is not None:
            raise error
