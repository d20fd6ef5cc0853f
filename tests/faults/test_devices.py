# SPDX-License-Identifier: Apache-2.0
"""Device memory when stubs die, run out of it, lose their device, or lie about it."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from actorserve.device.emulated import EmulatedDriver
from actorserve.device.pool import SlabPool
from actorserve.device.settings import DeviceSettings
from actorserve.errors import ActorserveError, Unavailable
from tests.server.device_models import IDENTITY, KEEPS, Served, serve, write
from tests.server.harness import parameter

MIB = 1 << 20

GATE = """
def gate(name):
    folder = os.environ["GATES"]
    if os.path.exists(f"{folder}/hold-{name}"):
        open(f"{folder}/at-{name}", "w").close()
        while os.path.exists(f"{folder}/hold-{name}"):
            time.sleep(0.005)

def checked(tensor):
    array = host(tensor)
    assert (array == array[0]).all(), "somebody else's bytes"
    return tensor
"""
"""`gate(name)` waits while the file hold-<name> is there, having made at-<name>."""

C = """
gate("c-in")
x = checked(read(request))
gate("c-out")
return respond(named("OUTPUT0", x))
"""
B = """
gate("b-in")
y = checked(output(call("c", checked(read(request)))))
gate("b-out")
return respond(named("OUTPUT0", y))
"""
A = """
gate("a-in")
x = on_device(np.full(1 << 20, host(read(request))[0], np.float32), "INPUT0")
y = checked(output(call("b", x)))
gate("a-out")
return respond(pb_utils.Tensor("OUTPUT0", host(y)[-1:]))
"""


class Gates:
    """Files between a test and its models."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        monkeypatch.setenv("GATES", str(folder))

    def hold(self, name: str) -> None:
        """Have a model wait at a place."""
        (self._folder / f"hold-{name}").touch()

    def is_at(self, name: str) -> bool:
        """Whether a model waits there."""
        return (self._folder / f"at-{name}").exists()

    def open(self, name: str) -> None:
        """Let it go on."""
        (self._folder / f"hold-{name}").unlink()
        (self._folder / f"at-{name}").unlink(missing_ok=True)


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """Return the gates of this test's models."""
    folder = tmp_path / "gates"
    folder.mkdir()
    return Gates(folder, monkeypatch)


async def kill(served: Served, model: str) -> int:
    """Kill a model's stub; returns its pid."""
    pid = served.instance(model).pid
    os.kill(pid, signal.SIGKILL)
    return pid


async def until_replaced(served: Served, model: str, pid: int) -> None:
    """Wait for another stub that serves."""
    await served.until(
        lambda: served.instance(model).pid not in (0, pid) and served.server.is_model_ready(model)
    )


async def until_no_byte_is_lost(served: Served, *models: str) -> None:
    """Wait until the server and the stubs of these models hold nothing on the device."""
    await served.until_nothing_is_held()

    async def is_free(model: str) -> bool:
        told = await served.tell(model)
        return (told["used"], told["views"], told["lent"], told["owed"]) == (0, 0, 0, 0)

    for model in models:
        await served.until(lambda model=model: is_free(model))


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_row_97_a_stub_of_a_chain_dies_anywhere(repository, tmp_path, gates, victim):
    """Each request has one answer, right or a clear error; nothing is lost, nothing stale read."""
    for name, body in (("a", A), ("b", B), ("c", C)):
        write(repository, name, body, head=GATE)

    async def test(served):
        for number, place in enumerate(("a-in", "b-in", "c-in", "c-out", "b-out", "a-out")):
            gates.hold(place)
            request = asyncio.ensure_future(served.outcome("a", [number]))
            await served.until(lambda place=place: gates.is_at(place))
            pid = await kill(served, victim)
            await until_replaced(served, victim, pid)
            gates.open(place)
            outcome = await asyncio.wait_for(request, 20)
            if isinstance(outcome, ActorserveError):
                assert "died" in outcome.message, outcome
                assert f"{victim}_0_0" in outcome.message or f"{victim}_0" in outcome.message
            else:
                assert outcome == [number]
            assert await served.outcome("a", [number + 100]) == [number + 100]
        await until_no_byte_is_lost(served, "a", "b", "c")
        assert served.devices.slabs == 1  # of the tenant that lives
        told = await served.tell("c")
        assert told["imported"] - told["retired"] == 1

    serve(repository, test, tmp_path)


