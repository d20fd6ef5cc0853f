# SPDX-License-Identifier: Apache-2.0
"""A model that does to models what it is told, from wherever it is told to do it."""

from __future__ import annotations

import json

from tests.server.harness import Server

CONTROLLER_CONFIG = """\
backend: "python"
input [ { name: "ORDER" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] } ]
"""

ORDERS = '''
def carry_out(order):
    """Carry out {"do": …, arguments}; returns what came of it as JSON."""
    order = dict(order)
    do = getattr(pb_utils, order.pop("do"))
    if "files" in order:
        order["files"] = {k: v.encode() for k, v in order["files"].items()}
    if "padding" in order:
        order["files"]["file:padding"] = bytes(order.pop("padding"))
    try:
        return json.dumps({"result": do(**order)})
    except pb_utils.TritonModelException as error:
        return json.dumps({"error": str(error)})
    except TypeError as error:
        return json.dumps({"type_error": str(error)})

def orders(requests):
    return [
        json.loads(pb_utils.get_input_tensor_by_name(r, "ORDER").as_numpy()[0])
        for r in requests
    ]

def answers(texts):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([t.encode()], object))])
        for t in texts
    ]
'''

CONTROLLER = (
    ORDERS
    + """
class TritonPythonModel:
    def execute(self, requests):
        return answers([carry_out(order) for order in orders(requests)])
"""
)

THREADED_CONTROLLER = (
    ORDERS
    + """
class TritonPythonModel:
    def execute(self, requests):
        said = []
        for order in orders(requests):
            threads = [
                threading.Thread(target=lambda: said.append(carry_out(order))) for _ in range(4)
            ]
            [t.start() for t in threads]
            [t.join() for t in threads]
        assert len(set(said)) == 1, said
        return answers(said[:1])
"""
)

ASYNC_CONTROLLER = (
    ORDERS
    + """
import asyncio
class TritonPythonModel:
    async def execute(self, requests):
        said = []
        for order in orders(requests):
            await asyncio.sleep(0)
            said.append(carry_out(order))
            said.append(await asyncio.get_running_loop().run_in_executor(None, carry_out, order))
        assert said[0] == said[1], said
        return answers(said[:1])
"""
)


def order(server: Server, controller: str, do: str, **arguments: object) -> dict[str, object]:
    """Have a controller do something to a model; returns {"result": …} or {"error": text}."""
    status, outputs = server.infer(
        controller, {"ORDER": ("BYTES", [1], [json.dumps({"do": do, **arguments})])}
    )
    assert status == 200, outputs
    said: dict[str, object] = json.loads(outputs["SAID"][0])
    return said


def pids(server: Server, model: str) -> list[int]:
    """Return the pids of a model's stubs, those of the lowest version first."""
    _, status = server.call("GET", "/v2/actorserve/status")
    found = next(each for each in status["models"] if each["name"] == model)
    return [each["pid"] for version in found["versions"] for each in version["instances"]]
