# SPDX-License-Identifier: Apache-2.0
"""Models that call other models: every form, from every kind of code, and what can go wrong."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from actorserve.errors import ActorserveError, Unavailable
from tests.server.calling_models import (
    COUNT,
    COUNT_ASYNC,
    DOUBLE,
    ask,
    serve,
    until,
    write,
)

SYNC = (
    "def execute(self, requests):\n"
    "    return [passed_on(call('double', read(r)).exec()) for r in requests]\n"
)
ASYNC = (
    "async def execute(self, requests):\n"
    "    got = await asyncio.gather(*[call('double', read(r)).async_exec() for r in requests])\n"
    "    return [passed_on(each) for each in got]\n"
)
IN_COROUTINE = (
    "async def execute(self, requests):\n"
    "    return [passed_on(call('double', read(r)).exec()) for r in requests]\n"
)
TO_THREAD = (
    "async def execute(self, requests):\n"
    "    return [passed_on(await asyncio.to_thread(call('double', read(r)).exec)) "
    "for r in requests]\n"
)
IN_THREADS = """
def execute(self, requests):
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(4) as pool:
        return [passed_on(r) for r in pool.map(lambda r: call('double', read(r)).exec(), requests)]
"""
IN_A_LOOP_OF_ITS_OWN = """
def execute(self, requests):
    async def all_of_them():
        return await asyncio.gather(*[call('double', read(r)).async_exec() for r in requests])
    return [passed_on(each) for each in asyncio.run(all_of_them())]
"""
IN_A_POOL = """
def execute(self, requests):
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(4) as pool:
        got = [pool.map(work, np.array_split(read(r), 4)) for r in requests]
    return [answer(np.concatenate(each)) for each in got]
# module level
def work(part):
    return value(call("double", part).exec())
"""
FORMS = {
    "exec": SYNC,
    "async_exec": ASYNC,
    "exec in a coroutine": IN_COROUTINE,
    "exec in to_thread": TO_THREAD,
    "exec in threads": IN_THREADS,
    "async_exec in asyncio.run": IN_A_LOOP_OF_ITS_OWN,
    "exec in a forked pool": IN_A_POOL,
}


@pytest.mark.parametrize("body", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("count", [4, 200_000])
def test_a_model_calls_another(repository, body, count):
    """Small and large tensors, from every kind of code, many at once."""
    write(repository, "double", DOUBLE, instances=2)
    write(repository, "caller", body)

    async def test(server):
        numbers = np.arange(count, dtype=np.float32)

        async def one(factor):
            outputs = await server.infer("caller", {"INPUT0": numbers * factor})
            np.testing.assert_array_equal(outputs["OUTPUT0"], numbers * factor * 2)

        await asyncio.gather(*[one(factor) for factor in range(8)])

    serve(repository, test)


def test_large_tensors_travel_by_handle(repository):
    """Two megabytes through a chain of three: nothing of it is ever in a message, or stays."""
    write(repository, "double", DOUBLE)
    write(repository, "middle", SYNC)
    write(repository, "outer", SYNC.replace("'double'", "'middle'"))

    async def test(server):
        numbers = np.arange(500_000, dtype=np.float32)
        for _ in range(20):
            outputs = await server.infer("outer", {"INPUT0": numbers})
            np.testing.assert_array_equal(outputs["OUTPUT0"], numbers * 2)
            del outputs
        arena = server.stats().exchange.arena
        assert arena.segment_bytes <= 16 << 20

    serve(repository, test)


def test_a_passed_on_input_is_not_changed_by_the_callee(repository):
    """The callee writes into what it got; its caller and the other callees do not see it."""
    write(
        repository,
        "scribbler",
        "def execute(self, requests):\n"
        "    out = []\n"
        "    for r in requests:\n"
        "        x = read(r)\n"
        "        x += 100\n"
        "        out.append(answer(x))\n"
        "    return out\n",
    )
    write(
        repository,
        "caller",
        "def execute(self, requests):\n"
        "    out = []\n"
        "    for r in requests:\n"
        "        mine = pb_utils.get_input_tensor_by_name(r, 'INPUT0')\n"
        "        calls = [pb_utils.InferenceRequest(model_name='scribbler', inputs=[mine],\n"
        "                 requested_output_names=['OUTPUT0']).exec() for _ in range(3)]\n"
        "        out.append(answer(mine.as_numpy()[:1] + sum(value(c)[:1] for c in calls)))\n"
        "    return out\n",
    )

    async def test(server):
        for count in (4, 100_000):
            outputs = await server.infer("caller", {"INPUT0": np.ones(count, np.float32)})
            assert outputs["OUTPUT0"][0] == 1 + 3 * 101

    serve(repository, test)


# --- streams -------------------------------------------------------------------------------------

FAN = """
async def execute(self, requests):
    out = []
    for r in requests:
        streams, length = (int(each) for each in read(r))
        made = [call("count", [length]).async_exec(decoupled=True) for _ in range(streams)]
        wrong = 0
        for iterator in await asyncio.gather(*made):
            got = [int(value(each)[0]) for each in iterator if each.output_tensors()]
            wrong += got != list(range(length))
        out.append(answer([wrong]))
    return out