def test_row_97_a_dead_producers_tensor_stays_good(repository, tmp_path, gates):
    """The consumer reads what it was given before, whole; then the memory is let go of."""
    write(
        repository,
        "consumer",
        """
gate("consumer")
x = checked(read(request))
with open(os.environ["GATES"] + "/read", "w") as file:
    file.write(str(host(x)[-1]))
return respond(named("OUTPUT0", x))
""",
        head=GATE,
    )
    write(
        repository,
        "producer",
        """
x = on_device(np.full(1 << 20, 7, np.float32), "INPUT0")
return respond(output(call("consumer", x)))
""",
    )

    async def test(served):
        gates.hold("consumer")
        request = asyncio.ensure_future(served.outcome("producer"))
        await served.until(lambda: gates.is_at("consumer"))
        pid = await kill(served, "producer")
        outcome = await request
        assert isinstance(outcome, Unavailable) and "SIGKILL" in outcome.message
        await until_replaced(served, "producer", pid)
        gates.open("consumer")
        read = tmp_path / "gates" / "read"
        await served.until(lambda: read.exists() and read.read_text())
        assert read.read_text() == "7.0"
        assert await served.outcome("producer") == [7.0] * MIB
        await until_no_byte_is_lost(served, "producer", "consumer")
        await served.until(lambda: served.devices.slabs == 1)

    serve(repository, test, tmp_path)


def test_row_97_a_request_is_tried_again_with_the_same_tensor(repository, tmp_path):
    """RETRY_ON_STUB_DEATH: the next stub maps the memory that the dead one had."""
    write(
        repository,
        "callee",
        """
if not os.path.exists(os.environ["MARK"]):
    open(os.environ["MARK"], "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
return respond(named("OUTPUT0", read(request)))
""",
        extra=KEEPS + parameter("RETRY_ON_STUB_DEATH", 1),
    )
    write(
        repository,
        "caller",
        'return respond(output(call("callee", on_device(host(read(request)), "INPUT0"))))',
    )

    async def test(served):
        os.environ["MARK"] = str(tmp_path / "mark")
        assert await served.outcome("caller", range(3000)) == list(range(3000))
        await until_no_byte_is_lost(served, "caller", "callee")

    os.environ["MARK"] = str(tmp_path / "mark")
    try:
        serve(repository, test, tmp_path)
    finally:
        del os.environ["MARK"]


def test_row_98_out_of_device_memory_is_an_error_of_one_request(repository, tmp_path):
    """The stub lives, and the next small request is served."""
    write(
        repository,
        "model",
        """
x = pb_utils.empty_device(int(host(read(request))[0]), np.float32, "OUTPUT0")
return respond(x.copy_from(np.ones(x.shape(), np.float32)))
""",
        extra=KEEPS + parameter("DEVICE_MAX_BYTES", 8 * MIB),
    )

    async def test(served):
        pid = served.instance("model").pid
        for _ in range(3):
            error = await served.outcome("model", [4 * MIB])
            assert isinstance(error, ActorserveError)
            assert "exceed this process's quota" in error.message
            assert await served.outcome("model", [5]) == [1.0] * 5
        assert served.instance("model").pid == pid
        await until_no_byte_is_lost(served, "model")

    serve(repository, test, tmp_path)


