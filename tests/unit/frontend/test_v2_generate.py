# SPDX-License-Identifier: Apache-2.0
"""Flat JSON to requests and responses to flat JSON, with what clients get wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from actorserve.errors import InternalError, InvalidArgument
from actorserve.frontend.v2_generate import (
    GenerateEncoder,
    error_event,
    event,
    parse_generate,
    shape_of,
)
from actorserve.triton.inference import (
    InferRequest,
    InferResponse,
    InferTensor,
    ModelInfo,
    TensorSpec,
)
from actorserve.wire.tensors import decode_bytes, encode_bytes

LIMIT = 1 << 20


def info(max_batch_size: int = 0, **inputs: tuple[str, tuple[int, ...]]) -> ModelInfo:
    """Describe a model with these inputs."""
    batch = (-1,) if max_batch_size else ()
    specs = tuple(TensorSpec(n, kind, (*batch, *dims)) for n, (kind, dims) in inputs.items())
    return ModelInfo("m", "1", ("1",), "python", max_batch_size, True, specs, ())


TEXT = info(TEXT=("BYTES", (1,)), N=("INT32", (-1,)))


def parse(document: Any, model: ModelInfo = TEXT, limit: int = LIMIT) -> InferRequest:
    """Read a document."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_generate(text, model, "", limit)


def refused(document: Any, model: ModelInfo = TEXT, limit: int = LIMIT) -> str:
    """Return the text of the refusal of a document."""
    with pytest.raises(InvalidArgument) as caught:
        parse(document, model, limit)
    return caught.value.message


# --- requests ------------------------------------------------------------------------------------


def test_members_named_like_inputs_are_tensors_and_others_parameters() -> None:
    """Beside each other or in `parameters`, it is the same."""
    request = parse(
        {"id": "7", "TEXT": "é", "stream": True, "parameters": {"N": [1, 2], "t": 0.5, "k": 3}}
    )
    assert request.id == "7"
    assert request.takes_stream
    text, numbers = request.inputs
    assert (text.name, text.datatype, text.shape) == ("TEXT", "BYTES", (1,))
    assert decode_bytes(text.data).tolist() == ["é".encode()]
    assert (numbers.shape, numbers.data) == ((2,), np.array([1, 2], "<i4").tobytes())
    assert request.parameters == {"stream": True, "t": 0.5, "k": 3}
    assert (request.model_name, request.model_version, request.outputs) == ("m", "", [])


@pytest.mark.parametrize(
    ("kind", "value", "array"),
    [
        ("BOOL", True, np.array([True])),
        ("BOOL", [True, False], np.array([True, False])),
        ("UINT8", 255, np.array([255], np.uint8)),
        ("INT64", -(2**63), np.array([-(2**63)], np.int64)),
        ("UINT64", 2**64 - 1, np.array([2**64 - 1], np.uint64)),
        ("FP32", 1, np.array([1], np.float32)),
        ("FP64", [0.1, 1e300], np.array([0.1, 1e300])),
        ("FP32", [], np.array([], np.float32)),
    ],
)
def test_values_of_every_kind(kind: str, value: Any, array: Any) -> None:
    """One value stands for an array of one element."""
    request = parse({"X": value}, info(X=(kind, (-1,))))
    assert request.inputs[0].data == array.tobytes()
    assert request.inputs[0].shape == array.shape


@pytest.mark.parametrize(
    ("dims", "batch", "count", "shape"),
    [
        ((-1,), 0, 3, (3,)),
        ((-1,), 0, 0, (0,)),
        ((-1,), 8, 3, (1, 3)),
        ((1,), 8, 1, (1, 1)),
        ((4,), 0, 4, (4,)),
        ((-1, 2), 0, 6, (3, 2)),
        ((2, -1), 8, 6, (1, 2, 3)),
        ((-1, -1), 0, 1, (1, 1)),
        ((-1, 3, -1), 0, 3, (1, 3, 1)),
        ((), 0, 1, ()),
        ((), 8, 1, (1,)),
    ],
)
def test_shapes_are_filled(
    dims: tuple[int, ...], batch: int, count: int, shape: tuple[int, ...]
) -> None:
    """The batch is 1; a free dimension takes what is left."""
    spec = info(batch, X=("FP32", dims)).inputs[0]
    assert shape_of(spec, batch > 0, count) == shape


@pytest.mark.parametrize(
    ("dims", "batch", "count"),
    [((4,), 0, 3), ((4,), 8, 8), ((-1, 2), 0, 3), ((-1, -1), 0, 2), ((1,), 0, 0), ((), 0, 2)],
)
def test_what_fits_no_shape_is_refused(dims: tuple[int, ...], batch: int, count: int) -> None:
    """With the text that clients know."""
    spec = info(batch, X=("FP32", dims)).inputs[0]
    with pytest.raises(InvalidArgument) as caught:
        shape_of(spec, batch > 0, count)
    text = "The schema can not convert input 'X' to tensor with proper shape"
    assert caught.value.message.startswith(text)
    assert "send a batch, or any other shape, to infer" in caught.value.message


