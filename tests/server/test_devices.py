# SPDX-License-Identifier: Apache-2.0
"""Tensors on a device pass between models by reference, on an emulated device."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.server.device_models import IDENTITY, KEEPS, ON_CPU, serve, write
from tests.server.harness import parameter

MIB = 1 << 20
FORCED = ""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"


def test_a_large_tensor_passes_three_stubs_without_a_copy(repository, tmp_path):
    """64 MiB are filled once by the first stub and read once by it; nobody else copies a byte."""
    write(repository, "c", IDENTITY)
    write(repository, "b", 'return respond(named("OUTPUT0", output(call("c", read(request)))))')
    write(
        repository,
        "a",
        """
x = on_device(np.arange(16 << 20, dtype=np.float32), "INPUT0")
y = output(call("b", x))
assert not y.is_cpu()
return respond(pb_utils.Tensor("OUTPUT0", host(y)[-4:]))
""",
    )

    async def test(served):
        for _ in range(3):
            assert await served.outcome("a") == [float(x) for x in range((16 << 20) - 4, 16 << 20)]
        await served.until_nothing_is_held()
        told = await served.tell("a")
        assert (told["in"], told["out"], told["within"], told["created"]) == (3, 3, 0, 1)
        for name in ("b", "c"):
            told = await served.tell(name)
            assert (told["copies"], told["imported"], told["created"]) == (0, 1, 0)
            assert (told["views"], told["owed"]) == (0, 0)
        await served.until(lambda: _has_no_block(served, "a"))
        assert served.devices.slabs == 1

    serve(repository, test, tmp_path)


async def _has_no_block(served, model):
    told = await served.tell(model)
    return (told["used"], told["views"], told["lent"]) == (0, 0, 0)


@pytest.mark.parametrize("callee", ["on_device(x)", 'pb_utils.Tensor("OUTPUT0", x)'])
def test_the_caller_says_where_outputs_lie(repository, tmp_path, callee):
    """DEFAULT leaves them where they are, GPU puts them there and CPU brings them to the host."""
    write(repository, "callee", f"x = host(read(request))\nreturn respond({callee})")
    write(
        repository,
        "caller",
        """
x = read(request)
x = pb_utils.Tensor("INPUT0", host(x))
kinds = {0: None, 1: (GPU,), 2: (CPU,), 3: (GPU, 5)}
found = []
for number, memory in kinds.items():
    y = output(call("callee", x, memory=memory))
    assert host(y).tolist() == host(x).tolist()
    found.append(float(y.is_cpu()))
return respond(pb_utils.Tensor("OUTPUT0", np.array(found, np.float32)))
""",
    )

    async def test(served):
        for count in (3, 3000):
            found = await served.outcome("caller", np.arange(count))
            # A device that the caller does not have is nothing that it could use.
            assert found == [0.0 if "on_device" in callee else 1.0, 0.0, 1.0, 1.0]

    serve(repository, test, tmp_path)


def test_clients_get_bytes_that_the_producing_stub_has_copied(repository, tmp_path):
    """A model answers with a tensor on the device, alone or beside one on the host."""
    write(
        repository,
        "model",
        """
x = host(read(request))
return respond(on_device(x * 2), pb_utils.Tensor("OUTPUT1", x))
""",
    )

    async def test(served):
        for count in (0, 1, 5000):
            x = np.arange(count, dtype=np.float32)
            outputs = await served.infer("model", x, outputs=["OUTPUT0", "OUTPUT1"])
            assert outputs["OUTPUT0"].tolist() == (x * 2).tolist()
            assert outputs["OUTPUT1"].tolist() == x.tolist()
        assert (await served.tell("model"))["out"] == 2  # of nothing there is nothing to copy

    serve(repository, test, tmp_path)


def test_inputs_are_brought_to_the_host_unless_the_model_says_no(repository, tmp_path):
    """FORCE_CPU_ONLY_INPUT_TENSORS is yes by default; a model that says no gets what came."""
    body = "x = read(request)\nreturn respond(pb_utils.Tensor('OUTPUT0', host(x) + x.is_cpu()))"
    write(repository, "forced", body, extra=FORCED)
    write(repository, "free", body)
    write(
        repository,
        "caller",
        """
x = on_device(np.zeros(2000, np.float32), "INPUT0")
parts = [host(output(call(name, x)))[:1] for name in ("forced", "free")]
parts.append(host(output(call("free", pb_utils.Tensor("INPUT0", np.zeros(1, np.float32)))))[:1])
return respond(pb_utils.Tensor("OUTPUT0", np.concatenate(parts)))
""",
    )

    async def test(served):
        assert await served.outcome("caller") == [1.0, 0.0, 1.0]
        assert (await served.tell("forced"))["copies"] == 1
        assert (await served.tell("caller"))["out"] == 0

    serve(repository, test, tmp_path)


CHECKS = """
x = on_device(np.arange(2000, dtype=np.float32), "INPUT0")
for _ in range(3):
    y = output(call("callee", x, memory=memory))
    assert host(y).tolist() == host(x).tolist()
