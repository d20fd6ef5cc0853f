# SPDX-License-Identifier: Apache-2.0
"""The ends that no model gives: each request has exactly one, whatever becomes of its sender."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from actorserve.errors import ActorserveError, Code
from tests.conftest import wait_until
from tests.server.calling_models import until
from tests.server.script_models import Heard, ScriptServer, served

CLOSED = "TritonModelException: Unable to send response. Response sender has been closed."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Return a server of script models."""
    yield from served(tmp_path_factory.mktemp("sender_ends"))


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


# --- ends that no model gives --------------------------------------------------------------------

DROPS = {
    "nothing at all": "pass",
    "a list of None": "result = [None]",
    "sender let go": "request.get_response_sender()",
    "sender in a cycle": "a = [request.get_response_sender()]; a.append(a); del a; gc.collect()",
    "thread that returns": "start(lambda sender: None, request.get_response_sender())",
    "task that returns": "async def run(s): pass\nasyncio.create_task(run("
    "request.get_response_sender()))",
}


@pytest.mark.parametrize("model", ["plain", "stream", "aplain", "astream"])
@pytest.mark.parametrize("how", DROPS)
def test_a_request_that_nobody_can_answer_any_more_ends(server, model, how):
    """With an error that says why, and at once."""
    if ("task" in how and model[0] != "a") or ("list" in how and "stream" in model):
        return
    code = DROPS[how] if model[0] != "a" else DROPS[how].replace("result =", "return")
    error = server.error(model, code)
    assert error.code is Code.INTERNAL
    assert "Failed to process the request(s) for model" in error.message
    assert "dropped" in error.message
    after = "request.get_response_sender().send(answer([1]), FINAL)"
    assert server.values(model, after) == [1]


def test_what_was_sent_before_the_drop_arrives(server):
    """Then the error."""
    code = """
        def run(sender):
            for n in range(100):
                sender.send(answer([n]))
        start(run, request.get_response_sender())
        """
    *values, error = server.values("stream", code)
    assert values == list(range(100))
    assert "the response sender was dropped before the final response was sent" in error.message


def test_the_error_of_a_thread_is_the_client_s(server):
    """A thread that ends with an exception names it."""
    code = """
        def run(sender):
            sender.send(answer([1]))
            raise ValueError("the thread's own")
        start(run, request.get_response_sender())
        """
    one, error = server.values("stream", code)
    assert one == 1
    assert "ValueError: the thread's own" in error.message


def test_a_model_s_own_hook_for_threads_changes_only_the_text(server):
    """Its end is seen all the same."""
    code = """
        before = threading.excepthook
        def hook(args):
            threading.excepthook = before
        threading.excepthook = hook
        def run(sender):
            raise ValueError("hidden")
        start(run, request.get_response_sender())
        """
    assert "was dropped before" in server.error("stream", code).message


def test_the_error_of_a_task_ends_its_stream(server):
    """A task of the model's own that nobody awaits."""
    code = """
        async def run(sender):
            sender.send(answer([1]))
            await asyncio.sleep(0.01)
            raise ValueError("the task's own")
        asyncio.create_task(run(request.get_response_sender()))
        """
    one, error = server.values("astream", code)
    assert one == 1
    assert "ValueError: the task's own" in error.message


def test_a_request_that_is_kept_can_be_answered_later(server):
    """No sender was taken while execute ran; the model has the request, and asks for one."""
    for model in ("plain", "stream"):
        code = "kept.requests = list(requests)"
        answering = """
            (old,) = kept.requests
            kept.requests = None
            old.get_response_sender().send(answer(read(old)), FINAL)
            result = None
            request.get_response_sender().send(answer([2]), FINAL)
            """

        async def main(model=model, code=code, answering=answering):
            first, second = Heard(), Heard()
            server.submit(model, code, first, data=[8])
            server.submit(model, answering, second)
            await until(lambda: first.ended.is_set() and second.ended.is_set())
            return first.values, second.values

        assert server.run(main()) == ([8], [2])


def test_an_exception_ends_what_is_open(server):
    """Before, between and after responses; a sender in a thread is closed by it."""
    for model in ("stream", "plain", "astream", "aplain"):
        error = server.error(model, "raise KeyError('early')")
        assert "KeyError: 'early'" in error.message
    code = """
        kept.sender = request.get_response_sender()
        kept.sender.send(answer([1]))
        raise KeyError("late")
        """
    for model in ("stream", "astream"):
        one, error = server.values(model, code)
        assert one == 1
        assert "KeyError: 'late'" in error.message
        text = server.text(
            model,
            """
            text = attempt(kept.sender.send, answer([2]))
            kept.sender = None
            request.get_response_sender().send(tell(text), FINAL)
            """,
        )
        assert text == [CLOSED]
    for model in ("plain", "aplain"):
        assert server.values(model, code) == [1]
    code = code.replace("send(answer([1]))", "send(answer([1]), FINAL)")
    for model in ("plain", "stream", "aplain", "astream"):
        assert server.values(model, code) == [1]


