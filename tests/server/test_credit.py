# SPDX-License-Identifier: Apache-2.0
"""Credit: a reader that is slow stops its own sender, and nobody and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from actorserve.actors.call_desk import MOST_AHEAD
from actorserve.actors.in_flight import WINDOW
from tests.conftest import wait_until
from tests.server.script_models import Heard, ScriptServer, served

ENDLESS = """
    mine = kept.endless = Kept()
    mine.sent = 0
    mine.is_over = False
    def run(sender):
        while not sender.is_cancelled():
            sender.send(answer([mine.sent]))
            mine.sent += 1
        mine.is_over = True
        sender.send(flags=FINAL)
    start(run, request.get_response_sender())
    """
COUNT = """
    sender = request.get_response_sender()
    for n in range({0}):
        sender.send(answer([n]))
    sender.send(flags=FINAL)
    """
LOOK = (
    "sender = request.get_response_sender()\n"
    "sender.send(tell(kept.endless.sent, kept.endless.is_over), FINAL)\n"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Return a server of script models."""
    yield from served(tmp_path_factory.mktemp("credit"))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Replace the look after each test: the server is looked at when it ends."""


@pytest.fixture(autouse=True)
def nothing_is_held(server: ScriptServer) -> Iterator[None]:
    """Fail a test after which anything is held or open, or for which a stub died."""
    restarts = server.restarts()
    yield
    wait_until(lambda: server.held_blocks() == 0)
    wait_until(lambda: server.pending() == 0)
    assert server.restarts() == restarts


def left_unread(server: ScriptServer, model: str, code: str) -> Any:
    """Send code whose responses nobody takes; returns what may disconnect it."""

    async def main() -> Any:
        return server.submit(model, code, Heard())

    return server.run(main())


def disconnect(server: ScriptServer, sent: Any) -> None:
    """Be gone."""

    async def main() -> None:
        sent.disconnect()

    server.run(main())


def stands_still(server: ScriptServer, model: str) -> int:
    """Wait until the endless sender waits; returns how many responses it has sent."""
    counts = [-1, -2]

    def is_still() -> bool:
        counts.append(int(server.text(model, LOOK)[0]))
        return counts[-1] == counts[-2] == counts[-3] > 0

    wait_until(is_still)
    return counts[-1]


def test_a_reader_that_stops_stops_its_own_sender_only(server):
    """It has a window of responses; others of the same stub come as ever."""
    sent = left_unread(server, "stream", ENDLESS)
    assert stands_still(server, "stream") <= WINDOW + 1
    assert server.values("stream", COUNT.format(3000)) == [*range(3000), ""]
    assert stands_still(server, "stream") <= WINDOW + 1
    disconnect(server, sent)
    wait_until(lambda: server.text("stream", LOOK)[1] == "True")


def test_a_sender_in_a_coroutine_does_not_hold_its_loop_up(server):
    """What nobody reads yet is kept, and arrives in order when it is."""

    async def main() -> list[Any]:
        heard = Heard()
        server.submit("astream", COUNT.format(2000), heard)
        other = Heard()
        server.submit("astream", "request.get_response_sender().send(answer([1]), FINAL)", other)
        await asyncio.wait_for(other.ended.wait(), 20)
        assert len(heard.responses) <= WINDOW
        heard.read()
        await asyncio.wait_for(heard.ended.wait(), 20)
        return heard.values

    assert server.run(main()) == [*range(2000), ""]


@pytest.mark.parametrize("model", ["stream", "astream"])
def test_the_error_of_execute_does_not_wait_for_the_reader(server, model):
    """A thread waits for credit when execute raises: the main thread goes on at once."""
    code = """
        mine = kept.failed = Kept()
        def run(sender):
            mine.text = attempt(lambda: [sender.send(answer([n])) for n in range(1000)])
        sender = request.get_response_sender()
        start(run, sender)
        until(lambda: request._reply._sending._kept)
        raise ValueError("no more")
        """

    async def main() -> list[Any]:
        heard = Heard()
        server.submit(model, code, heard)
        other = Heard()
        server.submit(model, "request.get_response_sender().send(answer([1]), FINAL)", other)
        await asyncio.wait_for(other.ended.wait(), 20)
        heard.read()
        await asyncio.wait_for(heard.ended.wait(), 20)
        return heard.values

    *numbers, error = server.run(main())
    assert numbers == list(range(len(numbers)))
    assert len(numbers) <= WINDOW + 1
    assert "ValueError: no more" in error.message
    text = """
        until(lambda: hasattr(kept.failed, "text"))
        request.get_response_sender().send(tell(kept.failed.text), FINAL)
        """
    assert server.text(model, text)[0].endswith("Response sender has been closed.")


def test_what_was_kept_comes_before_the_error_of_a_dropped_sender(server):
    """A coroutine's sender that is dropped with responses which nobody has read."""
    code = """
        sender = request.get_response_sender()
        for n in range(500):
            sender.send(answer([n]))
        """
    *numbers, error = server.values("astream", code)
    assert numbers == list(range(500))
    assert "was dropped" in error.message


