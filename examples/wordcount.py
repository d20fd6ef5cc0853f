# SPDX-License-Identifier: Apache-2.0
"""Count words with a pool of processes: `python examples/wordcount.py [FILE …]`."""

import asyncio
import sys
from collections import Counter
from pathlib import Path

from actorserve import Actor, ActorSystem, Message, Process


class CountWords(Message[dict[str, int]]):
    path: str


class WordCounter(Actor):
    def receive(self, message: CountWords) -> dict[str, int]:
        return Counter(Path(message.path).read_text(errors="replace").lower().split())


async def main(paths: list[str], workers: int = 2) -> None:
    """Print the five words that occur most often."""
    async with ActorSystem() as system:
        pool = [await system.spawn(WordCounter, where=Process()) for _ in range(workers)]
        answers = [
            pool[number % workers].ask(CountWords(path)) for number, path in enumerate(paths)
        ]
        total: Counter[str] = Counter()
        for answer in answers:
            total.update(await answer)
    for word, count in total.most_common(5):
        print(f"{count:6}  {word}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or [str(path) for path in Path(__file__).parent.glob("*.py")]))