POISON = 'current_pool().driver.poison("an illegal access")'
WAYS = {
    "raises": f'{POISON}\n    raise RuntimeError("CUDA error")',
    "touches it": f"{POISON}\n    on_device(np.zeros(1, np.float32))",
    "answers": f'y = on_device(np.zeros(5, "f4"))\n    {POISON}\n    return respond(y)',
    "calls": f'y = on_device(np.zeros(5, "f4"), "INPUT0")\n    {POISON}\n'
    '    call("callee", y, pb_utils.Tensor("TEXTS", np.array([b"x"], object)), memory=(GPU,))',
    "in a thread": f"{POISON}\n    sender = request.get_response_sender()\n"
    "    def work():\n"
    "        try:\n"
    "            on_device(np.zeros(5, 'f4'))\n"
    "        except Exception as error:\n"
    "            text = pb_utils.TritonError(str(error))\n"
    "            sender.send(pb_utils.InferenceResponse(error=text), flags=1)\n"
    "    threading.Thread(target=work).start()\n    return None",
}


@pytest.mark.parametrize("way", WAYS)
def test_row_99_a_stub_whose_device_is_lost_is_replaced(repository, tmp_path, way):
    """The request has one error, those that wait go to the next stub, nobody else is hurt."""
    write(repository, "callee", IDENTITY)
    write(
        repository,
        "model",
        f"x = host(read(request))\nif x[0] < 0:\n    {WAYS[way]}\n"
        'return respond(on_device(x), pb_utils.Tensor("OUTPUT1", x))',
    )

    async def test(served):
        pid = served.instance("model").pid
        other = served.instance("callee").pid
        outcomes = await asyncio.gather(*[served.outcome("model", [n]) for n in (1, -1, 2, 3)])
        assert outcomes[0] == [1]
        assert isinstance(outcomes[1], ActorserveError), outcomes
        if way != "in a thread":  # where the model keeps to itself what it was told
            assert outcomes[2:] == [[2], [3]], outcomes
        assert all("an illegal access" in str(e) for e in outcomes[2:] if not isinstance(e, list))
        await until_replaced(served, "model", pid)
        assert "device is lost" in served.instance("model").last_exit
        assert "an illegal access" in served.instance("model").last_exit
        assert await served.outcome("model", [4]) == [4]
        assert served.instance("callee").pid == other

    serve(repository, test, tmp_path)


def test_row_99_open_requests_of_a_lost_device_have_a_clear_error(repository, tmp_path):
    """Requests that an asynchronous model has in execution are failed, with the reason."""
    head = f"""
class _Own:
    async def execute(self, requests):
        import asyncio
        answers = []
        for request in requests:
            x = host(read(request))
            if x[0] < 0:
                {POISON}
                raise RuntimeError("CUDA error")
            if x[0] == 0:
                open(os.environ["GATES"] + "/at-open", "a").close()
                await asyncio.sleep(60)
            answers.append(respond(pb_utils.Tensor("OUTPUT0", x)))
        return answers
"""
    write(
        repository,
        "model",
        "pass",
        head=head,
        extra=KEEPS + parameter("CONCURRENT_EXECUTES", 8),
    )
    path = repository / "model" / "1" / "model.py"
    path.write_text(path.read_text() + "\nTritonPythonModel = _Own\n")
    os.environ["GATES"] = str(tmp_path)

    async def test(served):
        waiting = [asyncio.ensure_future(served.outcome("model", [0])) for _ in range(3)]
        await served.until((tmp_path / "at-open").exists)
        error = await served.outcome("model", [-1])
        assert isinstance(error, ActorserveError) and "CUDA error" in error.message
        for outcome in await asyncio.gather(*waiting):
            assert isinstance(outcome, Unavailable), outcome
            assert "its device is lost" in outcome.message
        assert await served.outcome("model", [4]) == [4]

    try:
        serve(repository, test, tmp_path)
    finally:
        del os.environ["GATES"]


def test_row_100_a_host_that_uses_a_device_starts_stubs_as_ever(repository, tmp_path):
    """Stubs come from the zygote, which never saw a device; the host's own memory stays its own."""
    write(repository, "model", "return respond(on_device(host(read(request))))")
    driver = EmulatedDriver()
    pool = SlabPool(driver, epoch=1, settings=DeviceSettings(slab_bytes=MIB))
    buffer = pool.allocate(5)
    assert buffer is not None
    buffer.copy_in(b"hello")

    async def test(served):
        assert await served.outcome("model", range(3000)) == list(range(3000))
        told = await served.tell("model")
        assert (told["created"], told["imported"]) == (1, 0)
        assert bytes(buffer.copy_out()) == b"hello"

    serve(repository, test, tmp_path)
    assert driver.counters().open == 1
    buffer.release()
    pool.close()
    driver.shutdown()


