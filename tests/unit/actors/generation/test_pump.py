# SPDX-License-Identifier: Apache-2.0
"""Turns of the pump over the scripted engine, with a clock of the test's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from actorserve.actors.generation.driver import Follower
from actorserve.actors.generation.engines.scripted import Scripted
from actorserve.actors.generation.pump import Pump
from actorserve.errors import InternalError
from actorserve.wire.generation import (
    Abort,
    Call,
    Close,
    GenRequest,
    Output,
    Sampling,
    Step,
    Submit,
)


class Notes:
    """A sink that notes everything."""

    def __init__(self) -> None:
        self.all: list[Output] = []
        self.batches = 0
        self.snapshots: list[dict[str, Any]] = []
        self.events: list[tuple[int, list[Any]]] = []
        self.calls: list[tuple[int, Any, str | None]] = []

    def outputs(self, outputs: list[Output]) -> None:
        self.batches += 1
        self.all += outputs

    def stats(self, snapshots: list[dict[str, Any]], dropped: int) -> None:
        self.snapshots += snapshots

    def kv_events(self, first: int, events: list[Any]) -> None:
        self.events.append((first, events))

    def call_ended(self, number: int, result: Any, error: str | None) -> None:
        self.calls.append((number, result, error))

    def tokens(self, number: int) -> list[int]:
        return [token for each in self.all if each.id == number for token in each.tokens]

    def finals(self, number: int) -> list[str | None]:
        return [each.finish for each in self.all if each.id == number and each.final]


class World:
    """A pump, its engine and its clock."""

    def __init__(self, options: dict[str, Any] | None = None, **fields: Any) -> None:
        self.now_s = 100.0
        self.notes = Notes()
        self.engine = Scripted(**(options or {}))
        self.engine.start(0, None)
        self.pump = Pump(self.engine, self.notes, clock=lambda: self.now_s, **fields)

    def submit(self, number: int, max_tokens: int = 3, **fields: Any) -> None:
        extra = fields.pop("extra", None)
        sampling = Sampling(max_tokens=max_tokens, **fields.pop("sampling", {}))
        self.pump.take(Submit([GenRequest(number, [number], sampling, extra=extra, **fields)]))

    def run(self, most: int = 1000) -> None:
        """Turn until there is nothing to do."""
        for _ in range(most):
            if not self.pump.turn():
                return
        pytest.fail("it never rests")


def test_a_turn_brings_one_batch_for_all():
    """What an iteration brings all requests goes out together."""
    world = World()
    for number in range(10):
        world.submit(number)
    world.run()
    assert world.notes.batches == 3
    assert all(world.notes.tokens(n) == [n + 1, n + 2, n + 3] for n in range(10))
    assert all(world.notes.finals(n) == ["length"] for n in range(10))
    assert world.pump.idle_s() is None


def test_capacity_holds_requests_back():
    """No more run than there are slots, and all get their turn."""
    world = World({"slots": 2})
    for number in range(5):
        world.submit(number)
    world.pump.turn()
    assert world.pump.stats().admission.running == 2
    world.run()
    assert all(world.notes.finals(n) == ["length"] for n in range(5))


def test_tokens_of_context_hold_requests_back():
    """A request needs room for its prompt and all that it may generate."""
    world = World({"kv_tokens": 10})
    for number in range(3):
        world.submit(number, max_tokens=4)
    world.pump.turn()
    assert world.pump.stats().admission.running == 2


def test_an_abort_is_not_stuck_behind_requests():
    """With everything full and a thousand waiting, the running one is ended next."""
    world = World({"slots": 1})
    world.submit(0, max_tokens=10_000)
    world.pump.turn()
    for number in range(1, 1000):
        world.submit(number, max_tokens=10_000)
    world.pump.take(Abort([0, 500]))
    world.pump.turn()
    world.pump.turn()
    assert world.notes.finals(0) == ["cancelled"]
    assert world.notes.finals(500) == ["cancelled"]
    assert "add 500" not in world.engine.order


def test_a_refused_request_has_an_error():
    """What `add` raises as RequestError is that request's final output."""
    world = World()
    world.submit(1, extra={"reject": "too odd"})
    world.submit(2)
    world.run()
    assert [(each.finish, each.error) for each in world.notes.all if each.id == 1] == [
        ("error", "too odd")
    ]
    assert world.notes.finals(2) == ["length"]
    assert world.pump.stats().refused == 1


@pytest.mark.parametrize("options", [{"add_error": "bad"}, {"fail_at": 1}])
def test_any_other_exception_is_the_engines_death(options: dict[str, Any]):
    """It leaves the turn as it is."""
    world = World(options)
    world.submit(1)
    with pytest.raises(InternalError):
        world.pump.turn()


