# SPDX-License-Identifier: Apache-2.0
"""Tensors of every type, shape and size, as JSON and binary, there and back; and bad ones."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.server.harness import (
    IDENTITY,
    IDENTITY_CONFIG,
    TELL,
    TELL_CONFIG,
    binary_body,
    write_model,
)
from tests.server.tensor_models import HAND_ON, KIND, OPTIONAL, PARAMETERS, REQUEST, SHAPES

NUMBERS = {
    "BOOL": [True, False, True],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 4294967295],
    "UINT64": [0, 1, 18446744073709551615],
    "INT8": [-128, 0, 127],
    "INT16": [-32768, 0, 32767],
    "INT32": [-2147483648, 0, 2147483647],
    "INT64": [-9223372036854775808, 0, 9223372036854775807],
    "FP32": [-1.5, 0.0, 3.4028234663852886e38],
    "FP64": [-1.5, 1e-310, 1.7976931348623157e308],
}
DTYPES = {"BOOL": "?", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2"} | {
    f"{sign}INT{bits}": f"<{code}{bits // 8}"
    for sign, code in (("U", "u"), ("", "i"))
    for bits in (8, 16, 32, 64)
}


def _config(datatype: str, dims: str = "[ -1 ]", extra: str = "") -> str:
    kind = "STRING" if datatype == "BYTES" else datatype
    tensor = f"data_type: TYPE_{kind} dims: {dims} {extra}"
    return (
        f'backend: "python"\ninput [ {{ name: "INPUT0" {tensor} }} ]\n'
        f'output [ {{ name: "OUTPUT0" {tensor} }} ]\n'
    )


@pytest.fixture(scope="module")
def server(start_shared, tmp_path_factory):
    """Return a server of identity models, one for each data type, and some others."""
    repository = tmp_path_factory.mktemp("tensors")
    for datatype in (*DTYPES, "BYTES"):
        source = HAND_ON if datatype == "BF16" else IDENTITY  # numpy lacks BF16
        write_model(repository, f"id_{datatype}", source, _config(datatype))
    write_model(repository, "kind", KIND, _config("FP32", "[ -1, -1 ]"))
    write_model(repository, "hand_on", HAND_ON, _config("FP32"))
    batched = "max_batch_size: 4\n" + _config("FP32", "[ 3 ]")
    write_model(repository, "batched", IDENTITY, batched)
    shape_output = '\noutput [ { name: "SHAPE" data_type: TYPE_STRING dims: [ 1 ] } ]\n'
    reshaped = _config("FP32", "[ 1 ]", "reshape { shape: [ ] }")
    write_model(repository, "scalars", SHAPES, "max_batch_size: 4\n" + reshaped + shape_output)
    flat = _config("FP32", "[ -1, 2 ]", "reshape { shape: [ 1, -1, 2 ] }")
    write_model(repository, "reshaped", SHAPES, flat + shape_output)
    optional = TELL_CONFIG.replace(
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }',
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }, '
        '{ name: "EXTRA" data_type: TYPE_INT32 dims: [ 1 ] optional: true }',
    )
    write_model(repository, "optional", TELL + OPTIONAL, optional)
    write_model(repository, "request", TELL + REQUEST, TELL_CONFIG)
    write_model(repository, "answers", PARAMETERS, IDENTITY_CONFIG)
    return start_shared(repository)


# --- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", NUMBERS)
def test_numbers_travel_as_json(server, datatype):
    """The ends of each type's range come back as they went."""
    values = NUMBERS[datatype]
    status, outputs = server.infer(f"id_{datatype}", {"INPUT0": (datatype, [3], values)})
    assert (status, outputs) == (200, {"OUTPUT0": values})


@pytest.mark.parametrize("datatype", DTYPES)
def test_numbers_travel_as_binary(server, datatype):
    """Every bit pattern comes back as it went, small in a message and large in shared memory."""
    rng = np.random.default_rng(3)
    for nbytes in (16, 40_000):
        raw = rng.bytes(nbytes)
        array = np.frombuffer(raw, DTYPES[datatype])
        if datatype == "BOOL":
            array = (np.frombuffer(raw, np.uint8) & 1).astype(bool)
        outputs = server.infer_binary(f"id_{datatype}", {"INPUT0": (datatype, array)}).outputs
        assert outputs["OUTPUT0"].tobytes() == array.tobytes()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_are_refused_in_json(server, datatype):
    """Both ways, with what to do instead."""
    status, error = server.infer(f"id_{datatype}", {"INPUT0": (datatype, [1], [1.0])})
    assert status == 400
    assert error == (
        f"receiving {datatype} data via JSON is not supported. "
        "Please use the binary data format for input 'INPUT0'"
    )
    array = np.zeros(2, DTYPES[datatype])
    reply = server.infer_binary(
        f"id_{datatype}", {"INPUT0": (datatype, array)}, binary_output=False
    )
    assert reply.status == 400
    assert reply.error == (
        f"sending {datatype} data via JSON is not supported. "
        "Please use the binary data format for output 'OUTPUT0'"
    )


