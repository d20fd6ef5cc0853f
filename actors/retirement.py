# SPDX-License-Identifier: Apache-2.0
"""The end of what is taken out of service: requests end first, but not all of them would.

    waits ──► everything has ended
      └── nothing came for `grace_s` of a request whose sender the model has kept ──► an error

What is queued, or in the hands of `execute`, is waited for as long as it takes: it has limits of
its own. A sender that was kept has none, and its model may have forgotten it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from actorserve.actors.response_factory import ResponseFactory
from actorserve.errors import Unavailable

LEAST_GRACE_S = 0.05

_log = logging.getLogger("actorserve")


async def all_ended(
    waits: Coroutine[None, None, None],
    kept: Callable[[], list[ResponseFactory]],
    grace_s: float,
    what: str,
) -> None:
    """Wait, and fail those that are kept and of which nothing came for `grace_s`.

    `kept` returns the requests that have outlived their batch; `what` is for people.
    """
    over = asyncio.ensure_future(waits)
    try:
        before = _heard_of(kept())
        while not (await asyncio.wait([over], timeout=max(LEAST_GRACE_S, grace_s)))[0]:
            left = kept()
            stalled = [each for each in left if before.get(each.key) == _heard(each)]
            if stalled:
                _fail(stalled, grace_s, what)
            before = _heard_of(left)
        over.result()
    finally:
        over.cancel()


def _heard_of(kept: list[ResponseFactory]) -> dict[int, tuple[int, int]]:
    return {each.key: _heard(each) for each in kept}


def _heard(factory: ResponseFactory) -> tuple[int, int]:
    """Return how many responses have come, and how many the client has taken."""
    return factory.responses, factory.taken


def _fail(stalled: list[ResponseFactory], grace_s: float, what: str) -> None:
    listening = [each for each in stalled if not each.is_gone]
    if listening:
        _log.warning(
            "%s is taken out of service: requests=%d whose response senders are kept, and of which "
            "nothing came for %g s, are failed",
            what,
            len(listening),
            grace_s,
        )
    error = Unavailable(
        f"{what} is taken out of service, and the response sender that it has kept sent nothing "
        f"for {grace_s:g} s"
    )
    for each in listening:
        each.expire(error)
    for place in {each.place for each in stalled if each.place is not None}:
        place.disown()
