# SPDX-License-Identifier: Apache-2.0
"""Response senders: what may be sent, from where, and the one end that each request gets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from actorserve.errors import Code
from tests.conftest import wait_until
from tests.server.calling_models import until
from tests.server.script_models import Heard, ScriptServer, served

CLOSED = "TritonModelException: Unable to send response. Response sender has been closed."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Return a server of script models."""
    yield from served(tmp_path_factory.mktemp("decoupled"))


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Replace the look after each test: the server is looked at when it ends."""


@pytest.fixture(autouse=True)
def nothing_is_held(server: ScriptServer) -> Iterator[None]:
    """Fail a test after which shared memory is held, or for which a stub died."""
    restarts = server.restarts()
    yield
    wait_until(lambda: server.held_blocks() == 0)
    assert server.restarts() == restarts


# --- the sender ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "stream", "aplain", "astream"])
def test_a_request_has_one_sender(server, model):
    """However often it is asked for, in both kinds of models."""
    code = """
        sender = request.get_response_sender()
        again = request.get_response_sender()
        sender.send(tell(sender is again, sender.is_cancelled(), request.is_cancelled()), FINAL)
        """
    assert server.text(model, code) == ["True", "False", "False"]


def test_senders_are_not_made_by_models(server):
    """Their class refuses to be called, and has the two documented methods."""
    code = """
        sender = request.get_response_sender()
        kind = type(sender)
        names = [each for each in dir(sender) if not each.startswith("_")]
        sender.send(tell(attempt(kind), kind is pb_utils.InferenceResponseSender, *names), FINAL)
        """
    text = server.text("stream", code)
    assert text[0].startswith("TypeError")
    assert text[1:] == ["True", "is_cancelled", "send"]


def test_what_may_not_be_sent_is_refused_in_the_documented_order(server):
    """Flags first, then the missing response, then the closed sender; each with its text."""
    code = """
        sender = request.get_response_sender()
        texts = [
            attempt(sender.send, None, 2),
            attempt(sender.send, tell(), flags=7),
            attempt(sender.send),
            attempt(sender.send, None, 0),
            attempt(sender.send, "a response"),
            attempt(sender.send, tell(), "final"),
            attempt(sender.send, tell(), None),
        ]
        sender.send(tell(*texts), FINAL)
        kept.texts = [
            attempt(sender.send, None, 2),
            attempt(sender.send),
            attempt(sender.send, tell("late")),
            attempt(sender.send, flags=FINAL),
        ]
        """
    unsupported = "TritonModelException: Unable to send response. Unsupported flag provided."
    missing = (
        "TritonModelException: Inference Response object must be provided when the response "
        "flags is set to zero."
    )
    texts = server.text("stream", code)
    assert texts[:4] == [unsupported, unsupported, missing, missing]
    assert all(each.startswith("TypeError: send(): ") for each in texts[4:]), texts
    after = server.text("stream", "request.get_response_sender().send(tell(*kept.texts), FINAL)")
    assert after == [unsupported, missing, CLOSED, CLOSED]


def test_requests_that_a_model_makes_have_no_way_back(server):
    """Their sender refuses with the documented text; so does is_cancelled."""
    code = """
        made = call("plain", [1])
        sender = made.get_response_sender()
        texts = [
            attempt(sender.send, tell()),
            attempt(made.is_cancelled),
            attempt(sender.is_cancelled),
            attempt(sender.send, None, 2),
        ]
        result = [tell(*texts)]
        """
    texts = server.text("plain", code)
    assert texts[0] == (
        "TritonModelException: Unable to send response. Response sender has no reference to the "
        "decoupled state of the model."
    )
    assert all(each.startswith("TritonModelException") for each in texts)


# --- decoupled models ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["stream", "astream"])
@pytest.mark.parametrize("count", [0, 1, 2, 200])
@pytest.mark.parametrize("is_bare", [True, False])
def test_any_number_of_responses(server, model, count, is_bare):
    """The end comes by itself, or with the last response."""
    if not is_bare and not count:
        return
    code = f"""
        sender = request.get_response_sender()
        for n in range({count - (not is_bare)}):
            sender.send(answer([n]))
        sender.send({"None" if is_bare else f"answer([{count - 1}])"}, flags=FINAL)
        """
    assert server.values(model, code) == [*map(float, range(count)), *([""] if is_bare else [])]


def test_responses_are_sent_from_threads_after_execute_has_returned(server):
    """By whoever has the sender; the inputs stay what they were."""
    code = """
        def run(request):
            until(lambda: kept.is_open)
            sender = request.get_response_sender()
            for n in range(3):
                sender.send(answer(read(request) + n))
            sender.send(flags=FINAL)
        kept.is_open = False
        start(run, request)
        start(lambda: setattr(kept, "is_open", True))
        """
    data = np.arange(100_000, dtype=np.float32)
    values = server.values("stream", code, data=data)
    assert [len(each) for each in values] == [100_000] * 3 + [0]
    for n in range(3):
        assert np.array_equal(values[n], data + n)


def test_responses_are_sent_from_a_coroutine_that_was_left_running(server):
    """An execute that returned has its task go on."""
    code = """
        async def run(sender):
            for n in range(5):
                await asyncio.sleep(0.001)
                sender.send(answer([n]))
            sender.send(flags=FINAL)
        kept.task = asyncio.create_task(run(request.get_response_sender()))
        """
    assert server.values("astream", code) == [0, 1, 2, 3, 4, ""]


def test_many_threads_share_a_sender(server):
    """Nothing is lost or doubled, and the end is the last."""
    code = """
        sender = request.get_response_sender()
        def run(first):
            for n in range(first, first + 50):
                sender.send(answer([n]))
        threads = [threading.Thread(target=run, args=(n * 50,)) for n in range(6)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        sender.send(flags=FINAL)
        """
    values = server.values("stream", code)
    assert sorted(values[:-1]) == list(range(300))
    assert values[-1] == ""
    for first in range(0, 300, 50):
        own = [each for each in values[:-1] if first <= each < first + 50]
        assert own == sorted(own)


def test_requests_of_a_batch_are_answered_in_any_order(server):
    """Each gets its own, whatever the others get."""
    code = """
        senders = [each.get_response_sender() for each in requests]
        for n, sender in reversed(list(enumerate(senders))):
            sender.send(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", np.array([[n]], np.float32))]))
        def run():
            for n, sender in enumerate(senders):
                for _ in range(n):
                    sender.send(pb_utils.InferenceResponse(
                        [pb_utils.Tensor("OUTPUT0", np.array([[len(senders)]], np.float32))]))
                sender.send(flags=FINAL)
        start(run)
        """

    async def main():
        heard = [Heard() for _ in range(4)]
        for each in heard:
            server.submit("batched", code, each)
        await until(lambda: all(each.ended.is_set() for each in heard))
        return [each.values for each in heard]

    values = server.run(main())
    assert sum(each[0] == 0 for each in values) >= 1
    for each in values:
        assert len(each) == each[0] + 2
        assert each[-1] == ""


@pytest.mark.parametrize("model", ["stream", "astream"])
def test_errors_may_come_in_the_middle_of_a_stream(server, model):
    """They are responses like others; what they had besides is dropped."""
    code = """
        sender = request.get_response_sender()
        sender.send(answer([1]))
        sender.send(failure("not this one", pb_utils.TritonError.NOT_FOUND))
        sender.send(answer([2]))
        sender.send(failure("and stop"), FINAL)
        """
    one, error, two, last = server.values(model, code)
    assert (one, two) == (1, 2)
    assert (error.message, error.code) == ("not this one", Code.NOT_FOUND)
    assert (last.message, last.code) == ("and stop", Code.INTERNAL)


def test_a_response_object_may_be_sent_again_and_again(server):
    """Outputs that were not asked for are left out each time, and stay in the object."""
    code = """
        response = pb_utils.InferenceResponse([
            pb_utils.Tensor("OUTPUT0", np.arange(5000, dtype=np.float32)),
            pb_utils.Tensor("TEXT", np.array(["x"], object)),
        ], parameters={"n": 1})
        sender = request.get_response_sender()
        for _ in range(3):
            sender.send(response)
        assert len(response.output_tensors()) == 2
        sender.send(response, FINAL)
        """
    assert server.values("stream", code, "TEXT") == [["x"]] * 4
    both = server.hear("stream", code)
    assert [len(each) for each in both.values] == [5001] * 4
    assert [each.parameters for each in both.responses] == [{"n": 1}] * 4
    only = server.values("stream", code, "OUTPUT0")
    assert [len(each) for each in only] == [5000] * 4


def test_outputs_without_elements_strings_and_large_ones(server):
    """Zero-length, BYTES with zeros inside, and 16 MiB by handle."""
    code = """
        sender = request.get_response_sender()
        sender.send(answer(np.zeros(0)))
        sender.send(tell())
        sender.send(tell("", "a\\0b", "ü" * 5000))
        big = np.full(4 << 20, 7, np.float32)
        for n in range(3):
            big[0] = n
            sender.send(answer(big))
        big[0] = 100
        sender.send(answer(big), FINAL)
        """
    values = server.values("stream", code)
    assert values[:3] == [[], [], ["", "a\0b", "ü" * 5000]]
    assert [(each[0], each[-1], len(each)) for each in values[3:]] == [
        (n, 7, 4 << 20) for n in (0, 1, 2, 100)
    ]


def test_an_input_may_be_sent_on(server):
    """The same array several times, changed in between: each response is as it was sent."""
    code = """
        x = read(request)
        sender = request.get_response_sender()
        for n in range(3):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
            x[:] += 1
        sender.send(flags=FINAL)
        """
    values = server.values("stream", code, data=np.zeros(5000))
    assert [(each[0], each[-1]) for each in values[:3]] == [(0, 0), (1, 1), (2, 2)]


def test_what_cannot_travel_is_that_response_s_error(server):
    """A name beyond any frame, an object that lies: the stream goes on."""
    code = """
        sender = request.get_response_sender()
        sender.send(answer([1], parameters={"x": "y" * (1 << 20)}))
        broken = tell("x")
        broken.output_tensors()[0]._name = "TEXT"
        sender.send(answer([2]))
        sender.send(failure("\\ud800 text"))
        sender.send(flags=FINAL)
        """
    first, two, third, end = server.values("stream", code)
    assert "beyond" in first.message
    assert two == 2
    assert "text" in third.message
    assert end == ""


# --- models that are not decoupled ---------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "aplain"])
def test_the_first_response_of_a_plain_model_is_its_last(server, model):
    """A second one is refused, the bare end is welcome once."""
    code = """
        sender = request.get_response_sender()
        texts = [attempt(sender.send, flags=FINAL)]
        sender.send(answer([1]))
        texts.append(attempt(sender.send, answer([2])))
        texts.append(attempt(sender.send, answer([2]), FINAL))
        texts.append(attempt(sender.send, flags=FINAL))
        texts.append(attempt(sender.send, flags=FINAL))
        texts.append(attempt(sender.send, answer([2])))
        kept.texts = texts
        """
    assert server.values(model, code) == [1]
    code = "sender = request.get_response_sender()\nsender.send(tell(*kept.texts), FINAL)"
    first, second, third, *after = server.text(model, code)
    assert first.endswith(
        "Non-decoupled model cannot send complete final before sending a response."
    )
    assert second.endswith("Non-decoupled model cannot send more than one response.")
    assert third == second
    assert after == ["", CLOSED, CLOSED]


def test_a_plain_model_may_answer_later(server):
    """From a thread, after execute has returned None or a list with None."""
    for result in ("None", "[None]"):
        code = f"""
            def run(sender):
                until(lambda: kept.go)
                sender.send(answer([5]))
            kept.go = False
            start(run, request.get_response_sender())
            start(lambda: setattr(kept, "go", True))
            result = {result}
            """
        assert server.values("plain", code) == [5]


def test_a_returned_response_besides_one_that_was_sent_is_dropped(server):
    """The client has its answer; the log says what happened."""
    code = """
        request.get_response_sender().send(answer([1]))
        result = [answer([2])]
        """
    assert server.values("plain", code) == [1]


def test_a_returned_response_closes_the_sender(server):
    """Whoever has it is told so."""
    code = """
        kept.sender = request.get_response_sender()
        result = [answer([2])]
        """
    assert server.values("plain", code) == [2]
    code = """
        sender, kept.sender = kept.sender, None
        result = [tell(attempt(sender.send, answer([3])), attempt(sender.send, flags=FINAL))]
        """
    assert server.text("plain", code) == [CLOSED, CLOSED]