def test_deadlines_are_kept_before_and_while_running():
    """What waits ends at once, what runs with the engine's next iteration."""
    world = World({"slots": 1})
    world.submit(1, max_tokens=10_000, deadline_s=101.0)
    world.submit(2, deadline_s=100.5)
    world.pump.turn()
    assert world.pump.idle_s() == 0.5
    world.now_s = 100.6
    world.pump.turn()
    assert world.notes.finals(2) == ["timeout"]
    world.now_s = 101.1
    world.run()
    assert world.notes.finals(1) == ["timeout"]


def test_strays_are_dropped_and_counted():
    """An engine that goes on after a final output reaches nobody."""
    world = World()
    world.submit(1, extra={"stray": True})
    world.submit(2, max_tokens=10)
    world.run()
    assert world.notes.finals(1) == ["length"]
    assert world.pump.stats().admission.late_outputs == 2


def test_a_missing_final_is_made():
    """An engine that is silent about an aborted request is not waited for long."""
    world = World(abort_grace_s=5.0)
    world.submit(1, max_tokens=10_000, extra={"silent": True})
    world.pump.turn()
    world.pump.take(Abort([1]))
    world.pump.turn()
    assert world.notes.finals(1) == []
    world.now_s += 6.0
    world.run()
    assert world.notes.finals(1) == ["cancelled"]
    assert world.pump.stats().admission.missing_finals == 1


def test_who_wants_the_end_gets_one_output():
    """Deltas of a request without a stream are kept until it ends."""
    world = World()
    world.submit(1, max_tokens=100, stream=False)
    world.submit(2, max_tokens=5, stream=False, sampling={"n": 2})
    world.run()
    one = [each for each in world.notes.all if each.id == 1]
    assert len(one) == 1
    assert (one[0].tokens, one[0].finish) == (list(range(2, 102)), "length")
    two = [each for each in world.notes.all if each.id == 2]
    assert [(each.seq, len(each.tokens), each.final) for each in two] == [
        (0, 5, False),
        (1, 5, True),
    ]


def test_what_was_kept_back_is_not_lost_at_an_early_end():
    """A cancelled request's tokens come with its end."""
    world = World({"slots": 1})
    world.submit(1, max_tokens=10_000, stream=False)
    for _ in range(100):
        world.pump.turn()
    world.pump.take(Abort([1]))
    world.run()
    assert world.notes.tokens(1) == [(1 + n) % 1000 for n in range(1, 101)]
    assert world.notes.finals(1) == ["cancelled"]


def test_draining_finishes_and_refuses():
    """After a Close with drain nothing new is taken, and the engine closes when all is done."""
    world = World()
    world.submit(1)
    world.pump.take(Close(drain=True))
    world.submit(2)
    world.run()
    assert world.notes.finals(1) == ["length"]
    assert world.notes.finals(2) == ["cancelled"]
    assert world.pump.is_closed and world.engine.is_closed
    assert not world.pump.turn()


def test_closing_cancels_what_there_is():
    """Without drain everything ends at once, also while a drain is on."""
    world = World({"slots": 1})
    for number in (1, 2):
        world.submit(number, max_tokens=10_000)
    world.pump.turn()
    world.pump.take(Close(drain=True))
    world.pump.turn()
    world.pump.take(Close())
    world.pump.turn()
    assert world.notes.finals(1) == world.notes.finals(2) == ["cancelled"]
    assert world.engine.is_closed


def test_snapshots_are_of_each_iteration_and_handed_on_together():
    """One a turn, many a message."""
    world = World(stats_every_s=10.0)
    world.submit(1, max_tokens=5)
    world.run()
    assert [each["iter"] for each in world.notes.snapshots] == [0, 1, 2, 3, 4]
    assert [each["tokens"] for each in world.notes.snapshots] == [1] * 5
    assert world.pump.latest == world.notes.snapshots[-1]


def test_cache_events_are_numbered():
    """The first number of each message goes on where the last one ended."""
    world = World({"kv_events": True})
    for number in (1, 2):
        world.submit(number, max_tokens=1)
        world.run()
    assert world.notes.events == [
        (0, [("stored", 1), ("removed", 1)]),
        (2, [("stored", 2), ("removed", 2)]),
    ]


