# SPDX-License-Identifier: Apache-2.0
"""Send images through two processes, one after the other: `python examples/pipeline.py`."""

import asyncio

import numpy as np

from actorserve import Actor, ActorRef, ActorSystem, Message, Process


class Image(Message[float]):
    pixels: np.ndarray


class Measure(Actor):
    def receive(self, message: Image) -> float:
        return float(message.pixels.mean())


class Blur(Actor):
    def __init__(self, following: ActorRef) -> None:
        self.following = following

    def receive(self, message: Image) -> object:
        pixels = message.pixels  # a view of shared memory; what is sent on goes there too
        return self.following.ask(Image((pixels[1:, 1:] + pixels[:-1, :-1]) / 2))


async def main() -> None:
    """Print the brightness of eight images, in their order."""
    async with ActorSystem() as system:
        measure = await system.spawn(Measure, where=Process())
        blurs = [await system.spawn(Blur, measure, where=Process()) for _ in range(2)]
        answers = [blurs[n % 2].ask(Image(np.full((1080, 1920), n, np.float32))) for n in range(8)]
        print(*[await answer for answer in answers])


if __name__ == "__main__":
    asyncio.run(main())
