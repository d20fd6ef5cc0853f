# SPDX-License-Identifier: Apache-2.0
"""preserve_ordering: responses leave in the order in which the requests came in."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from actorserve.errors import DeadlineExceeded, Unavailable
from actorserve.state.backlog import QueuePolicy
from actorserve.state.batching import BatchPolicy
from actorserve.state.lifecycle import State
from actorserve.state.ordering import Ordering
from actorserve.wire.messages import Handle, WireError, WireResponse, WireTensor
from tests.unit.actors.conftest import FakePeer, Made, World

DIED = Unavailable("the stub died")


def _policy(**values: Any) -> BatchPolicy:
    return BatchPolicy(max_batch_size=4, is_dynamic=True, preserve_ordering=True, **values)


def _outcomes(made: list[Made]) -> list[str]:
    return [each.outcome for each in made]


@pytest.fixture
def heard(make):
    """Return `heard(count, *room, **policy)`: a world, its requests, and who was answered when.

    With three instances of one batch each, the requests 0, 1 and 2 run, and the others wait.
    """

    def build(count: int, *most: int, **values: Any) -> tuple[World, list[Made], list[int]]:
        world = make(_policy(**values), *(most or (1, 1, 1)))
        answered: list[int] = []
        made: list[Made] = []

        def hear(number: int, response: Any) -> None:
            answered.append(number)
            made[number].responses.append(response)

        for number in range(count):
            made.append(world.submit(on_response=partial(hear, number)))
        return world, made, answered

    return build


def test_later_answers_wait_for_the_earlier_ones(heard):
    """Instances end in reverse order; the clients hear in the order in which they asked."""
    world, made, answered = heard(3)
    for instance in (world.instances[2], world.instances[1]):
        world.finish(instance)
    assert answered == []
    stats = world.scheduler.stats()
    assert (stats.held, stats.in_flight, stats.succeeded) == (2, 3, 0)
    world.finish(world.instances[0])
    assert answered == [0, 1, 2]
    assert _outcomes(made) == ["ok"] * 3
    stats = world.scheduler.stats()
    assert (stats.held, stats.in_flight, stats.succeeded, stats.queued) == (0, 0, 3, 0)


def test_without_it_an_answer_waits_for_nobody(make):
    """The ordinary factory."""
    world = make(BatchPolicy(), 1, 1)
    first, second = world.submit(), world.submit()
    world.finish(world.instances[1])
    assert (first.outcome, second.outcome) == ("", "ok")


def test_inputs_are_given_up_while_an_answer_waits(heard, exchange):
    """A held response keeps its outputs, and nothing else."""
    world, made, _ = heard(2, 1, 1)
    world.finish(world.instances[1])
    assert exchange.dropped == [made[1].key]
    world.finish(world.instances[0])
    assert exchange.dropped == [made[1].key, made[0].key]


def test_an_error_of_the_model_is_an_answer(heard):
    """It takes its turn, and those behind it go on."""
    world, made, answered = heard(3)
    (factory,) = world.instances[1].batches.pop()
    factory.respond(WireResponse(factory.key, [], WireError(13, "the model failed")), FakePeer())
    world.finish(world.instances[2])
    assert answered == []
    world.finish(world.instances[0])
    assert answered == [0, 1, 2]
    assert _outcomes(made) == ["ok", "the model failed", "ok"]
    assert world.scheduler.stats().failed == 1


def test_the_death_of_a_stub_blocks_nobody(heard):
    """Its request fails in its turn."""
    world, made, answered = heard(3)
    world.finish(world.instances[1])
    assert world.instances[2].die(DIED) == []
    assert answered == []
    assert world.instances[0].die(DIED) == []
    assert answered == [0, 1, 2]
    assert _outcomes(made) == ["the stub died", "ok", "the stub died"]


def test_a_request_that_is_tried_again_keeps_its_place(heard):
    """Those behind it wait until it has its answer from another stub."""
    world, made, answered = heard(3)
    world.scheduler.retries = 1
    world.finish(world.instances[1])
    lost = world.instances[0].die(DIED)
    world.scheduler.requeue(lost, is_alone=True)
    assert world.instances[0].begun[-1] == [made[0].key]
    world.finish(world.instances[2])
    assert answered == []
    world.finish(world.instances[0])
    assert answered == [0, 1, 2]
    assert _outcomes(made) == ["ok"] * 3


# --- who leaves the order ------------------------------------------------------------------------


def test_a_rejected_request_holds_nobody_back(heard, turn):
    """The queue's timeout is told when it is due, while the earlier ones still run."""
    world, made, answered = heard(
        3, 1, default_policy=QueuePolicy(default_timeout_us=50_000, max_queue_size=2)
    )
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        world.submit()
    turn(20, until=lambda: made[1].outcome and made[2].outcome)
    assert answered == [1, 2]
    assert _outcomes(made) == ["", "Request timeout expired", "Request timeout expired"]
    world.finish(world.instances[0])
    assert answered == [1, 2, 0]