def test_reserved_parameters_go_where_infer_puts_them() -> None:
    """On either level."""
    request = parse(
        {
            "timeout": 5,
            "sequence_id": "s",
            "parameters": {"priority": 2, "sequence_start": True, "sequence_end": True},
        }
    )
    assert (request.timeout_us, request.priority, request.correlation_id) == (5, 2, "s")
    assert request.sequence_start
    assert request.sequence_end
    assert request.parameters == {}


def test_null_is_an_absent_member() -> None:
    """For what has a meaning; a parameter needs a value."""
    request = parse({"id": None, "parameters": None, "TEXT": None})
    assert (request.id, request.inputs, request.parameters) == ("", [], {})
    assert "parameter 'x' has invalid type" in refused({"x": None})


def test_an_input_named_like_the_id_is_an_input() -> None:
    """Nothing else could be said to it."""
    request = parse({"id": 5}, info(id=("INT32", (1,))))
    assert request.id == ""
    assert request.inputs[0].data == np.array([5], "<i4").tobytes()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (b"", "failed to parse the request JSON buffer of 0 bytes"),
        (b"{", "failed to parse the request JSON buffer of 1 bytes"),
        (b'{"N": NaN}', "NaN and Infinity are not JSON"),
        (b'{"a": "\xff"}', "'a'"),
        (b'{"\xff": 1}', "failed to parse"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"TEXT":' + b"[" * 500 + b"]" * 500 + b"}", "Expected `str`, got `array`"),
        ({"id": 5}, "Unable to parse 'id': expected a string"),
        ({"parameters": 5}, "Unable to parse 'parameters'"),
        ({"parameters": [1]}, "Unable to parse 'parameters'"),
        ({"TEXT": 5}, "Unable to parse input 'TEXT' as BYTES: Expected `str`, got `int`"),
        ({"TEXT": {"a": 1}}, "Unable to parse input 'TEXT'"),
        ({"TEXT": ["a", 5]}, "`value[1]`"),
        ({"TEXT": ["a", "b"]}, "The schema can not convert input 'TEXT'"),
        ({"N": [[1]]}, "Expected `int`, got `array`"),
        ({"N": [[1], [2]]}, "send a batch, or any other shape, to infer"),
        ({"N": 1.5}, "Expected `int`, got `float`"),
        ({"N": True}, "Expected `int`, got `bool`"),
        ({"N": "1"}, "Expected `int`, got `str`"),
        ({"N": 2**31}, "does not fit into INT32"),
        ({"N": 10**400}, "'N'"),
        ({"N": 1, "parameters": {"N": 2}}, "input 'N' already exists in request"),
        ({"k": 1, "parameters": {"k": 2}}, "'k' is given in 'parameters' and beside it"),
        ({"k": [1]}, "parameter 'k' has invalid type"),
        ({"k": {}}, "parameter 'k' has invalid type"),
        ({"parameters": {"parameters": {}}}, "parameter 'parameters' has invalid type"),
        ({"k": 2**63}, "Unable to parse 'k'"),
        ({"triton_x": 1}, "parameter keys starting with 'triton_' are reserved"),
        ({"parameters": {"triton_x": 1}}, "parameter keys starting with 'triton_' are reserved"),
        ({"timeout": -1}, "Unable to parse 'timeout'"),
        ({"priority": "high"}, "Unable to parse 'priority'"),
        ({"sequence_start": 1}, "Unable to parse 'sequence_start'"),
    ],
)
def test_mistakes_are_named(document: Any, text: str) -> None:
    """What is wrong, and where."""
    assert text in refused(document)


def test_half_and_brain_floats_are_refused() -> None:
    """JSON cannot carry them exactly."""
    for kind in ("FP16", "BF16"):
        text = refused({"X": 1.0}, info(X=(kind, (1,))))
        assert text.startswith(f"receiving {kind} data via JSON is not supported")


def test_a_nested_keyword_may_not_be_an_input() -> None:
    """With the text that clients know."""
    model = info(parameters=("INT32", (1,)))
    text = "keyword 'parameters' for nested schema also given as input tensor name"
    assert refused({"parameters": {"a": 1}}, model) == text
    assert parse({"a": 1}, model).parameters == {"a": 1}


def test_tensors_may_not_grow_beyond_the_limit() -> None:
    """Two characters of JSON are eight bytes of FP64; the limit is for all of them together."""
    model = info(A=("FP64", (-1,)), B=("FP64", (-1,)), S=("BYTES", (-1,)))
    parse({"A": [1] * 50, "B": [1] * 50}, model, 800)
    text = refused({"A": [1] * 50, "B": [1] * 51}, model, 800)
    assert "input 'B' makes the request's tensors 808 bytes" in text
    assert "Use --http-max-input-size to increase the limit." in text
    assert "maximum allowed" in refused({"S": [""] * 250}, model, 800)