@pytest.mark.parametrize("streams", [1, 64, 1500])
@pytest.mark.parametrize("model", ["stream", "astream"])
def test_any_number_of_streams_at_a_time(server, model, streams):
    """More than a health page has slots for: those wait their turn. All complete, in order."""
    count = 3000 // streams + 5
    code = f"""
        def run():
            while kept.senders:
                for sender, numbers in list(kept.senders):
                    sender.send(answer([numbers.pop()]))
                    if not numbers:
                        sender.send(flags=FINAL)
                        kept.senders.remove((sender, numbers))
        if not getattr(kept, "senders", None):
            kept.senders = []
            kept.senders.append((request.get_response_sender(), list(range({count}))[::-1]))
            start(run)
        else:
            kept.senders.append((request.get_response_sender(), list(range({count}))[::-1]))
        """

    async def one() -> list[Any]:
        heard = Heard(reads=True)
        server.submit(model, code, heard)
        await asyncio.wait_for(heard.ended.wait(), 50)
        return heard.values

    async def main() -> list[list[Any]]:
        return await asyncio.gather(*[one() for _ in range(streams)])

    assert all(each == [*range(count), ""] for each in server.run(main()))


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_stream_that_is_faster_than_its_reader(server, count):
    """Everything comes, in order, and the reader is never far behind."""

    async def main() -> None:
        inputs = {"CODE": [COUNT_FLAT.format(count).encode()]}
        expected = 0
        async for response in server.server.stream("stream", inputs, outputs=["OUTPUT0"]):
            assert response["OUTPUT0"][0] == expected
            expected += 1
        assert expected == count

    server.run(main(), 120)


COUNT_FLAT = """\
sender = request.get_response_sender()
for n in range({0}):
    sender.send(answer([n]))
sender.send(flags=FINAL)
"""


def test_each_request_of_a_batch_has_its_own_credit(server):
    """One that nobody reads does not stop its neighbours."""
    code = """
        def run(sender):
            for n in range(500):
                sender.send(pb_utils.InferenceResponse(
                    [pb_utils.Tensor("OUTPUT0", np.array([[n]], np.float32))]))
            sender.send(flags=FINAL)
        for each in requests:
            start(run, each.get_response_sender())
        """

    async def main() -> list[Any]:
        unread, heard = Heard(), [Heard(reads=True) for _ in range(3)]
        for each in (unread, *heard):
            server.submit("batched", code, each)
        for each in heard:
            await asyncio.wait_for(each.ended.wait(), 20)
        assert not unread.ended.is_set()
        assert len(unread.responses) <= WINDOW
        unread.read()
        await asyncio.wait_for(unread.ended.wait(), 20)
        return [each.values for each in [unread, *heard]]

    assert server.run(main()) == [[*range(500), ""]] * 4


# --- streams between models ----------------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "aplain"])
def test_a_caller_that_does_not_look_stops_the_stream(server, model):
    """It has some responses at hand; what it then reads is complete and in order."""
    code = f"""
        iterator = scripted("stream", {ENDLESS!r}.replace("\\n    ", "\\n")).exec(decoupled=True)
        first = value(next(iterator))[0]
        time.sleep(0.3)
        before = int(scripted("stream", {LOOK!r}).exec(decoupled=True).__next__()
            .output_tensors()[0].as_numpy()[0])
        time.sleep(0.3)
        after = int(scripted("stream", {LOOK!r}).exec(decoupled=True).__next__()
            .output_tensors()[0].as_numpy()[0])
        numbers = [value(next(iterator))[0] for _ in range(5000)]
        is_right = numbers == list(range(1, 5001))
        del iterator
        {"return [" if model[0] == "a" else "result = ["}tell(first, before, after, is_right)]
        """
    first, before, after, is_right = server.text(model, code)
    assert first == "0.0"
    assert is_right == "True"
    assert MOST_AHEAD <= int(before) <= MOST_AHEAD + 4 * WINDOW
    assert int(after) <= MOST_AHEAD + 4 * WINDOW


def test_a_caller_that_waits_for_another_call_lets_its_stream_go_on(server):
    """The stream fills its model's only instance, for which the second call waits."""
    count = MOST_AHEAD + 5 * WINDOW
    code = f"""
        iterator = scripted("stream", {COUNT_FLAT.format(count)!r}).exec(decoupled=True)
        next(iterator)
        second = list(scripted("stream", {COUNT_FLAT.format(3)!r}).exec(decoupled=True))
        result = [tell(len(second), len(list(iterator)))]
        """
    assert server.text("plain", code) == ["4", str(count)]


@pytest.mark.parametrize("model", ["plain", "aplain"])
def test_responses_that_came_for_an_iterator_that_is_dropped_go_home(server, model):
    """All of them, the last one too, were there already."""
    sends = (
        "sender = request.get_response_sender()\\n"
        "for n in range(5): sender.send(answer(np.zeros(5000)))\\n"
        "sender.send(answer(np.zeros(5000)), FINAL)\\n"
    )
    code = f"""
        iterators = [scripted("stream", "{sends}").exec(decoupled=True) for _ in range(3)]
        [next(each) for each in iterators]
        list(scripted("stream", "{sends}").exec(decoupled=True))
        del iterators
        {"return [" if model[0] == "a" else "result = ["}answer([1])]
        """
    assert server.values(model, code) == [1]


def test_an_answer_that_comes_for_a_loop_which_is_gone_goes_home(server):
    """A thread's own loop was closed while its calls were on their way."""
    slow = "time.sleep(0.05)\\nresult = [answer(np.zeros(5000))]\\n"
    code = f"""
        async def main():
            for _ in range(5):
                asyncio.ensure_future(scripted("deep", "{slow}").async_exec())
            await asyncio.sleep(0.06)
        def run():
            asyncio.run(main())
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        result = [answer([1])]
        """
    assert server.values("plain", code) == [1]