TEXTS = ["", "plain", "Käse", "東京", "😀", "a\0b", "new\nline", '"quoted\\"']


def test_texts_travel_as_json(server):
    """Any script, empty ones, control characters and quotes."""
    status, outputs = server.infer("id_BYTES", {"INPUT0": ("BYTES", [len(TEXTS)], TEXTS)})
    assert (status, outputs) == (200, {"OUTPUT0": TEXTS})


def test_bytes_travel_as_binary(server):
    """Any bytes, few and many, short and long."""
    rng = np.random.default_rng(4)
    for sizes in ([0, 1, 5], [0] * 3000, [100_000, 3, 0]):
        elements = np.array([rng.bytes(size) for size in sizes], object)
        outputs = server.infer_binary("id_BYTES", {"INPUT0": ("BYTES", elements)}).outputs
        assert outputs["OUTPUT0"].tolist() == elements.tolist()


def test_bytes_that_are_no_text_are_refused_in_json(server):
    """An output that JSON cannot express names the way out."""
    elements = np.array([b"\xff"], object)
    reply = server.infer_binary("id_BYTES", {"INPUT0": ("BYTES", elements)}, binary_output=False)
    assert reply.status == 400
    assert "Please use the binary data format for output 'OUTPUT0'" in reply.error


def test_values_that_json_lacks_are_written_bare(server):
    """NaN and infinities as the clients of the protocol read them."""
    array = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    reply = server.infer_binary("id_FP32", {"INPUT0": ("FP32", array)}, binary_output=False)
    assert b'"data":[NaN,Infinity,-Infinity,1.0]' in reply.body


def test_inputs_and_outputs_may_mix_json_and_binary(server):
    """Each tensor is what the request says of it."""
    array = np.arange(3, dtype=np.float32)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [3], "data": [0, 1, 2]}
    wanted = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    url = "/v2/models/id_FP32/infer"
    reply = server.request("POST", url, {"inputs": [tensor], "outputs": wanted})
    assert reply.outputs["OUTPUT0"].tobytes() == array.tobytes()
    wanted[0]["parameters"]["binary_data"] = False
    body, headers = binary_body({"INPUT0": ("FP32", array)}, outputs=wanted)
    assert server.request("POST", url, body, headers).outputs == {"OUTPUT0": [0, 1, 2]}


