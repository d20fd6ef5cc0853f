# SPDX-License-Identifier: Apache-2.0
"""Waiting in a loop for what another thread brings about."""

from __future__ import annotations

import asyncio

from actorserve.runtime.news import News


def test_news_between_the_look_and_the_wait_are_not_missed():
    """Another thread makes them just when nobody has entered itself yet, and so tells nobody."""

    async def main() -> None:
        news = News(asyncio.get_running_loop())
        looks = 0

        def holds() -> bool:
            nonlocal looks
            looks += 1
            assert looks > 1 or not news.is_awaited()  # it would be told from now on
            return looks == 1

        await asyncio.wait_for(news.wait_while(holds), 20)
        assert looks >= 2

    asyncio.run(main())
