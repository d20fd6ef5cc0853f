# SPDX-License-Identifier: Apache-2.0
"""Who runs next and where, deadlines, waits for a restart; instances are stand-ins."""

from __future__ import annotations

import pytest

from actorserve.errors import InvalidArgument, Unavailable
from actorserve.state.backlog import QueuePolicy
from actorserve.state.batching import BatchPolicy
from actorserve.state.lifecycle import State
from tests.unit.actors.conftest import Made

# --- who and where -------------------------------------------------------------------------------


def test_the_instance_with_the_most_room_gets_the_request(make):
    """And of two with the same room the first."""
    world = make(None, 1, 3, 3)
    keys = [world.submit().key for _ in range(7)]
    begun = [each.begun for each in world.instances]
    assert begun[1] == [[keys[0]], [keys[2]], [keys[5]]]
    assert begun[2] == [[keys[1]], [keys[3]], [keys[6]]]
    assert begun[0] == [[keys[4]]]


def test_requests_wait_in_order_for_room(make):
    """First in, first out; each end makes room for the next."""
    world = make()
    made = [world.submit() for _ in range(4)]
    (instance,) = world.instances
    assert world.scheduler.stats().queued == 3
    for _ in range(4):
        world.finish(instance)
    assert instance.begun == [[each.key] for each in made]
    assert all(each.outcome == "ok" for each in made)
    stats = world.scheduler.stats()
    assert (stats.accepted, stats.succeeded, stats.failed, stats.batches) == (4, 4, 0, 4)
    assert (stats.queued, stats.in_flight) == (0, 0)


def test_a_priority_overtakes(make):
    """Level 1 goes before level 2, whenever it came."""
    world = make(BatchPolicy(priority_levels=2, default_priority_level=2))
    first = world.submit()
    low, high = world.submit(), world.submit(priority=1)
    for _ in range(2):
        world.finish(world.instances[0])
    assert world.instances[0].begun == [[first.key], [high.key], [low.key]]


def test_a_dynamic_batch_is_made_of_what_waits(make):
    """Up to max_batch_size rows, of equal signatures."""
    world = make(BatchPolicy(max_batch_size=4, is_dynamic=True))
    first = world.submit()
    same = [world.submit(signature="a") for _ in range(3)]
    wide = world.submit(signature="a", rows=3)
    other = world.submit(signature="b")
    for _ in range(3):
        world.finish(world.instances[0])
    assert world.instances[0].begun == [
        [first.key],
        [each.key for each in same],
        [wide.key],
        [other.key],
    ]


def test_a_batch_waits_for_company_and_not_for_ever(make, turn):
    """max_queue_delay: a lone request is sent when it has passed."""
    world = make(BatchPolicy(max_batch_size=4, is_dynamic=True, max_queue_delay_us=100_000))
    made = world.submit()
    assert world.instances[0].begun == []
    turn(20, until=lambda: world.instances[0].begun)
    assert world.instances[0].begun == [[made.key]]


def test_a_full_batch_does_not_wait(make):
    """The fourth row completes it."""
    world = make(BatchPolicy(max_batch_size=4, is_dynamic=True, max_queue_delay_us=60_000_000))
    made = [world.submit() for _ in range(4)]
    assert world.instances[0].begun == [[each.key for each in made]]


def test_a_request_larger_than_any_batch_is_refused(make):
    """It is not accepted."""
    world = make(BatchPolicy(max_batch_size=4, is_dynamic=True, max_queue_delay_us=1))
    with pytest.raises(InvalidArgument, match="exceeds max_batch_size 4"):
        world.submit(rows=5)
    assert world.scheduler.stats().accepted == 0


def test_a_response_that_submits_the_next_request_is_no_recursion(make):
    """A client's callback may come straight back; a thousand times in a row."""
    world = make(None, 2)
    done: list[int] = []

    def again(response: object) -> None:
        done.append(1)
        if len(done) < 1000:
            made = Made(world.exchange, world.scheduler, on_response=again)
            world.scheduler.submit(made.factory)

    world.scheduler.submit(Made(world.exchange, world.scheduler, on_response=again).factory)
    while world.instances[0].batches:
        world.finish(world.instances[0])
    assert len(done) == 1000


# --- limits and deadlines ------------------------------------------------------------------------