def test_an_exception_ends_the_unanswered_requests_of_a_batch(server):
    """Those that have their end see nothing of it."""
    code = """
        sender = requests[0].get_response_sender()
        sender.send(pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", np.array([[len(requests)]], np.float32))]), FINAL)
        raise ValueError("for the others")
        """

    async def main():
        heard = [Heard() for _ in range(4)]
        for each in heard:
            server.submit("batched", code, each)
        await until(lambda: all(each.ended.is_set() for each in heard))
        return [each.values for each in heard]

    values = server.run(main())
    good = [each for each in values if not isinstance(each[0], ActorserveError)]
    assert len(values) == sum(int(each[0]) for each in good)
    assert all(len(each) == 1 for each in values)


def test_a_decoupled_model_may_return_nothing_but_none(server):
    """The documented error goes to whoever has no end yet."""
    error = server.error("stream", "result = [answer([1])]")
    assert error.message.endswith(
        "Python model 'stream_0' is using the decoupled mode and the execute function must return "
        "None."
    )
    code = "request.get_response_sender().send(answer([1]), FINAL)\nresult = [None]"
    assert server.values("stream", code) == [1]


# --- what runs in between ------------------------------------------------------------------------


def test_finalizers_of_the_model_may_send(server):
    """Garbage collection runs them anywhere, within a sending too."""
    code = """
        class Session:
            def __init__(self, sender):
                self.sender, self.me = sender, self
            def __del__(self):
                pb_utils.Logger.log_info("a session ends")
                self.sender.send(answer([1]))
                self.sender.send(flags=FINAL)
        threshold = gc.get_threshold()
        gc.set_threshold(1, 1, 1)
        Session(request.get_response_sender())
        for n in range(50):
            Session(call("plain", [n]).get_response_sender())
            pb_utils.Logger.log_verbose("x")
            junk = [[] for _ in range(20)]
        gc.collect()
        gc.set_threshold(*threshold)
        """
    assert server.values("stream", code) == [1, ""]


def test_a_signal_handler_may_send(server):
    """It runs on the main thread, wherever that is, and on the same sender."""
    code = """
        sender = request.get_response_sender()
        seen = []
        def handler(*_):
            seen.append(1)
            pb_utils.Logger.log_verbose("tick")
            sender.send(answer([-1]))
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        for n in range(3000):
            sender.send(answer([n]))
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sender.send(answer([len(seen)]), FINAL)
        """
    *values, seen = server.values("stream", code)
    assert [each for each in values if each >= 0] == list(range(3000))
    assert values.count(-1) == seen > 0


def test_a_forked_child_cannot_answer(server):
    """Neither by sending nor by its end; the parent still can."""
    code = """
        sender = request.get_response_sender()
        for n in range(70):
            sender.send(answer([n]))
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            text = attempt(sender.send, answer([100]))
            text += attempt(sender.send, flags=FINAL)
            text += attempt(request.get_response_sender().send, flags=FINAL)
            os.write(into, text.encode())
            del sender, request, requests
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        sender.send(tell(os.read(out, 10_000).decode()))
        os.close(out), os.close(into)
        sender.send(flags=FINAL)
        """
    *numbers, text, end = server.values("stream", code)
    assert numbers == list(range(70))
    assert text[0].count("belongs to the process that forked this one") == 3
    assert end == ""


def test_a_forked_child_that_returns_from_execute_changes_nothing(server):
    """It has the same call stack, and ends there."""
    code = """
        sender = request.get_response_sender()
        if os.fork():
            os.wait()
            sender.send(answer([1]), FINAL)
        """
    assert server.values("stream", code) == [1]


# --- code that has failed, and is kept -----------------------------------------------------------

KEPT = {
    "a task in a list": """
        async def run(sender):
            await asyncio.sleep(0)
            raise ValueError("kept and dead")
        kept.task = asyncio.create_task(run(request.get_response_sender()))
        """,
    "a request in a coroutine that a task awaits": """
        async def inner(requests):
            await asyncio.sleep(0)
            raise ValueError("kept and dead")
        async def run(requests):
            await inner(requests)
        kept.task = asyncio.create_task(run(requests))
        """,
    "a task of a group": """
        async def run(sender):
            raise ValueError("kept and dead")
        kept.task = asyncio.gather(run(request.get_response_sender()))
        """,
    "a job of an executor": """
        def run(sender):
            raise ValueError("kept and dead")
        loop = asyncio.get_running_loop()
        kept.task = loop.run_in_executor(None, run, request.get_response_sender())
        """,
}


@pytest.mark.parametrize("how", KEPT)
def test_failed_code_that_is_kept_answers_nothing(server, how):
    """Its exception keeps its variables, with the sender; the client hears of it all the same."""
    error = server.error("astream", KEPT[how])
    assert "ValueError: kept and dead" in error.message
    assert "dropped" in error.message
    assert server.values("astream", LET_GO) == [1]