def test_of_a_key_given_twice_on_one_level_the_last_counts() -> None:
    """As everywhere in this protocol."""
    assert parse(b'{"k": 1, "k": 2}').parameters == {"k": 2}


# --- responses -----------------------------------------------------------------------------------


def tensor(name: str, kind: str, values: Any, shape: tuple[int, ...] | None = None) -> InferTensor:
    """Make an output."""
    array = np.asarray(values)
    body = encode_bytes(array.astype(object)) if kind == "BYTES" else array.tobytes()
    return InferTensor(name, kind, array.shape if shape is None else shape, memoryview(body))


def encode(response: InferResponse, strict: bool = False) -> bytes:
    """Encode a response twice: the second time with what was learnt."""
    encoder = GenerateEncoder(strict)
    first = encoder.encode(response)
    assert encoder.encode(response) == first
    return first


def test_a_response_is_flat_and_in_the_order_of_names() -> None:
    """One element stands alone, more are a flat array; the id only where there is one."""
    outputs = [
        tensor("b", "INT32", np.array([[1, 2], [3, 4]], np.int32)),
        tensor("OUTPUT0", "FP32", np.array([[0.5]], np.float32)),
        tensor("text", "BYTES", ['say "é"\n']),
        tensor("z", "FP32", np.array([], np.float32)),
    ]
    expected = (
        '{"OUTPUT0":0.5,"b":[1,2,3,4],"model_name":"m","model_version":"1",'
        '"text":"say \\"é\\"\\n","z":[]}'
    )
    assert encode(InferResponse("m", "1", "", outputs)).decode() == expected
    named = json.loads(encode(InferResponse("m", "1", "7", outputs)))
    assert named == json.loads(expected) | {"id": "7"}


def test_parameters_stand_beside_outputs() -> None:
    """Their names never cover an output's or the server's own."""
    outputs = [tensor("a", "BOOL", [True])]
    parameters = {"p": 1, "q": "x", "a": 5, "model_name": "?", "f": 0.5, "t": False}
    text = encode(InferResponse("m", "1", "", outputs, parameters))
    expected = b'{"a":true,"f":0.5,"model_name":"m","model_version":"1","p":1,"q":"x","t":false}'
    assert text == expected


def test_outputs_of_one_name_and_odd_names_are_still_json() -> None:
    """Whatever a model sends."""
    outputs = [
        tensor("a", "INT8", np.int8([1])),
        tensor("a", "INT8", np.int8([2])),
        tensor('"\n', "INT8", np.int8([3])),
        tensor("model_version", "INT8", np.int8([4])),
    ]
    text = encode(InferResponse("m", "1", "", outputs))
    assert json.loads(text) == {"a": 1, '"\n': 3, "model_name": "m", "model_version": "1"}
    assert b"\n" not in text
    assert json.loads(encode(InferResponse("m", "1", "", []))) == {
        "model_name": "m",
        "model_version": "1",
    }


def test_other_outputs_in_the_same_stream_are_learnt_anew() -> None:
    """Nothing is remembered that does not fit."""
    encoder = GenerateEncoder(False)
    seen = [
        json.loads(encoder.encode(InferResponse("m", "1", "", [tensor(n, "INT8", np.int8([1]))])))
        for n in ("a", "z", "a")
    ]
    assert [set(each) - {"model_name", "model_version"} for each in seen] == [{"a"}, {"z"}, {"a"}]


def test_nan_is_written_as_the_protocol_does_unless_strict() -> None:
    """As for infer."""
    response = InferResponse("m", "1", "", [tensor("x", "FP32", np.float32([np.nan]))])
    assert b'"x":NaN}' in encode(response)
    with pytest.raises(InvalidArgument):
        encode(response, strict=True)


@pytest.mark.parametrize("kind", ["FP16", "BF16"])
def test_outputs_that_json_cannot_carry_are_refused(kind: str) -> None:
    """There is no binary form here."""
    response = InferResponse("m", "1", "", [tensor("x", kind, np.float16([1]))])
    with pytest.raises(InvalidArgument):
        encode(response)


def test_broken_outputs_are_the_servers_fault() -> None:
    """A body that is no whole element, a datatype that is none."""
    for kind in ("FP32", "BYTES", "WHAT"):
        response = InferResponse("m", "1", "", [InferTensor("x", kind, (1,), memoryview(b"abc"))])
        with pytest.raises(InternalError):
            encode(response)


def test_an_event_is_one_line_of_data() -> None:
    """Whatever an error's text holds."""
    assert event(b"{}") == b"data: {}\n\n"
    text = error_event("line\r\none\ud800")
    assert text.startswith(b'data: {"error":"line\\r\\none?')
    assert text.endswith(b'"}\n\n')
    assert text.count(b"\n") == 2