def test_a_call_is_prepared_and_committed():
    """In two turns, and its answer is what the engine says; an error is its answer too."""
    world = World()
    world.pump.take(Call(7, "echo", [1, "two"]))
    world.pump.take(Call(8, "fail", ["no"]))
    world.pump.take(Call(9, "_drop", []))
    world.run()
    assert world.notes.calls[0] == (7, [1, "two"], None)
    assert world.notes.calls[1][0] == 8 and "no" in str(world.notes.calls[1][2])
    assert "not for calls" in str(world.notes.calls[2][2])
    assert world.engine.order[:2] == ["prepare echo", "call echo"]


def test_a_call_that_one_rank_is_against_is_rolled_back():
    """Nobody commits; the answer says who was against it."""
    steps: list[Step] = []
    world = World(lead=steps.append, verdict=lambda step, until_s: "rank 1 is against it")
    world.pump.take(Call(7, "echo", [1]))
    world.run()
    assert world.notes.calls == [(7, None, "rank 1 is against it")]
    assert world.engine.order == ["prepare echo", "rollback echo"]
    assert [each.call and each.call[1] for each in steps] == ["prepare", "rollback"]


def test_ranks_that_differ_after_a_commit_are_the_engines_death():
    """There is no way back then."""
    said = iter(["", "rank 1 failed"])
    world = World(verdict=lambda step, until_s: next(said))
    world.pump.take(Call(7, "echo", [1]))
    with pytest.raises(InternalError, match="rank 1 failed"):
        world.run()


def test_a_commit_that_fails_on_rank_0_alone_is_the_engines_death():
    """The others did what it did not; where all fail alike, it is the answer."""
    world = World(verdict=lambda step, until_s: "")
    world.pump.take(Call(7, "fail", ["no"]))
    with pytest.raises(InternalError, match="rank 0: InternalError: no; the others did it"):
        world.run()
    said = iter(["", "rank 1 failed"])
    world = World(verdict=lambda step, until_s: next(said))
    world.pump.take(Call(7, "fail", ["no"]))
    world.run()
    assert world.notes.calls == [(7, None, "InternalError: no")]


def test_a_call_that_waited_too_long_is_not_made():
    """Its deadline is looked at when its turn comes."""
    world = World()
    world.pump.take(Call(7, "echo", [1], deadline_s=99.0))
    world.run()
    assert world.notes.calls[0][2] is not None
    assert "call echo" not in world.engine.order


def test_an_adapter_that_cannot_be_loaded_everywhere_is_unloaded(tmp_path: Path):
    """Loading is what is prepared; rolling back undoes it."""
    world = World({"adapters": True}, verdict=lambda step, until_s: "rank 1 has no such file")
    world.pump.take(Call(1, "load_adapter", [4, str(tmp_path)]))
    world.run()
    assert world.engine.order[-3:] == ["load 4", "unload 4"] or world.engine.order[-2:] == [
        "load 4",
        "unload 4",
    ]
    assert world.notes.calls[0][2] == "rank 1 has no such file"


def test_followers_do_what_the_leader_does():
    """Every rank sees the same calls in one order."""
    follower_engine = Scripted()
    follower_engine.start(1, None)
    follower = Follower(follower_engine)
    world = World({"slots": 2}, lead=lambda step: follower.follow(step) and None)
    for number in range(5):
        world.submit(number, extra={"reject": "no"} if number == 3 else None)
    world.pump.turn()
    world.pump.take(Abort([0]))
    world.pump.take(Call(1, "echo", [5]))
    world.run()
    world.pump.take(Close())
    world.run()
    assert follower_engine.order == world.engine.order
    assert follower_engine.iterations == world.engine.iterations
    assert follower.is_closed and follower_engine.is_closed


def test_a_duplicate_id_ends_nothing():
    """The request that has the number goes on."""
    world = World()
    world.submit(1)
    world.submit(1)
    world.run()
    assert world.notes.finals(1) == ["length"]
    assert world.pump.stats().duplicates == 1


@pytest.mark.parametrize("with_fileno", [False, True])
def test_a_thread_driven_engine_says_when_it_has_something(with_fileno: bool):
    """With a descriptor the pump rests between, without one it asks with a timeout."""
    world = World({"mode": "thread", "with_fileno": with_fileno})
    world.submit(1)
    for _ in range(20):
        world.pump.turn(0.001)
    assert world.notes.tokens(1) == [2, 3, 4]
    assert (world.pump.engine_fileno is not None) is with_fileno
    assert not world.pump.turn()
    world.pump.take(Close())
    world.run()


def test_nothing_is_left_open():
    """Descriptors are counted around every test; here of the engine that has some."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    world = World({"mode": "thread", "with_fileno": True})
    world.pump.take(Close())
    world.run()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