def test_a_timeout_of_the_first_lets_the_others_go(heard):
    """A client's deadline is told at once; the late answer is dropped."""
    world, made, answered = heard(3)
    world.finish(world.instances[1])
    made[0].factory.expire(DeadlineExceeded("too late"))
    assert answered == [0, 1]
    world.finish(world.instances[2])
    world.finish(world.instances[0])
    assert answered == [0, 1, 2]
    assert _outcomes(made) == ["too late", "ok", "ok"]
    assert world.scheduler.pending == 0


def test_an_answer_that_waits_too_long_is_a_timeout(heard):
    """Its turn does not come in time: the client hears the deadline, once."""
    world, made, answered = heard(3)
    world.finish(world.instances[1])
    made[1].factory.expire(DeadlineExceeded("too late"))
    assert answered == [1]
    made[1].factory.expire(DeadlineExceeded("again"))
    world.finish(world.instances[0])
    assert answered == [1, 0]
    assert _outcomes(made) == ["ok", "too late", ""]
    stats = world.scheduler.stats()
    assert (stats.held, stats.succeeded, stats.failed) == (0, 1, 1)


def test_a_cancelled_request_holds_nobody_back(heard):
    """Running: its own answer comes when it comes. Answered: it need not wait any more."""
    world, made, answered = heard(4)
    world.finish(world.instances[1])
    made[0].factory.cancel()
    assert answered == [1]
    made[3].factory.cancel()  # its turn has not come, but it waits for nobody any more
    world.finish(world.instances[1])
    assert answered == [1, 3]
    world.finish(world.instances[0])
    assert answered == [1, 3, 0]
    world.finish(world.instances[2])
    assert _outcomes(made) == ["ok"] * 4
    assert world.scheduler.pending == 0


def test_a_cancelled_request_in_the_queue_is_told_at_once(heard):
    """With an error, as without ordering."""
    world, made, answered = heard(3, 1)
    made[1].factory.cancel()
    assert answered == [1]
    assert made[1].outcome == "the request was cancelled"
    for _ in range(2):
        world.finish(world.instances[0])
    assert answered == [1, 0, 2]


def test_a_held_answer_that_is_cancelled_comes_at_once(heard):
    """It is there: nothing is gained by waiting."""
    world, made, answered = heard(2, 1, 1)
    world.finish(world.instances[1])
    made[1].factory.cancel()
    assert answered == [1]
    assert made[1].outcome == "ok"


@pytest.mark.parametrize("is_held", [False, True])
def test_a_client_that_is_gone_holds_nobody_back(heard, is_held):
    """Running or held: nobody is told, and it has ended."""
    world, made, answered = heard(3)
    if is_held:
        world.finish(world.instances[1])
    made[1].factory.disconnect()
    assert answered == []
    assert world.scheduler.pending == 2
    for instance in world.instances:
        if instance.batches:
            world.finish(instance)
    assert answered == [0, 2]
    assert world.scheduler.pending == 0


def test_the_end_of_the_server_ends_all_of_them(heard, loop, turn):
    """What is unanswered fails, what waits for its turn is answered; drained() hears it."""
    world, made, answered = heard(6)
    world.finish(world.instances[1])
    drained = loop.create_task(world.scheduler.drained())
    turn()
    assert not drained.done()
    world.scheduler.fail_all(Unavailable("over"))
    assert _outcomes(made) == ["over", "ok", "over", "over", "over", "over"]
    assert sorted(answered) == list(range(6))
    loop.run_until_complete(drained)
    assert world.scheduler.pending == 0


# --- what callbacks do ---------------------------------------------------------------------------