def test_a_raw_body_is_the_one_input(server):
    """Inference-Header-Content-Length: 0, as curl --data-binary sends a file."""
    array = np.arange(5, dtype=np.float32)
    head = {"Inference-Header-Content-Length": "0"}
    reply = server.request("POST", "/v2/models/id_FP32/infer", array.tobytes(), head)
    assert reply.outputs["OUTPUT0"].tolist() == array.tolist()
    reply = server.request("POST", "/v2/models/id_BYTES/infer", b"one text", head)
    assert reply.outputs["OUTPUT0"].tolist() == [b"one text"]


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1), (7, 3)])
def test_shapes_come_back(server, shape):
    """Also those without any element; inputs are writable and contiguous."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    outputs = server.infer_binary("kind", {"INPUT0": ("FP32", array)}).outputs
    assert outputs["OUTPUT0"].shape == shape
    assert np.array_equal(outputs["OUTPUT0"], array)
    status, outputs = server.infer(
        "kind", {"INPUT0": ("FP32", list(shape), array.reshape(-1).tolist())}
    )
    assert (status, outputs) == (200, {"OUTPUT0": array.reshape(-1).tolist()})


def test_no_elements_of_any_other_type(server):
    """A tensor without elements is one of its type."""
    for datatype in ("BYTES", "INT64", "FP16"):
        array = np.zeros(0, object if datatype == "BYTES" else DTYPES[datatype])
        outputs = server.infer_binary(f"id_{datatype}", {"INPUT0": (datatype, array)}).outputs
        assert outputs["OUTPUT0"].shape == (0,)


def test_a_reshape_to_a_scalar_leaves_the_batch(server):
    """Clients send [batch, 1], the model sees [batch]."""
    array = np.arange(3, dtype=np.float32).reshape(3, 1)
    reply = server.infer_binary("scalars", {"INPUT0": ("FP32", array)})
    assert reply.outputs["SHAPE"].reshape(-1)[0] == b"[3]"


def test_a_reshape_keeps_variable_extents(server):
    """Clients send [n, 2], the model sees [1, n, 2]."""
    array = np.arange(10, dtype=np.float32).reshape(5, 2)
    reply = server.infer_binary("reshaped", {"INPUT0": ("FP32", array)})
    assert reply.outputs["SHAPE"].reshape(-1)[0] == b"[1, 5, 2]"


def test_an_optional_input_may_be_left_out(server):
    """The model sees None, or the tensor; a required one may not be left out."""
    base = {"INPUT0": ("FP32", [1], [0])}
    assert server.infer("optional", base)[1] == {"OUTPUT0": ["none"]}
    extra = {"EXTRA": ("INT32", [1], [7])}
    assert server.infer("optional", base | extra)[1] == {"OUTPUT0": ["[7]"]}
    status, error = server.infer("optional", extra)
    assert status == 400
    assert "'INPUT0'" in error


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [1, 4, 16, 63])
@pytest.mark.parametrize("model", ["id_FP32", "hand_on"])
def test_large_tensors_come_back(server, model, mib):
    """Megabytes, copied by the model or handed on where they lie."""
    array = np.arange(mib << 18, dtype=np.float32)
    outputs = server.infer_binary(model, {"INPUT0": ("FP32", array)}).outputs
    assert outputs["OUTPUT0"].tobytes() == array.tobytes()


def test_a_large_json_tensor_comes_back(server):
    """A hundred thousand numbers as text."""
    values = [float(n) for n in range(100_000)]
    status, outputs = server.infer("id_FP64", {"INPUT0": ("FP64", [len(values)], values)})
    assert status == 200
    assert outputs["OUTPUT0"] == values


def test_a_body_beyond_the_limit_is_refused(server):
    """With the flag that raises the limit."""
    status, answer = server.call(
        "POST", "/v2/models/id_FP32/infer", None, {"Content-Length": str(65 << 20)}
    )
    assert status == 413
    assert "maximum allowed input size of 67108864 bytes" in answer["error"]
    assert "--http-max-input-size" in answer["error"]


# --- batches -------------------------------------------------------------------------------------


def test_a_batch_is_limited(server):
    """max_batch_size rows go, one more does not."""
    status, outputs = server.infer("batched", {"INPUT0": ("FP32", [4, 3], list(range(12)))})
    assert (status, outputs) == (200, {"OUTPUT0": list(range(12))})
    status, error = server.infer("batched", {"INPUT0": ("FP32", [5, 3], list(range(15)))}, id="a")
    assert status == 400
    assert error == "[request id: a] inference request batch-size must be <= 4 for 'batched'"
    status, error = server.infer("batched", {"INPUT0": ("FP32", [3], [1, 2, 3])})
    assert status == 400
    assert "Expected [-1,3], got [3]. NOTE: Setting a non-zero max_batch_size" in error


# --- the request's other members -----------------------------------------------------------------


def test_a_model_sees_the_request(server):
    """Its id, parameters of each type, sequence, timeout and wanted outputs."""
    parameters = {
        "text": "ä", "flag": True, "number": -7, "real": 0.5, "sequence_id": 42,
        "sequence_start": True, "sequence_end": True, "timeout": 1234, "priority": 0,
    }  # fmt: skip
    status, outputs = server.infer(
        "request",
        {"INPUT0": ("FP32", [1], [0])},
        id="my request",
        parameters=parameters,
        outputs=[{"name": "OUTPUT0"}],
    )
    assert status == 200, outputs
    assert json.loads(outputs["OUTPUT0"][0]) == {
        "id": "my request",
        "parameters": {"text": "ä", "flag": True, "number": -7, "real": 0.5},
        "correlation_id": 42,
        "flags": 3,
        "timeout": 1234,
        "outputs": ["OUTPUT0"],
    }


def test_a_response_echoes_the_id(server):
    """With an id, and without one."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [0]}
    url = "/v2/models/id_FP32/infer"
    assert server.request("POST", url, {"id": "x", "inputs": [tensor]}).json["id"] == "x"
    assert "id" not in server.request("POST", url, {"inputs": [tensor]}).json


def test_a_reserved_parameter_is_refused(server):
    """Names that begin with triton_ are not the client's."""
    status, error = server.infer(
        "request", {"INPUT0": ("FP32", [1], [0])}, parameters={"triton_x": 1}
    )
    assert status == 400
    assert "reserved for Triton usage" in error


def test_an_output_that_nobody_configured_is_refused(server):
    """The text names it and the model."""
    status, error = server.infer(
        "id_FP32", {"INPUT0": ("FP32", [1], [0])}, outputs=[{"name": "OTHER"}]
    )
    assert status == 400
    assert error == "unexpected inference output 'OTHER' for model 'id_FP32'"


def test_response_parameters_reach_the_client(server):
    """What the model gives with its answer is in the response's document."""
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [4]}
    reply = server.request("POST", "/v2/models/answers/infer", {"inputs": [tensor]})
    assert reply.json["parameters"] == {"n": "text", "b": True, "i": -3}


@pytest.mark.parametrize("case", range(4))
def test_response_parameters_that_cannot_travel_are_one_error(server, case):
    """Numbers beyond 64 bits, broken text, wrong types: the request fails, the server goes on."""
    url = "/v2/models/answers/infer"
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [case]}
    reply = server.request("POST", url, {"inputs": [tensor]}, timeout_s=10)
    assert reply.status == 500, reply.body
    assert "TritonModelException: Expect parameters" in reply.error
    tensor["data"] = [4]
    assert server.request("POST", url, {"inputs": [tensor]}, timeout_s=10).status == 200
    assert server.call("GET", "/v2/models/answers/ready")[0] == 200
