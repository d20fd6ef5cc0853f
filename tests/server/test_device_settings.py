# SPDX-License-Identifier: Apache-2.0
"""Which instances work on which device, what the settings and parameters say, and no device."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.config import Settings
from tests.server.device_models import IDENTITY, KEEPS, ON_CPU, Served, serve, write
from tests.server.harness import parameter

MIB = 1 << 20

TELL = """
return respond(pb_utils.Tensor("OUTPUT0", np.zeros(1, np.float32)))
def told(self):
    names = ("kind", "device_id", "name")
    told = {name: self.args[f"model_instance_{name}"] for name in names}
    pool = current_pool()
    told["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    told["settings"] = [] if pool is None else [
        pool.settings.slab_bytes, pool.settings.max_bytes, pool.settings.full, pool.settings.fence
    ]
    return told
"""


def write_telling(repository, name, **more):
    """Write a model that tells where it runs."""
    write(repository, name, "pass", **more)
    path = repository / name / "1" / "model.py"
    body, _, method = TELL.strip("\n").partition("\n")
    text = path.read_text().replace("        pass\n", f"        {body}\n")
    path.write_text(text + "".join(f"    {line}\n" for line in method.split("\n")))


def instances(repository, tmp_path, group, **more):
    """Return what each instance of a model with this group says of itself, by name."""
    settings = more.pop("settings", {})
    write_telling(repository, "model", group=group, **more)
    found = {}

    async def test(served):
        count = len(served.server.stats().models[0].versions[0].instances)
        while len(found) < count:
            for told in await asyncio.gather(*[served.tell("model") for _ in range(2 * count)]):
                found[told["name"]] = told

    serve(repository, test, tmp_path, **settings)
    return found


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("", [("GPU", "0"), ("GPU", "1")]),
        (
            "instance_group [ { kind: KIND_GPU gpus: [ 1 ] count: 2 } ]",
            [("GPU", "1"), ("GPU", "1")],
        ),
        (ON_CPU, [("CPU", "0")]),
        ("instance_group [ { kind: KIND_MODEL } ]", [("MODEL", "0")]),
    ],
    ids=["none given", "KIND_GPU", "KIND_CPU", "KIND_MODEL"],
)
def test_instances_run_where_their_group_says(repository, tmp_path, monkeypatch, group, expected):
    """Each has the device of its id; those of KIND_CPU have none."""
    monkeypatch.setenv("ACTORSERVE_EMULATED_DEVICES", "2")
    found = instances(repository, tmp_path, group)
    assert sorted((each["kind"], each["device_id"]) for each in found.values()) == expected
    for each in found.values():
        number = each["device_id"]
        assert each["device"] == ("" if each["kind"] == "CPU" else f"emulated-{number}")
        assert each["visible"] == ""


def test_an_instance_can_be_shown_its_own_device_only(repository, tmp_path, monkeypatch):
    """Its CUDA_VISIBLE_DEVICES is the server's entry for it, and its device has the number 0."""
    monkeypatch.setenv("ACTORSERVE_EMULATED_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    group = "instance_group [ { kind: KIND_GPU } ]"
    found = instances(repository, tmp_path, group, settings={"device_isolation": True})
    told = {(each["visible"], each["device_id"], each["device"]) for each in found.values()}
    assert told == {("GPU-a", "0", "emulated-0"), ("GPU-b", "0", "emulated-1")}


def test_a_models_parameters_beat_the_servers_settings(repository, tmp_path):
    """Each on its own; a driver that only a model names makes a device for its CPU instances."""
    extra = KEEPS + parameter("DEVICE_SLAB_BYTES", 2 * MIB) + parameter("DEVICE_FULL", "host")
    extra += parameter("DEVICE_DRIVER", "emulated")
    settings = {"device_driver": "", "device_slab_bytes": MIB, "device_max_bytes": 3 * MIB}
    settings["device_fence"] = "event"
    found = instances(repository, tmp_path, ON_CPU, extra=extra, settings=settings)
    assert found["model_0_0"]["settings"] == [2 * MIB, 3 * MIB, "host", "event"]
    assert found["model_0_0"]["device"] == "emulated-0"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("DEVICE_SLAB_BYTES", "2 MiB", "a whole number of bytes"),
        ("DEVICE_FULL", "wait", "grow or host or error"),
        ("DEVICE_FENCE", "none", "sync or event"),
        ("DEVICE_FOREIGN", "move", "copy or export"),
        ("DEVICE_ISOLATION", "true", "yes or no"),
    ],
)
def test_a_wrong_parameter_is_named(repository, tmp_path, name, value, expected):
    """The model does not load, and the reason says what was expected."""
    write(repository, "model", IDENTITY, extra=parameter(name, value))

    async def main():
        settings = Settings(crash_dir=str(tmp_path))
        async with Supervisor(repository, settings) as server:
            assert f"parameter {name}" in server.failures["model"]
            assert expected in server.failures["model"]
            assert f"got '{value}'" in server.failures["model"]

    asyncio.run(main())