LET_GO = "kept.__dict__.clear()\nrequest.get_response_sender().send(answer([1]), FINAL)"


def test_a_cancelled_task_that_is_kept_answers_nothing(server):
    """The task holds the error that has cancelled it."""
    code = """
        async def run(sender):
            await asyncio.sleep(1000)
        kept.task = asyncio.create_task(run(request.get_response_sender()))
        await asyncio.sleep(0)
        kept.task.cancel()
        """
    error = server.error("astream", code)
    assert "CancelledError" in error.message
    assert server.values("astream", LET_GO) == [1]


@pytest.mark.parametrize("model", ["plain", "stream"])
def test_a_thread_that_is_dead_answers_nothing(server, model):
    """Whoever has kept its exception, or that of an executor's job."""
    code = """
        def run(sender):
            try:
                raise ValueError("kept and dead")
            except ValueError as error:
                kept.error = error
                raise
        start(run, request.get_response_sender())
        """
    assert "ValueError: kept and dead" in server.error(model, code).message
    code = """
        from concurrent.futures import ThreadPoolExecutor
        def run(sender):
            raise KeyError("kept, too")
        kept.pool = ThreadPoolExecutor(1)
        kept.job = kept.pool.submit(run, request.get_response_sender())
        """
    assert "KeyError: 'kept, too'" in server.error(model, code).message
    code = "kept.pool.shutdown()\n" + LET_GO
    assert server.values(model, code) == [1]


def test_whoever_waits_for_failed_code_may_answer(server):
    """The sender is its own, too: what it says is what the client hears."""
    code = """
        async def part(sender):
            sender.send(answer([1]))
            raise ValueError("the part's own")
        async def run(sender):
            kept.task = asyncio.create_task(part(sender))
            try:
                await kept.task
            except ValueError as error:
                await asyncio.sleep(0.01)
                sender.send(failure(f"said otherwise: {error}"), FINAL)
        kept.whole = asyncio.create_task(run(request.get_response_sender()))
        """
    one, error = server.values("astream", code)
    assert one == 1
    assert error.message == "said otherwise: the part's own"
    assert server.values("astream", LET_GO) == [1]


def test_an_error_that_others_live_on_with_ends_only_who_failed(server):
    """One error went through the frames of tasks that have caught it and go on."""
    code = """
        async def user(number, sender, catches):
            try:
                await kept.news
            except KeyError:
                if not catches:
                    raise
                await asyncio.sleep(0.02)
                sender.send(answer([number]))
        async def engine(sender):
            try:
                raise KeyError("shared")
            except KeyError as error:
                kept.news.set_exception(error)
                await asyncio.sleep(0.04)
            sender.send(answer([3]), FINAL)
        kept.news = asyncio.get_running_loop().create_future()
        sender = request.get_response_sender()
        kept.tasks = [asyncio.create_task(user(n, sender, n == 2)) for n in (1, 2)]
        kept.tasks.append(asyncio.create_task(engine(sender)))
        """
    assert server.values("astream", code) == [2, 3]
    assert server.values("astream", LET_GO) == [1]


# --- senders that are kept for ever --------------------------------------------------------------


@pytest.mark.parametrize("model", ["plain", "stream"])
def test_clients_that_left_do_not_use_up_their_model(server, model):
    """More of them than there are slots; their senders stay cancelled, and say nothing more."""
    keep = """
        sender = request.get_response_sender()
        kept.__dict__.setdefault("senders", []).append(sender)
        """

    async def leave() -> None:
        sent = [server.submit(model, keep, Heard()) for _ in range(550)]
        last = Heard()
        server.submit(model, "request.get_response_sender().send(answer([0]), FINAL)", last)
        await until(last.ended.is_set)
        for each in sent:
            each.disconnect()

    for _ in range(2):
        server.run(leave())
    code = """
        until(lambda: all(each.is_cancelled() for each in kept.senders))
        for each in kept.senders:
            if "stream" == MODEL:
                each.send(answer([1]))
            each.send(answer([2]), FINAL)
        sender = request.get_response_sender()
        sender.send(answer([len(kept.senders)]), FINAL)
        kept.__dict__.clear()
        """
    assert server.values(model, code.replace("MODEL", repr(model))) == [1100]


def test_iterators_that_are_dropped_do_not_use_up_their_callee(server):
    """A model that makes calls whose streams never end."""
    keep = "kept.__dict__.setdefault('senders', []).append(request.get_response_sender())"
    code = f"""
        for n in range(1100):
            iterator = scripted("stream", {keep!r}).exec(decoupled=True)
            del iterator
        sender = request.get_response_sender()
        sender.send(answer([1]), FINAL)
        """
    assert server.values("plain", code) == [1]
    code = """
        until(lambda: all(each.is_cancelled() for each in kept.senders))
        kept.__dict__.clear()
        request.get_response_sender().send(answer([1]), FINAL)
        """
    wait_until(lambda: server.values("stream", "request.get_response_sender().send(flags=FINAL)"))
    assert server.values("stream", code) == [1]