return respond(pb_utils.Tensor("OUTPUT0", np.array([y.is_cpu()], np.float32)))
"""


@pytest.mark.parametrize("preferred", ["None", "(GPU,)"])
@pytest.mark.parametrize(
    ("callee", "is_cpu"),
    [
        ({"group": ON_CPU}, 1.0),
        ({"extra": KEEPS + parameter("DEVICE_DRIVER", "none")}, 1.0),
        ({"group": "instance_group [ { kind: KIND_GPU gpus: [ 1 ] } ]"}, 1.0),
        ({"group": "instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] } ]"}, None),
    ],
    ids=["KIND_CPU", "no driver", "another device", "two devices"],
)
def test_who_cannot_use_the_device_gets_host_bytes(
    repository, tmp_path, monkeypatch, callee, is_cpu, preferred
):
    """The call is sent again by host memory, and later ones at once: none is lost."""
    monkeypatch.setenv("ACTORSERVE_EMULATED_DEVICES", "2")
    write(repository, "callee", IDENTITY, **callee)
    group = "instance_group [ { kind: KIND_GPU gpus: [ 0 ] } ]"
    write(repository, "caller", f"memory = {preferred}\n{CHECKS}", group=group)

    async def test(served):
        results = await asyncio.gather(*[served.outcome("caller") for _ in range(4)])
        assert all(isinstance(each, list) for each in results), results
        if is_cpu is not None:
            assert results == [[is_cpu]] * 4

    serve(repository, test, tmp_path)


def test_one_tensor_goes_to_many_and_comes_back(repository, tmp_path):
    """The same memory twice in a call, at two callees, and as an output of who made it."""
    write(
        repository,
        "pair",
        """
x = read(request)
return respond(named("OUTPUT0", x), named("OUTPUT1", x))
""",
    )
    write(
        repository,
        "caller",
        """
x = on_device(host(read(request)), "INPUT0")
first = call("pair", x, outputs=("OUTPUT0", "OUTPUT1"))
again = named("INPUT0", output(first, "OUTPUT1"))
del x
second = call("pair", again, outputs=("OUTPUT0", "OUTPUT1"))
return respond(output(first), output(second, "OUTPUT1"))
""",
    )
    write(
        repository,
        "outer",
        """
got = call("caller", read(request), outputs=("OUTPUT0", "OUTPUT1"))
assert not output(got).is_cpu()
return respond(*got.output_tensors())
""",
    )

    async def test(served):
        for _ in range(5):
            x = np.arange(4000, dtype=np.float32)
            outputs = await served.infer("outer", x, outputs=["OUTPUT0", "OUTPUT1"])
            assert outputs["OUTPUT0"].tolist() == outputs["OUTPUT1"].tolist() == x.tolist()
        await served.until_nothing_is_held()
        await served.until(lambda: _has_no_block(served, "caller"))

    serve(repository, test, tmp_path)


STREAM = """
sender = request.get_response_sender()
for number in range(int(host(read(request))[0])):
    sender.send(respond(on_device(np.full(3000, number, np.float32))))
sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Decoupled: execute returns None."""


def test_streams_carry_references_too(repository, tmp_path):
    """A decoupled model's responses come by reference to a caller, and as bytes to a client."""
    write(repository, "stream", STREAM, extra=KEEPS + DECOUPLED)
    (repository / "stream" / "1" / "model.py").write_text(
        (repository / "stream" / "1" / "model.py")
        .read_text()
        .replace(
            "return [self.respond_to(request) for request in requests]",
            "[self.answer(request) for request in requests]",
        )
    )
    write(
        repository,
        "caller",
        """
made = pb_utils.InferenceRequest(
    model_name="stream", inputs=[read(request)], requested_output_names=["OUTPUT0"]
)
found = []
for response in made.exec(decoupled=True):
    if response.output_tensors():
        y = output(response)
        assert not y.is_cpu()
        found.append(host(y)[0])
        if len(found) == 7:
            break
return respond(pb_utils.Tensor("OUTPUT0", np.array(found, np.float32)))
""",
    )

    async def test(served):
        assert await served.outcome("caller", [5]) == [0, 1, 2, 3, 4]
        assert await served.outcome("caller", [300]) == [0, 1, 2, 3, 4, 5, 6]
        inputs = {"INPUT0": np.array([20], np.float32)}
        stream = served.server.stream("stream", inputs, outputs=["OUTPUT0"])
        assert [float(each["OUTPUT0"][-1]) async for each in stream] == list(range(20))

    serve(repository, test, tmp_path)


ASYNC = """
class TritonPythonModel:
    async def execute(self, requests):
        import asyncio
        return list(await asyncio.gather(*[self.answer(request) for request in requests]))

    async def answer(self, request):
        import asyncio
        x = on_device(host(read(request)), "INPUT0")
        made = [
            pb_utils.InferenceRequest(
                model_name="callee", inputs=[x], requested_output_names=["OUTPUT0"]
            )
            for _ in range(8)
        ]
        got = await asyncio.gather(*[each.async_exec() for each in made])
        got.append(await asyncio.to_thread(call, "callee", x))
        return respond(named("OUTPUT0", output(got[-1])))
"""