@pytest.mark.parametrize("driver", ["", "no-such-driver"])
def test_without_a_device_everything_goes_by_the_host(repository, tmp_path, caplog, driver):
    """Models load and serve as ever, after one warning; KIND_GPU is refused as documented."""
    write(repository, "model", IDENTITY)
    write(repository, "other", IDENTITY)
    write(
        repository,
        "caller",
        'return respond(output(call("model", read(request), memory=(GPU,))))',
    )
    write(repository, "gpu", IDENTITY, group="instance_group [ { kind: KIND_GPU } ]")

    async def main():
        settings = Settings(device_driver=driver, crash_dir=str(tmp_path))
        async with Supervisor(repository, settings) as server:
            assert server.failures == {
                "gpu": "instance group gpu_0 of model gpu has kind KIND_GPU but no GPUs are "
                "available"
            }
            served = Served(server)
            assert await served.outcome("caller", range(3000)) == list(range(3000))
            assert (await served.tell("model"))["device"] == ""
            assert served.devices is None

    asyncio.run(main())
    warnings = [each.message for each in caplog.records if "has no devices here" in each.message]
    assert len(warnings) == (1 if driver else 0)
    assert all("'no-such-driver' is unknown; known are" in each for each in warnings)


def test_a_gpu_that_is_not_there_is_refused(repository, tmp_path):
    """The text names those that are."""
    write(repository, "gpu", IDENTITY, group="instance_group [ { kind: KIND_GPU gpus: [ 3 ] } ]")

    async def main():
        settings = Settings(device_driver="emulated", crash_dir=str(tmp_path))
        async with Supervisor(repository, settings) as server:
            reason = server.failures["gpu"]
            assert "specifies invalid or unsupported gpu id 3" in reason
            assert reason.endswith("are: 0")

    asyncio.run(main())


def test_over_http_the_server_shows_what_its_devices_hold(start_server, repository):
    """`actorserve start --device-driver`: a client gets bytes, the status page the counts."""
    write(repository, "model", "return respond(on_device(host(read(request)) * 2))")
    server = start_server(
        repository, flags=["--device-driver", "emulated", "--device-slab-bytes", str(MIB)]
    )
    x = np.arange(3000, dtype=np.float32)
    outputs = [{"name": "OUTPUT0"}]
    reply = server.infer_binary("model", {"INPUT0": ("FP32", x)}, outputs=outputs)
    assert reply.outputs["OUTPUT0"].tolist() == (x * 2).tolist()
    reply = server.infer("model", {"INPUT0": ("FP32", [3], [1, 2, 3])}, outputs=outputs)
    assert reply == (200, {"OUTPUT0": [2, 4, 6]})
    status, page = server.call("GET", "/v2/actorserve/status")
    assert status == 200
    devices = page["devices"]
    assert (devices["slabs"], devices["slab_bytes"], devices["held"]) == (1, MIB, 0)
    assert json.dumps(page)