def test_a_full_queue_refuses(make):
    """UNAVAILABLE with a time to try again; those that wait are not touched."""
    world = make(BatchPolicy(default_policy=QueuePolicy(max_queue_size=2)))
    made = [world.submit() for _ in range(3)]
    with pytest.raises(Unavailable, match="Exceeds maximum queue size") as caught:
        world.submit()
    assert caught.value.retry_after_s == 1.0
    for _ in range(3):
        world.finish(world.instances[0])
    assert all(each.outcome == "ok" for each in made)


def test_a_deadline_fires_when_it_is_due(make, turn):
    """Not when an instance gets free: the instance never does."""
    world = make(BatchPolicy(default_policy=QueuePolicy(default_timeout_us=50_000)))
    running, late = world.submit(), world.submit()
    turn(20, until=lambda: late.outcome)
    assert late.outcome == "Request timeout expired"
    assert isinstance(late.responses[0].error, Unavailable)
    assert running.outcome == ""
    assert world.scheduler.stats().failed == 1
    world.finish(world.instances[0])
    assert running.outcome == "ok"


def test_a_shorter_deadline_that_comes_later_is_kept(make, turn):
    """The timer is moved forward for it."""
    policy = QueuePolicy(default_timeout_us=60_000_000, allow_timeout_override=True)
    world = make(BatchPolicy(default_policy=policy))
    world.submit()
    slow, quick = world.submit(), world.submit(timeout_us=50_000)
    turn(20, until=lambda: quick.outcome)
    assert quick.outcome == "Request timeout expired"
    assert slow.outcome == ""


def test_a_delayed_request_goes_last_instead(make, turn):
    """timeout_action DELAY: it is executed when nothing else waits."""
    policy = QueuePolicy("DELAY", default_timeout_us=50_000)
    world = make(BatchPolicy(default_policy=policy))
    running, late = world.submit(), world.submit()
    turn(0.3)
    fresh = world.submit()
    for _ in range(3):
        world.finish(world.instances[0])
    assert world.instances[0].begun == [[running.key], [fresh.key], [late.key]]
    assert late.outcome == "ok"


# --- cancelling ----------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_queue(make):
    """At once, with one answer; the others go on."""
    world = make()
    running, waiting, last = (world.submit() for _ in range(3))
    waiting.factory.cancel()
    assert waiting.outcome == "the request was cancelled"
    assert world.scheduler.stats().queued == 1
    for _ in range(2):
        world.finish(world.instances[0])
    assert world.instances[0].begun == [[running.key], [last.key]]


def test_a_running_request_is_told_and_still_answers(make):
    """Its stub hears; the model's answer counts."""
    world = make()
    running = world.submit()
    running.factory.cancel()
    assert running.outcome == ""
    assert running.factory.is_cancelled
    world.finish(world.instances[0])
    assert running.outcome == "ok"


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("due_s", "waits"), [(0.0, True), (0.9, True), (1.1, False), (30.0, False), (None, False)]
)
def test_requests_wait_for_a_stub_that_is_due_soon(make, due_s, waits):
    """Else they are refused at once, with the time of the next start."""
    world = make()
    world.set_state(world.instances[0], State.BACKOFF, due_s)
    if waits:
        world.scheduler.check_available()
        return
    with pytest.raises(Unavailable) as caught:
        world.scheduler.check_available()
    assert caught.value.message == (
        "model 'm' version 1 has no stub that could take the request: as it is"
    )
    assert caught.value.retry_after_s == due_s


def test_one_running_instance_is_enough(make):
    """Whatever the others do; and of those that start the soonest counts."""
    world = make(None, 1, 1)
    world.set_state(world.instances[0], State.BACKOFF, 30.0)
    world.scheduler.check_available()
    world.set_state(world.instances[1], State.BACKOFF, 0.5)
    world.scheduler.check_available()


def test_waiting_requests_go_to_the_stub_that_comes_back(make):
    """In their order."""
    world = make(None, 2)
    (instance,) = world.instances
    world.set_state(instance, State.BACKOFF, 0.1)
    made = [world.submit() for _ in range(2)]
    assert instance.begun == []
    world.set_state(instance, State.RUNNING)
    assert instance.begun == [[each.key] for each in made]
    assert world.changes == 2


