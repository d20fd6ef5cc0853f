# SPDX-License-Identifier: Apache-2.0
"""What a type checker says of actors: an ask has the type of its message's answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CODE = """
from actorserve import Actor, ActorRef, ActorSystem, Answer, Message, Process, Thread

class Add(Message[int]):
    a: int
    b: int = 0

class Adder(Actor):
    def receive(self, message: Add) -> int:
        return message.a + message.b

async def use(system: ActorSystem) -> None:
    ref: ActorRef = await system.spawn(Adder, where=Process())
    number: int = await ref.ask(Add(1, 2))
    again: int = ref.ask(Add(1)).result()
    at_once: int = await ref.ask_nowait(Add(1), timeout_s=1)
    items: list[int] = [item async for item in ref.stream(Add(1))]
    more: list[int] = list(ref.stream(Add(1)))
    told: Answer[None] = ref.tell(Add(1), timeout_s=0.5)
    await told
    ref.tell_nowait(Add(1))
    gone: Answer[None] = ref.stop(drain=False, timeout_s=None)
    await gone
    await system.stop(timeout_s=None)

def use_plainly() -> None:
    with ActorSystem.start() as system:
        place: Process | Thread = Thread()
        ref: ActorRef = system.spawn(Adder, where=place, name="adder", mailbox=5).result(1)
        ref.tell(Add(1)).result(timeout_s=1)
        number: int = ref.ask(Add(1, 2), timeout_s=1.0).result()
        for item in ref.stream(Add(1), timeout_s=1):
            more: int = item
        ref.stop().result()
        failed: bool = ref.ask(Add(1)).has_failed()

class Parent(Actor):
    async def receive(self, message: Add) -> int:
        child: ActorRef = await self.context.spawn(Adder)
        peer: ActorRef = await self.context.system.spawn(Adder, where=Process())
        return await child.ask(message) + await peer.ask(message)

async def use_wrongly(ref: ActorRef, system: ActorSystem) -> None:
    pass
"""
WRONG = {
    "    text: str = await ref.ask(Add(1, 2))": 'expected "Message[str]"',
    "    Add('one')": "incompatible type",
    "    Add(1).a = 2": "read-only",
    "    await ref.ask(3)": "incompatible type",
    "    number: str = ref.ask(Add(1)).result()": "ncompatible type",
    "    words: list[str] = list(ref.stream(Add(1)))": "ncompatible type",
    "    await ref.tell(3)": "incompatible type",
    "    await ref.stop(drain=1)": "incompatible type",
    "    await system.spawn(Adder, where=3)": "incompatible type",
    "    await system.spawn(Add)": "incompatible type",
}


def test_a_type_checker_follows_messages_to_their_answers(tmp_path: Path):
    """What is right passes in strict mode; each mistake is found, and nothing else."""
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(CODE)
    lines = [*WRONG]
    (tmp_path / "wrong.py").write_text(CODE + "\n".join(lines) + "\n")
    first = len(CODE.splitlines()) + 1
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes"]
        + [str(tmp_path / name) for name in ("right.py", "wrong.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=55,
        check=False,
    )
    assert "right.py" not in done.stdout
    found = {
        int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line
    }
    assert sorted(found) == list(range(first, first + len(lines)))
    for number, part in enumerate(WRONG.values(), start=first):
        assert part in found[number]