"""
FAN_TO_THREAD = FAN.replace(
    'call("count", [length]).async_exec(decoupled=True)',
    'asyncio.to_thread(call("count", [length]).exec, decoupled=True)',
)


@pytest.mark.parametrize("fan", [FAN, FAN_TO_THREAD], ids=["async_exec", "to_thread"])
@pytest.mark.parametrize("count", [COUNT, COUNT_ASYNC], ids=["threaded callee", "async callee"])
def test_many_concurrent_streams_are_all_complete_and_in_order(repository, fan, count):
    """The documented pattern, 8 to 512 streams a request, in bursts of clients."""
    write(repository, "count", count, decoupled=True)
    write(repository, "fan", fan)

    async def test(server):
        for streams, clients in ((8, 64), (64, 8), (512, 2)):
            answers = await asyncio.gather(
                *[ask(server, "fan", streams, 3) for _ in range(clients)]
            )
            assert answers == [[0.0]] * clients

    serve(repository, test)


def test_an_iterator_is_resumed_and_replayed(repository):
    """Break and go on; once it has ended, from the start as often as wanted."""
    write(repository, "count", COUNT, decoupled=True)
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    def first(r): return int(value(r)[0]) if r.output_tensors() else -1
    iterator = call("count", [5]).exec(decoupled=True)
    got = []
    for each in iterator:
        got.append(first(each))
        if len(got) == 2:
            break
    got += [first(each) for each in iterator]
    try:
        next(iterator)
        got.append(99)
    except StopIteration:
        pass
    again = [first(each) for each in iterator]
    more = [first(each) for each in iterator]
    iterator.cancel()
    return [answer([got == again == more, *got])]
""",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [1, 0, 1, 2, 3, 4, -1]

    serve(repository, test)


def test_an_iterator_of_the_main_thread_is_read_by_another(repository):
    """While the main thread waits for that one."""
    write(repository, "count", COUNT, decoupled=True)
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    iterators = [call("count", [200]).exec(decoupled=True) for _ in range(3)]
    got = []
    def read_all():
        for iterator in iterators:
            got.append(sum(int(value(r)[0]) for r in iterator if r.output_tensors()))
    thread = threading.Thread(target=read_all)
    thread.start()
    thread.join(20)
    return [answer(got)]
""",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [19900.0] * 3

    serve(repository, test)


def test_a_plain_model_is_a_stream_of_one(repository):
    """And an error is one response, too."""
    write(repository, "double", DOUBLE)
    write(
        repository,
        "caller",
        "def execute(self, requests):\n"
        "    good = list(call('double', [3]).exec(decoupled=True))\n"
        "    bad = list(call('nobody', [3]).exec(decoupled=True))\n"
        "    return [answer([len(good), value(good[0])[0], len(bad), bad[0].has_error()])]\n",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [1, 6, 1, 1]

    serve(repository, test)


def test_dropped_iterators_cancel_their_streams(repository):
    """A thousand are left half-way; callees see it, nothing is kept, later calls work."""
    endless = """
def initialize(self, args):
    self.running = 0

def execute(self, requests):
    for request in requests:
        threading.Thread(target=self.run, args=(request.get_response_sender(),)).start()

def run(self, sender):
    number = 0
    while not sender.is_cancelled():
        sender.send(answer([number]))
        number += 1
    sender.send(flags=FINAL)
"""
    write(repository, "endless", endless, decoupled=True)
    write(repository, "count", COUNT, decoupled=True)
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    for round in range(40):
        iterators = [call("endless", [0]).exec(decoupled=True) for _ in range(5)]
        for n, iterator in enumerate(iterators):
            for _ in range(n * 7):
                next(iterator)
        del iterators, iterator
    return [answer([len(list(call("count", [9]).exec(decoupled=True)))])]
""",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [10]
        versions = {m.name: m.versions[0] for m in server.stats().models}
        await until(lambda: _in_flight(server, "endless") == 0)
        assert versions["endless"].instances[0].restarts == 0

    serve(repository, test)


def _in_flight(server, model):
    stats = {m.name: m.versions[0].scheduler for m in server.stats().models}
    return stats[model].in_flight + stats[model].queued