LIES = {
    "another generation": "generation=ref.generation + 1, slot=ref.slot + 7, epoch=999",
    "another slab": "slab=ref.slab + 5",
    "beyond the slab": "nbytes=1 << 40",
    "before the slab": "offset=-4",
    "another's epoch": "epoch=ref.epoch - 1",
    "no generation": "generation=0",
}


@pytest.mark.parametrize("lie", LIES)
def test_row_101_a_false_reference_ends_its_stub_only(repository, tmp_path, lie):
    """The supervisor believes no reference that cannot be; in use is nothing at the end."""
    write(
        repository,
        "liar",
        """
import msgspec
pool = current_pool()
lend = type(pool).lend
if host(read(request))[0] < 0:
    class Liar(type(pool)):
        __slots__ = ()
        def lend(self, buffer):
            ref = lend(self, buffer)
            return msgspec.structs.replace(ref, LIE)
    pool.__class__ = Liar
return respond(on_device(np.zeros(5, np.float32)))
""".replace("LIE", LIES[lie]),
    )
    write(
        repository,
        "caller",
        'return respond(output(call("liar", pb_utils.Tensor("INPUT0", host(read(request))))))',
    )

    async def test(served):
        pid = served.instance("liar").pid
        assert await served.outcome("caller", [1]) == [0.0] * 5
        error = await served.outcome("caller", [-1])
        assert isinstance(error, ActorserveError) and "replaced because of an error" in str(error)
        await until_replaced(served, "liar", pid)
        assert await served.outcome("caller", [2]) == [0.0] * 5
        await until_no_byte_is_lost(served, "liar", "caller")

    serve(repository, test, tmp_path)


def test_row_101_memory_is_given_back_once_whatever_is_released_twice(repository, tmp_path):
    """A buffer that is released twice, or by hand before it is sent; a release that comes twice."""
    write(
        repository,
        "model",
        """
what = host(read(request))[0]
pool = current_pool()
x = on_device(np.arange(5, dtype=np.float32))
if what == 1:
    buffer = x._memory
    buffer.release(), buffer.release()
if what == 2:
    take = type(pool).take_releases
    class Twice(type(pool)):
        def take_releases(self):
            message = take(self)
            if message is not None:
                message = type(message)(message.blocks * 2)
            return message
    pool.__class__ = Twice
    y = output(call("callee", named("INPUT0", x)))
    del y
return respond(x)
""",
    )
    write(repository, "callee", IDENTITY)

    async def test(served):
        pid = served.instance("model").pid
        error = await served.outcome("model", [1])
        assert isinstance(error, ActorserveError) and "released already" in error.message
        for what in (0, 2, 0):
            assert await served.outcome("model", [what]) == [0, 1, 2, 3, 4]
        gc.collect()
        await until_no_byte_is_lost(served, "model", "callee")
        assert served.devices.refused >= 1
        assert served.instance("model").pid == pid

    serve(repository, test, tmp_path)


UNMAPPABLE = """
driver = current_pool().driver
if not hasattr(driver, "spoiled"):
    driver.spoiled = True
    def import_(uuid, fd, nbytes, extra):
        os.close(fd)
        raise OutOfDeviceMemory("no addresses are left")
    driver.import_ = import_
"""
SPOILT = "from actorserve.device.driver import OutOfDeviceMemory\n"


