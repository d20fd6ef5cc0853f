# SPDX-License-Identifier: Apache-2.0
"""A stub that calls other models has its next request already: nothing is lost, nothing hangs."""

from __future__ import annotations

import asyncio

import pytest

from actorserve.errors import Unavailable
from tests.server.calling_models import DOUBLE, ask, serve, write

CALLER = """
def execute(self, requests):
    out = []
    for r in requests:
        x = read(r)
        if x[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        out.append(passed_on(call("NEXT", x).exec()))
    return out
"""
CALLER_ASYNC = CALLER.replace("def execute", "async def execute").replace(
    'call("NEXT", x).exec()', 'await call("NEXT", x).async_exec()'
)
FORMS = pytest.mark.parametrize("body", [CALLER, CALLER_ASYNC], ids=["exec", "async_exec"])


@FORMS
def test_many_requests_of_a_caller_are_answered_in_their_order(repository, body):
    """Whether the stub is asleep or not when its next request comes."""
    write(repository, "double", DOUBLE)
    write(repository, "caller", body.replace("NEXT", "double"))

    async def test(server):
        ended: list[float] = []

        async def one(number: float) -> None:
            assert await ask(server, "caller", number) == [2 * number]
            ended.append(number)

        for count in (1, 2, 3, 200):
            ended.clear()
            await asyncio.gather(*[one(float(number)) for number in range(count)])
            assert ended == list(range(count))

    serve(repository, test)


@FORMS
def test_a_request_that_was_sent_ahead_survives_the_stub(repository, body):
    """The one that kills it fails; those behind it are served by the next stub."""
    write(repository, "double", DOUBLE)
    write(repository, "caller", body.replace("NEXT", "double"))

    async def test(server):
        assert await ask(server, "caller", 1) == [2]  # from now on it is known to call others
        answers = await asyncio.gather(
            *[ask(server, "caller", number) for number in (1, -1, 2, 3, -1, 4)],
            return_exceptions=True,
        )
        assert [each for each in answers if not isinstance(each, Unavailable)] == [
            [2],
            [4],
            [6],
            [8],
        ]

    serve(repository, test, restart_backoff_s=(0.0, 0.0))


@FORMS
def test_a_circle_is_seen_whatever_was_sent_ahead(repository, body):
    """A model that calls itself without a free instance gets its error; all others their turn."""
    write(repository, "self", body.replace("NEXT", "self"))

    async def test(server):
        answers = await asyncio.gather(
            *[ask(server, "self", number) for number in range(6)], return_exceptions=True
        )
        assert all(isinstance(each, Unavailable) for each in answers), answers
        assert all("can never be served" in str(each) for each in answers)

    serve(repository, test)