def test_cancel_ends_a_stream_in_the_callee_s_own_time(repository):
    """Iteration runs to the end; a second cancel and one after the end do nothing."""
    patient = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        def run(sender=sender):
            sender.send(answer([1]))
            while not sender.is_cancelled():
                time.sleep(0.002)
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(
                "stopped", pb_utils.TritonError.CANCELLED)), flags=FINAL)
        threading.Thread(target=run).start()
"""
    write(repository, "patient", patient, decoupled=True)
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    iterator = call("patient", [0]).exec(decoupled=True)
    first = value(next(iterator))[0]
    iterator.cancel()
    iterator.cancel()
    rest = list(iterator)
    iterator.cancel()
    is_cancelled = rest[0].error().code() == pb_utils.TritonError.CANCELLED
    return [answer([first, len(rest), is_cancelled])]
""",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [1, 1, 1]

    serve(repository, test)


# --- errors --------------------------------------------------------------------------------------

ERRORS = {
    "unknown model": (
        "call('nobody', [1])",
        "Model nobody - Error when running inference: "
        "Request for unknown model: 'nobody' is not found",
        5,
    ),
    "missing input": (
        "pb_utils.InferenceRequest(model_name='double', inputs=[], "
        "requested_output_names=['OUTPUT0'])",
        "expected 1 inputs but got 0 inputs for model 'double'. Got input(s) [], but missing "
        "required input(s) ['INPUT0']. Please provide all required input(s).",
        3,
    ),
    "decoupled model": (
        "call('count', [1])",
        "Model count is using the decoupled. The current BLS request call doesn't support models "
        "using the decoupled transaction policy. Please use 'decoupled=True' argument to the "
        "'exec' or 'async_exec' calls for decoupled models.'",
        5,
    ),
    "the callee's own": ("call('fails', [1])", "as you asked for", 6),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_calls_are_responses(repository, name):
    """With the documented text and the callee's code; the next call works."""
    made, text, code = ERRORS[name]
    code = {"unknown model": 2, "decoupled model": 5, "missing input": 3}.get(name, code)
    write(repository, "double", DOUBLE)
    write(repository, "count", COUNT, decoupled=True)
    write(
        repository,
        "fails",
        "def execute(self, requests):\n"
        "    return [pb_utils.InferenceResponse(error=pb_utils.TritonError('as you asked for', "
        "pb_utils.TritonError.ALREADY_EXISTS)) for _ in requests]\n",
    )
    write(
        repository,
        "caller",
        f"def execute(self, requests):\n    return [passed_on({made}.exec()) for _ in requests]\n",
    )
    write(repository, "next", SYNC)

    async def test(server):
        with pytest.raises(ActorserveError) as caught:
            await ask(server, "caller", 0)
        assert text in caught.value.message
        assert caught.value.code == code
        assert await ask(server, "next", 4) == [8]

    serve(repository, test)


@pytest.mark.parametrize("hook", ["initialize(self, args)", "finalize(self)"])
def test_no_calls_while_loading_or_ending(repository, hook, tmp_path):
    """The documented error says so, in the model."""
    write(repository, "double", DOUBLE)
    write(
        repository,
        "caller",
        f"def {hook}:\n"
        "    try:\n"
        "        call('double', [1]).exec()\n"
        "    except pb_utils.TritonModelException as error:\n"
        f"        open({str(tmp_path / 'text')!r}, 'w').write(str(error))\n" + DOUBLE,
    )

    async def test(server):
        assert await ask(server, "caller", 4) == [8]

    serve(repository, test)
    text = (tmp_path / "text").read_text()
    assert text == "BLS is only supported during the 'execute' function."


def test_the_death_of_a_callee_is_an_error_of_the_call(repository):
    """Named and UNAVAILABLE; the caller lives on, and the callee is back for the next call."""
    write(
        repository,
        "dies",
        "def execute(self, requests):\n"
        "    if read(requests[0])[0] < 0:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return [answer(read(r)) for r in requests]\n",
    )
    write(repository, "caller", SYNC.replace("'double'", "'dies'"))

    async def test(server):
        with pytest.raises(Unavailable, match=r"stub 'dies_0' died while it had the request"):
            await ask(server, "caller", -1)
        assert await ask(server, "caller", 5) == [5]

    serve(repository, test, restart_backoff_s=(0.0, 0.0))


def test_the_death_of_a_caller_cancels_its_calls(repository):
    """Queued ones are never executed, running ones are told; the callee lives on."""
    write(
        repository,
        "waits",
        """
def execute(self, requests):
    for request in requests:
        while not request.is_cancelled():
            time.sleep(0.002)
    return [answer(read(r)) for r in requests]
""",
    )
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    calls = [call("waits", [n]).exec(decoupled=True) for n in range(5)]
    return [answer([len(list(each)) for each in calls])]
""",
    )

    async def test(server):
        with pytest.raises(Unavailable, match="stub 'caller_0' died"):
            await ask(server, "caller", 0)
        await until(lambda: _in_flight(server, "waits") == 0)
        assert {m.name: m.versions[0].instances[0].restarts for m in server.stats().models} == {
            "caller": 1,
            "waits": 0,
        }

    serve(repository, test, restart_backoff_s=(0.0, 0.0))


# --- circles -------------------------------------------------------------------------------------

SELF = """
def execute(self, requests):
    out = []
    for request in requests:
        x = read(request)
        out.append(answer(x) if x[0] <= 0 else passed_on(call("NEXT", x - 1).exec()))
    return out
"""


def test_a_model_that_calls_itself_without_a_free_instance_gets_an_error(repository):
    """As long as instances are left it works; then the newest call ends, and all go on."""
    write(repository, "self", SELF.replace("NEXT", "self"), instances=3)

    async def test(server):
        assert await ask(server, "self", 2) == [0]
        with pytest.raises(Unavailable, match="can never be served: every instance of it"):
            await ask(server, "self", 3)
        answers = await asyncio.gather(
            *[ask(server, "self", 1) for _ in range(12)], return_exceptions=True
        )
        assert all(each == [0] or isinstance(each, Unavailable) for each in answers)
        assert await ask(server, "self", 2) == [0]

    serve(repository, test)


def test_a_circle_of_models_ends_with_an_error(repository):
    """A calls B calls A, with one instance each."""
    write(repository, "a", SELF.replace("NEXT", "b"))
    write(repository, "b", SELF.replace("NEXT", "a"))

    async def test(server):
        assert await ask(server, "a", 1) == [0]
        with pytest.raises(Unavailable, match="call of 'b_0' to model 'a' can never be served"):
            await ask(server, "a", 2)
        assert await ask(server, "b", 1) == [0]

    serve(repository, test)


def test_an_asynchronous_circle_ends_too(repository):
    """What its coroutines do meanwhile cannot be known, so it takes a little longer."""
    body = """
async def execute(self, requests):
    out = []
    for request in requests:
        x = read(request)
        out.append(
            answer(x) if x[0] <= 0 else passed_on(await call("self", x - 1).async_exec()))
    return out
"""
    write(repository, "self", body)

    async def test(server):
        with pytest.raises(Unavailable, match="can never be served"):
            await ask(server, "self", 1)
        assert await ask(server, "self", 0) == [0]

    serve(repository, test)


def test_a_chain_of_sixteen_serves_sixty_four_clients(repository):
    """A long chain that ends somewhere is no circle."""
    depth = 16
    write(repository, "m0", DOUBLE)
    for n in range(1, depth):
        write(repository, f"m{n}", SYNC.replace("'double'", f"'m{n - 1}'"))

    async def test(server):
        answers = await asyncio.gather(*[ask(server, f"m{depth - 1}", n) for n in range(64)])
        assert answers == [[2.0 * n] for n in range(64)]

    serve(repository, test)


# --- what travels with a call --------------------------------------------------------------------


def test_a_call_carries_all_that_a_request_has(repository):
    """Id, correlation id, flags, timeout, parameters, wanted outputs; the response's parameters."""
    write(
        repository,
        "told",
        """
def execute(self, requests):
    out = []
    for r in requests:
        seen = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), r.parameters(),
                sorted(r.requested_output_names())]
        out.append(answer([0], parameters={"seen": json.dumps(seen)}))
    return out
""",
    )
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    request = call("told", [1], request_id="r7", correlation_id="seq", flags=3,
                   timeout=11_000_000_000, parameters={"a": 1, "b": True, "c": "x"})
    response = request.exec()
    seen = json.loads(json.loads(response.parameters())["seen"])
    expected = ["r7", "seq", 3, 11_000_000_000, '{"a":1,"b":true,"c":"x"}', ["OUTPUT0"]]
    seen[4], expected[4] = json.loads(seen[4]), json.loads(expected[4])
    if seen != expected:
        raise ValueError(seen)
    return [answer([1])]
""",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [1]

    serve(repository, test)


def test_a_version_may_be_named(repository):
    """The highest that serves otherwise."""
    from tests.server.harness import TELL, TELL_CONFIG, write_model

    body = TELL + "    def tell(self, request): return self.args['model_version']\n"
    write_model(repository, "told", body, TELL_CONFIG + "version_policy { all {} }", (1, 2, 10))
    write(
        repository,
        "caller",
        """
def execute(self, requests):
    got = []
    for version in (-1, 1, 2, 10, 3):
        r = call("told", [1], model_version=version).exec()
        got.append(-1 if r.has_error() else int(r.output_tensors()[0].as_numpy()[0]))
    return [answer(got)]
""",
    )

    async def test(server):
        assert await ask(server, "caller", 0) == [10, 1, 2, 10, -1]

    serve(repository, test)