def test_untouched_requests_go_first_and_in_order(make):
    """Before those that came later."""
    world = make(None, 2)
    (instance,) = world.instances
    lost = [world.submit() for _ in range(2)]
    later = world.submit()
    instance.batches.clear()
    world.set_state(instance, State.BACKOFF, 0.1)
    for each in lost:
        each.factory.take_back()
    world.scheduler.requeue([each.factory for each in lost])
    assert world.scheduler.stats().queued == 3
    instance.most = 3
    world.set_state(instance, State.RUNNING)
    assert instance.begun[2:] == [[each.key] for each in (*lost, later)]


def test_suspects_are_tried_alone(make):
    """A request whose stub died shares no batch: its neighbours are not killed twice."""
    world = make(BatchPolicy(max_batch_size=8, is_dynamic=True))
    instance = world.instances[0]
    world.set_state(instance, State.BACKOFF, 0.1)
    made = [world.submit() for _ in range(4)]
    for each in made[:2]:
        world.scheduler.remove(each.factory)
    world.scheduler.requeue([each.factory for each in made[:2]], is_alone=True)
    instance.most = 8
    world.set_state(instance, State.RUNNING)
    assert instance.begun == [[made[0].key], [made[1].key], [made[2].key, made[3].key]]


def test_without_any_stub_left_all_end(make):
    """When the last instance is given up, nobody waits for ever."""
    world = make(None, 1, 1)
    made = [world.submit() for _ in range(5)]
    world.set_state(world.instances[0], State.FATAL)
    assert [each.outcome for each in made] == [""] * 5
    world.set_state(world.instances[1], State.FATAL)
    assert {each.outcome for each in made} == {"model 'm' version 1 has no stub any more: as it is"}
    assert world.scheduler.pending == 0


# --- the end -------------------------------------------------------------------------------------


def test_drained_waits_for_the_last_end(make, loop, turn):
    """However it ends: answered, cancelled, failed."""
    world = make()
    made = [world.submit() for _ in range(3)]
    drained = loop.create_task(world.scheduler.drained())
    turn()
    world.finish(world.instances[0])
    made[2].factory.cancel()
    turn()
    assert not drained.done()
    world.finish(world.instances[0])
    loop.run_until_complete(drained)
    loop.run_until_complete(world.scheduler.drained())


def test_fail_all_ends_queued_and_running_ones(make):
    """Each once; what the stub still says is dropped."""
    world = make()
    made = [world.submit() for _ in range(3)]
    world.scheduler.fail_all(Unavailable("over"))
    assert [each.outcome for each in made] == ["over"] * 3
    world.finish(world.instances[0])
    assert all(len(each.responses) == 1 for each in made)
    stats = world.scheduler.stats()
    assert (stats.queued, stats.in_flight, stats.failed) == (0, 0, 3)


def test_a_closed_scheduler_has_no_timer(make, turn):
    """Nothing fires after the model is gone."""
    world = make(BatchPolicy(default_policy=QueuePolicy(default_timeout_us=50_000)))
    world.submit()
    late = world.submit()
    world.scheduler.close()
    turn(0.3)
    assert late.outcome == ""


# --- stubs that call other models -----------------------------------------------------------------


def test_the_only_stub_that_calls_others_has_its_next_request_already(make):
    """So it need not sleep between two; no more than one, and in order."""
    world = make()
    (instance,) = world.instances
    instance.has_called = True
    made = [world.submit() for _ in range(4)]
    assert instance.begun == [[made[0].key], [made[1].key]]
    for _ in range(4):
        world.finish(instance)
    assert instance.begun == [[each.key] for each in made]
    assert all(each.outcome == "ok" for each in made)


def test_a_call_is_never_sent_ahead(make):
    """It would wait for whoever runs before it, unseen: it stays in the queue, and its place."""
    world = make()
    (instance,) = world.instances
    instance.has_called = True
    first, call, third = world.submit(), world.submit(is_call=True), world.submit()
    assert instance.begun == [[first.key]]
    world.finish(instance)
    assert instance.begun == [[first.key], [call.key], [third.key]]


@pytest.mark.parametrize(
    ("policy", "rooms"),
    [(None, (1, 1)), (BatchPolicy(max_batch_size=2, is_dynamic=True), (1,))],
    ids=["two instances", "batches"],
)
def test_what_somebody_else_could_do_is_not_sent_ahead(make, policy, rooms):
    """Another instance may be free before, or more may come for the batch."""
    world = make(policy, *rooms)
    for instance in world.instances:
        instance.has_called = True
    for _ in range(4):
        world.submit()
    assert [len(each.begun) for each in world.instances] == [1] * len(rooms)