@pytest.mark.parametrize("group", ["", ON_CPU], ids=["same device", "none"])
def test_calls_of_an_asynchronous_model_and_of_threads(repository, tmp_path, group):
    """Many calls at once with one tensor; where they are refused, each is sent again."""
    write(repository, "callee", IDENTITY, group=group)
    write(repository, "caller", "pass", head=ASYNC.replace("class TritonPythonModel", "class _Own"))
    path = repository / "caller" / "1" / "model.py"
    path.write_text(path.read_text() + "\nTritonPythonModel = _Own\n")

    async def test(served):
        x = np.arange(3000, dtype=np.float32)
        results = await asyncio.gather(*[served.outcome("caller", x) for _ in range(4)])
        assert results == [x.tolist()] * 4

    serve(repository, test, tmp_path)


def test_a_forked_child_of_a_model_calls_by_host_memory(repository, tmp_path):
    """A fork has no device; its calls, and those of its parent afterwards, go well."""
    write(repository, "callee", "return respond(on_device(host(read(request)) * 2))")
    write(
        repository,
        "caller",
        """
import multiprocessing
array = host(read(request))
with multiprocessing.get_context("fork").Pool(2) as pool:
    parts = pool.map(work, [array, array + 1])
x = on_device(parts[0] + parts[1], "INPUT0")
return respond(output(call("callee", x)))
""",
        head="""
def work(array):
    return host(output(call("callee", pb_utils.Tensor("INPUT0", array))))
""",
    )

    async def test(served):
        x = np.arange(3000, dtype=np.float32)
        assert await served.outcome("caller", x) == ((4 * x + 2) * 2).tolist()

    serve(repository, test, tmp_path)


TAKE = """
for each in range(int(host(read(request))[0])):
    self.kept.append(pb_utils.empty_device(MIB // 4, np.float32))
return respond(on_device(np.zeros(3 * MIB // 4, np.float32)))
"""


@pytest.mark.parametrize(("full", "is_error"), [("grow", True), ("error", True), ("host", True)])
def test_device_memory_that_a_model_keeps_has_a_limit(repository, tmp_path, full, is_error):
    """What a model allocates itself has to be on the device: beyond its quota it is an error."""
    extra = KEEPS + parameter("DEVICE_FULL", full) + parameter("DEVICE_MAX_BYTES", 8 * MIB)
    extra += parameter("DEVICE_SLAB_BYTES", 8 * MIB)
    write(repository, "model", TAKE, extra=extra, head="MIB = 1 << 20")

    async def test(served):
        assert isinstance(await served.outcome("model", [5]), list)
        error = await served.outcome("model", [1])
        assert isinstance(error, Exception) is is_error
        assert "3145728 bytes" in error.message

    serve(repository, test, tmp_path)


@pytest.mark.parametrize("full", ["grow", "error", "host"])
def test_an_output_that_does_not_fit_is_an_error_or_goes_by_the_host(repository, tmp_path, full):
    """The preferred memory is full: as set, and the next output that fits is served again."""
    extra = KEEPS + parameter("DEVICE_FULL", full) + parameter("DEVICE_MAX_BYTES", 4 * MIB)
    extra += parameter("DEVICE_SLAB_BYTES", 4 * MIB)
    write(
        repository,
        "callee",
        'return respond(pb_utils.Tensor("OUTPUT0", np.zeros(int(host(read(request))[0]), "f4")))',
        extra=extra,
    )
    write(
        repository,
        "caller",
        """
y = output(call("callee", read(request), memory=(GPU,)))
return respond(pb_utils.Tensor("OUTPUT0", np.array([y.is_cpu()], np.float32)))
""",
    )

    async def test(served):
        for _ in range(3):
            assert await served.outcome("caller", [MIB // 2]) == [0.0]
            outcome = await served.outcome("caller", [2 * MIB])
            if full == "host":
                assert outcome == [1.0]
            else:
                assert "8388608 bytes" in outcome.message

    serve(repository, test, tmp_path)


def test_memory_that_comes_back_is_used_again(repository, tmp_path):
    """A stub that streams through a small slab reads the releases when it has no room."""
    extra = KEEPS + parameter("DEVICE_MAX_BYTES", 8 * MIB) + parameter("DEVICE_SLAB_BYTES", 8 * MIB)
    write(
        repository,
        "caller",
        """
for number in range(20):
    x = on_device(np.full(1 << 19, number, np.float32), "INPUT0")
    assert host(output(call("callee", x)))[5] == number
return respond(pb_utils.Tensor("OUTPUT0", np.zeros(1, np.float32)))
""",
        extra=extra,
    )
    write(repository, "callee", IDENTITY)

    async def test(served):
        assert await served.outcome("caller") == [0.0]

    serve(repository, test, tmp_path)