def test_who_hears_an_answer_may_end_the_next_ones(heard):
    """A callback that cancels, disconnects and asks again changes nothing for the others."""
    world, made, answered = heard(4, 1, 1, 1, 1)

    def end_others(response: object) -> None:
        answered.append(0)
        made[1].factory.disconnect()
        made[2].factory.expire(DeadlineExceeded("late"))
        world.submit()

    made[0].factory._on_response = end_others
    for instance in world.instances[1:]:
        world.finish(instance)
    world.finish(world.instances[0])
    assert answered == [0, 2, 3]
    assert made[1].responses == []
    assert _outcomes(made[2:]) == ["late", "ok"]
    assert world.scheduler.pending == 1


def test_streamed_responses_leave_in_turn(heard):
    """The first streams; what the second says meanwhile follows when the first is done."""
    world, made, answered = heard(2, 1, 1)
    first, second = made[0].factory, made[1].factory
    second.respond(WireResponse(second.key, final=False), FakePeer())
    first.respond(WireResponse(first.key, final=False), FakePeer())
    assert answered == [0]
    second.respond(WireResponse(second.key), FakePeer())
    first.respond(WireResponse(first.key), FakePeer())
    assert answered == [0, 0, 1, 1]
    assert [len(each.finals) for each in made] == [1, 1]
    assert world.scheduler.pending == 0


# --- memory --------------------------------------------------------------------------------------


def test_what_is_held_is_bounded(heard):
    """While the first runs and enough is held, no work is begun; then everything goes on."""
    world, made, answered = heard(0, 1, 1)
    world.scheduler._order = Ordering(most_held=3)
    slow, quick = world.instances
    made = [world.submit(rows=4) for _ in range(10)]
    while quick.batches:
        world.finish(quick)
    assert world.scheduler.stats().held == 3
    assert world.scheduler.stats().queued == 6
    assert [each.outcome for each in made] == [""] * 10
    world.finish(slow)
    assert world.scheduler.stats().held == 0
    assert [each.outcome for each in made[:4]] == ["ok"] * 4
    while slow.batches or quick.batches:
        world.finish(slow if slow.batches else quick)
    assert [each.outcome for each in made] == ["ok"] * 10
    assert answered == []


def test_large_answers_count_for_more(heard):
    """The memory that they keep counts, not only their number."""
    world, _, _ = heard(0, 1, 1)
    world.scheduler._order = Ordering(most_held_bytes=5000)
    for _ in range(5):
        world.submit(rows=4)
    quick = world.instances[1]
    for number in range(2):
        (factory,) = quick.batches.pop()
        tensor = WireTensor("OUT", 11, (1000,), Handle(2, number, 0, 0, 4000))
        factory.respond(WireResponse(factory.key, [tensor]), FakePeer())
        world.scheduler.has_room()
    assert not quick.batches
    assert (world.scheduler.stats().held, world.scheduler.stats().queued) == (2, 2)


def test_the_bound_never_keeps_the_first_from_being_tried_again(heard):
    """Full, and the first is back in the queue: it is run all the same."""
    world, _, _ = heard(0, 1, 1)
    world.scheduler._order = Ordering(most_held=2)
    world.scheduler.retries = 1
    slow, quick = world.instances
    made = [world.submit(rows=4) for _ in range(6)]
    while quick.batches:
        world.finish(quick)
    assert world.scheduler.stats().held == 2
    lost = slow.die(DIED)
    world.set_state(slow, State.BACKOFF, 0.5)
    world.scheduler.requeue(lost, is_alone=True)
    assert quick.begun[-1] == [made[0].key]
    while quick.batches:
        world.finish(quick)
    assert [each.outcome for each in made] == ["ok"] * 6


@pytest.mark.parametrize("end", ["expire", "cancel", "disconnect"])
def test_the_bound_gives_way_when_the_first_leaves(heard, end):
    """Whatever ended it: those that waited for room get it."""
    world, _, _ = heard(0, 1, 1)
    world.scheduler._order = Ordering(most_held=2)
    quick = world.instances[1]
    made = [world.submit(rows=4) for _ in range(6)]
    while quick.batches:
        world.finish(quick)
    factory = made[0].factory
    factory.expire(DeadlineExceeded("late")) if end == "expire" else getattr(factory, end)()
    assert quick.begun[-1] == [made[3].key]
    assert [each.outcome for each in made[1:3]] == ["ok"] * 2