def test_a_receiver_that_cannot_map_a_slab_gets_host_bytes(repository, tmp_path):
    """The call is sent again before anything was done; the stub that failed to map serves on."""
    write(repository, "callee", UNMAPPABLE + IDENTITY, head=SPOILT)
    write(
        repository,
        "caller",
        """
array = host(read(request))
if array[0] == 0:
    return respond(output(call("callee", pb_utils.Tensor("INPUT0", array))))
x = on_device(array, "INPUT0")
return respond(pb_utils.Tensor("OUTPUT0", host(output(call("callee", x)))))
""",
    )

    async def test(served):
        assert await served.outcome("caller", [0.0]) == [0.0]  # its driver is spoilt from here on
        for _ in range(2):
            results = await asyncio.gather(*[served.outcome("caller", [n] * 2000) for n in (1, 2)])
            assert results == [[1.0] * 2000, [2.0] * 2000]
        told = await served.tell("callee")
        assert (told["imported"], told["views"]) == (0, 0)
        await until_no_byte_is_lost(served, "caller", "callee")

    serve(repository, test, tmp_path)


def test_a_caller_that_cannot_map_a_slab_says_so_once(repository, tmp_path):
    """The answer in hand is an error; from then on its answers come by host memory."""
    write(repository, "callee", "return respond(on_device(host(read(request))))")
    write(
        repository,
        "caller",
        UNMAPPABLE
        + """
x = pb_utils.Tensor("INPUT0", host(read(request)))
return respond(pb_utils.Tensor("OUTPUT0", host(output(call("callee", x)))))
""",
        head=SPOILT,
    )

    async def test(served):
        error = await served.outcome("caller", [1.0])
        assert isinstance(error, ActorserveError), error
        assert "which is not mapped here" in error.message
        for _ in range(3):
            assert await served.outcome("caller", [2.0] * 2000) == [2.0] * 2000
        await until_no_byte_is_lost(served, "caller", "callee")

    serve(repository, test, tmp_path)


def test_idle_stubs_give_their_slabs_back(repository, tmp_path):
    """To the device; receivers unmap them, and the next tensor makes a new one."""
    head = "import actorserve.runtime.stub_end as end\nend.TRIM_AFTER_S = 0.5"
    write(repository, "callee", IDENTITY)
    write(
        repository,
        "caller",
        'return respond(output(call("callee", on_device(host(read(request)), "INPUT0"))))',
        head=head,
    )

    async def test(served):
        for _ in range(2):
            assert await served.outcome("caller", range(5000)) == list(range(5000))
            await served.until(lambda: served.devices.slabs == 0)

        async def is_unmapped():
            told = await served.tell("callee")
            return (told["imported"], told["retired"]) == (2, 2)

        await served.until(is_unmapped)

    serve(repository, test, tmp_path)


def test_what_was_sent_to_a_cancelled_call_comes_back(repository, tmp_path, gates):
    """Calls that are dropped while their tensors wait at the callee lose no memory."""
    write(repository, "callee", 'gate("callee")\n' + IDENTITY.strip(), head=GATE)
    head = """
class _Own:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        import asyncio
        if request.requested_output_names() == {"TEXT"}:
            return respond(told(counters()))
        def make():
            x = on_device(np.full(5000, 3, np.float32), "INPUT0")
            return pb_utils.InferenceRequest(
                model_name="callee", inputs=[x], requested_output_names=["OUTPUT0"]
            ).async_exec()
        calls = [make() for _ in range(6)]
        await asyncio.sleep(0.2)
        for each in calls[1:5]:
            each.cancel()
        open(os.environ["GATES"] + "/cancelled", "w").close()
        got = [await calls[0], await calls[5]]
        assert all(host(output(each))[-1] == 3 for each in got)
        return respond(pb_utils.Tensor("OUTPUT0", np.zeros(1, np.float32)))
"""
    write(repository, "caller", "pass", head=head)
    path = repository / "caller" / "1" / "model.py"
    path.write_text(path.read_text() + "\nTritonPythonModel = _Own\n")

    async def test(served):
        gates.hold("callee")
        request = asyncio.ensure_future(served.outcome("caller"))
        await served.until((tmp_path / "gates" / "cancelled").exists)
        gates.open("callee")
        assert await request == [0.0]
        await until_no_byte_is_lost(served, "caller", "callee")

    serve(repository, test, tmp_path)
