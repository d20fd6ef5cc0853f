# SPDX-License-Identifier: Apache-2.0
"""Crawl local pages, no more than so many a second: `python examples/crawler.py [START]`."""

import asyncio
import re
import sys
from pathlib import Path

from actorserve import Actor, ActorSystem, Message


class Fetch(Message[list[str]]):
    page: str


class Fetcher(Actor):
    def __init__(self, pages_per_s: float) -> None:
        self.pause_s = 1 / pages_per_s

    async def receive(self, message: Fetch) -> list[str]:
        read = asyncio.to_thread(Path(message.page).read_text, errors="replace")
        text, _ = await asyncio.gather(read, asyncio.sleep(self.pause_s))
        links = [Path(message.page).parent / link for link in re.findall(r"\]\(([^)#]+)", text)]
        return [str(link) for link in links if link.is_file()]


async def main(start: str) -> None:
    """Print every page that can be reached from the first."""
    async with ActorSystem() as system:
        fetcher = await system.spawn(Fetcher, pages_per_s=20)
        pages = [start]
        for page in pages:  # which grows meanwhile
            print(page)
            links = await fetcher.ask(Fetch(page), timeout_s=10)
            pages += [link for link in dict.fromkeys(links) if link not in pages]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "README.md"))
