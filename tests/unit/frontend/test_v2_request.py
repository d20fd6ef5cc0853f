# SPDX-License-Identifier: Apache-2.0
"""The request's document."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from actorserve.errors import InvalidArgument, Unsupported
from actorserve.frontend.v2_request import Draft, parse_request, raw_request
from actorserve.triton.inference import ModelInfo, TensorSpec


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Nothing here opens anything, so the costly look for leaks is left out."""


LIMIT = 1 << 20


def parse(document: Any, limit: int = LIMIT) -> Draft:
    """Parse a request to model m."""
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_request(text, "m", "", limit)


def one(**more: Any) -> dict[str, Any]:
    """A document with one input, changed as the test wants."""
    return {"inputs": [{"name": "I", "datatype": "FP32", "shape": [1], "data": [1]} | more]}


def refused(document: Any, kind: type[Exception] = InvalidArgument, limit: int = LIMIT) -> str:
    """Return the text of the error."""
    with pytest.raises(kind) as caught:
        parse(document, limit)
    return str(caught.value)


def test_everything_finds_its_place() -> None:
    """Reserved parameters become fields, the client's own ones stay parameters."""
    draft = parse(
        one()
        | {
            "id": "abc",
            "parameters": {
                "sequence_id": 9,
                "sequence_start": True,
                "sequence_end": False,
                "priority": 2,
                "timeout": 123456,
                "binary_data_output": True,
                "my_b": True,
                "my_i": 7,
                "my_s": "str",
                "my_f": 2.5,
            },
            "outputs": [{"name": "A"}, {"name": "B", "parameters": {"binary_data": False}}],
        }
    )
    request = draft.request
    assert (request.model_name, request.model_version, request.id) == ("m", "", "abc")
    assert request.correlation_id == 9
    assert request.sequence_start
    assert not request.sequence_end
    assert (request.priority, request.timeout_us) == (2, 123456)
    assert request.parameters == {"my_b": True, "my_i": 7, "my_s": "str", "my_f": 2.5}
    assert request.outputs == ["A", "B"]
    assert draft.choice.is_binary("A")
    assert not draft.choice.is_binary("B")
    assert request.inputs[0].data == struct.pack("<f", 1)
    assert draft.blocks == []


def test_requests_share_nothing() -> None:
    """Defaults of one request are not changed by another."""
    parse(
        one()
        | {"parameters": {"a": 1}, "outputs": [{"name": "A", "parameters": {"binary_data": True}}]}
    )
    plain = parse(one())
    assert plain.request.parameters == {}
    assert plain.request.outputs == []
    assert not plain.choice.is_binary("A")


def test_optional_members_may_be_null() -> None:
    """Clients that write every member are understood."""
    draft = parse(
        {
            "id": None,
            "parameters": None,
            "outputs": None,
            "inputs": [
                {"name": "I", "datatype": "FP32", "shape": [1], "data": [1], "parameters": None}
            ],
        }
    )
    assert draft.request.id == ""


def test_sequence_id_may_be_text() -> None:
    """Both kinds of correlation id are kept as they are."""
    assert parse(one() | {"parameters": {"sequence_id": "s"}}).request.correlation_id == "s"
    largest = 2**64 - 1
    assert parse(one() | {"parameters": {"sequence_id": largest}}).request.correlation_id == largest


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"sequence_id": 1.5}, "'sequence_id'"),
        ({"sequence_id": -1}, "'sequence_id'"),
        ({"sequence_id": True}, "'sequence_id'"),
        ({"sequence_start": 1}, "'sequence_start' in 'parameters': expected a boolean, got 1"),
        ({"priority": -1}, "'priority'"),
        ({"priority": True}, "'priority'"),
        ({"timeout": "1"}, "'timeout' in 'parameters': expected an integer from 0"),
        ({"timeout": 1 << 64}, "'timeout'"),
        ({"binary_data_output": "yes"}, "'binary_data_output'"),
        (
            {"x": [1]},
            "parameter 'x' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        ({"x": None}, "parameter 'x' has invalid type."),
        ({"x": 1 << 63}, "'x'"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], expected: str) -> None:
    """The error says which parameter, what was expected and what came."""
    assert expected in refused(one() | {"parameters": parameters})


def test_reserved_parameters_are_refused() -> None:
    """The text is the one that clients know."""
    assert refused(one() | {"parameters": {"triton_foo": 1}}) == (
        "parameter keys starting with 'triton_' are reserved for Triton usage "
        "and should not be specified."
    )


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (b'{"inputs": [', "of 12 bytes: Input data was truncated"),
        (b"", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"inputs": []} x', "trailing characters"),
        (b'\xef\xbb\xbf{"inputs": []}', "byte 0"),
        (b'{"inputs": [], "id": "\xff"}', "failed to parse"),
        (b'{"inputs": [], "x": NaN}', "NaN and Infinity are not JSON"),
        (b'{"inputs": [], "x": -Infinity}', "NaN and Infinity are not JSON"),
        ({"id": "x"}, "missing required field `inputs`"),
        ({"id": 5, "inputs": []}, "at `$.id`"),
        ({"inputs": {}}, "at `$.inputs`"),
        (
            {"inputs": [{"datatype": "FP32", "shape": [1], "data": [1]}]},
            "field `name` - at `$.inputs[0]`",
        ),
        (
            {"inputs": [{"name": "I", "datatype": "FP32", "data": [1]}]},
            "field `shape` - at `$.inputs[0]`",
        ),
        ({"inputs": [{"name": "I", "shape": [1], "data": [1]}]}, "field `datatype`"),
        (one(shape="1"), "at `$.inputs[0].shape`"),
        (one(shape=[1.5]), "at `$.inputs[0].shape[0]`"),
        (one(shape=[-1]), "Unable to parse 'shape' of input 'I'"),
        (one(shape=[1] * 65), "Unable to parse 'shape' of input 'I'"),
        (one(shape=[1 << 40, 1 << 40]), "too many elements"),
        (one(shape=[1 << 80]), "too many elements"),
        (one(parameters={"binary_data_size": "4"}, data=[1]), "binary_data_size"),
    ],
)
def test_a_broken_document_says_what_and_where(document: Any, expected: str) -> None:
    """Rows 82 and 84: 400 for whatever cannot be read, before anything is allocated."""
    assert expected in refused(document)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_deep_nesting_anywhere_is_refused(opening: bytes) -> None:
    """Row 85: also in members that nobody knows."""
    deep = opening * 100_000 + b"1" + (b"]" if opening == b"[" else b"}") * 100_000
    assert "nested too deeply" in refused(b'{"inputs": [], "x": ' + deep + b"}")


def test_the_last_of_two_equal_keys_counts() -> None:
    """Row 84: duplicate keys have a defined meaning."""
    assert parse(b'{"inputs": [], "id": "a", "id": "b"}').request.id == "b"


def test_unknown_datatype_is_refused() -> None:
    """The text is the one that clients know."""
    assert refused(one(datatype="FOO")) == "invalid datatype for input I"
    assert refused(one(datatype="INVALID")) == "invalid datatype for input I"


def test_an_input_given_twice_is_refused() -> None:
    """The text names the request if it has an id."""
    twice = {"inputs": one()["inputs"] * 2}
    assert refused(twice) == "[request id: <id_unknown>] input 'I' already exists in request"
    assert refused(twice | {"id": "7"}) == "[request id: 7] input 'I' already exists in request"


@pytest.mark.parametrize(
    ("member", "found"),
    [
        ({"parameters": {"binary_data_size": 4}}, "'data', 'binary_data_size' in 'parameters'"),
        ({"parameters": {"shared_memory_region": "r"}}, "'data', 'shared_memory_region'"),
    ],
)
def test_two_sources_of_data_are_refused(member: dict[str, Any], found: str) -> None:
    """Data in the document and elsewhere contradict each other."""
    text = refused(one(**member))
    assert text.startswith(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in "
        "'parameters', 'shared_memory_region' in 'parameters'. But, set "
    )
    assert found in text


def test_no_source_of_data_is_refused() -> None:
    """An input has to come from somewhere."""
    document = one()
    del document["inputs"][0]["data"]
    assert "But, set none of them for input 'I'" in refused(document)


def test_client_shared_memory_and_classification_are_unsupported() -> None:
    """What this version cannot do is said, not ignored."""
    document = one(parameters={"shared_memory_region": "r"})
    del document["inputs"][0]["data"]
    assert "client shared memory is not supported" in refused(document, Unsupported)
    for key, value in (("classification", 2), ("shared_memory_region", "r")):
        wanted = {"outputs": [{"name": "O", "parameters": {key: value}}]}
        assert f"output 'O' asks for '{key}'" in refused(one() | wanted, Unsupported)


@pytest.mark.parametrize(
    "document",
    [one(shape=[1000], data=[]), one(data=None, parameters={"binary_data_size": 3000})],
)
def test_an_input_beyond_the_limit_is_refused(document: dict[str, Any]) -> None:
    """The error names the flag that moves the limit."""
    if document["inputs"][0]["data"] is None:
        del document["inputs"][0]["data"]
    text = refused(document, limit=2000)
    assert "exceeds the maximum allowed input size of 2000 bytes" in text
    assert "Use --http-max-input-size to increase the limit." in text
    assert text.startswith("input 'I' has ")


def blocks(*sizes: int) -> Draft:
    """A draft with binary inputs."""
    return parse(
        {
            "inputs": [
                {
                    "name": f"I{i}",
                    "datatype": "UINT8",
                    "shape": [size],
                    "parameters": {"binary_data_size": size},
                }
                for i, size in enumerate(sizes)
            ]
        }
    )


def test_blocks_follow_the_order_of_the_inputs() -> None:
    """Inputs with data of their own have no block."""
    draft = parse(
        {
            "inputs": [
                {"name": "A", "datatype": "UINT8", "shape": [1], "data": [1]},
                {
                    "name": "B",
                    "datatype": "UINT8",
                    "shape": [9],
                    "parameters": {"binary_data_size": 9},
                },
            ]
        }
    )
    assert [(block.index, block.nbytes) for block in draft.blocks] == [(1, 9)]


def test_blocks_have_to_fill_the_body_exactly() -> None:
    """Too few bytes are missed by name, too many are named too."""
    draft = blocks(4, 8)
    draft.check_blocks(12)
    with pytest.raises(InvalidArgument) as caught:
        draft.check_blocks(10)
    assert caught.value.message == (
        "unexpected size for input 'I1', expecting 2 additional bytes for model 'm'"
    )
    with pytest.raises(InvalidArgument) as caught:
        draft.check_blocks(13)
    assert caught.value.message == "unexpected additional input data for model 'm'"


def test_a_negative_block_is_refused() -> None:
    """A size below 0 cannot be."""
    assert "binary_data_size' of input 'I0': expected 0 or more" in refused(
        {
            "inputs": [
                {
                    "name": "I0",
                    "datatype": "UINT8",
                    "shape": [1],
                    "parameters": {"binary_data_size": -1},
                }
            ]
        }
    )


def info(datatype: str, shape: tuple[int, ...], batch: int = 0, inputs: int = 1) -> ModelInfo:
    """Describe a model for raw requests."""
    specs = tuple(TensorSpec(f"I{i}", datatype, shape) for i in range(inputs))
    return ModelInfo("m", "1", ("1",), "python", batch, False, specs, ())


@pytest.mark.parametrize(
    ("model", "nbytes", "shape"),
    [
        (info("FP32", (-1,)), 16, (4,)),
        (info("FP32", (2, -1)), 16, (2, 2)),
        (info("FP32", (4,)), 16, (4,)),
        (info("FP32", (-1, -1), batch=8), 16, (1, 4)),
        (info("BYTES", (1,)), 5, (1,)),
        (info("BYTES", (-1,)), 5, (1,)),
        (info("BYTES", (-1, 1), batch=8), 5, (1, 1)),
    ],
)
def test_a_raw_request_gets_its_shape_from_its_size(
    model: ModelInfo, nbytes: int, shape: tuple[int, ...]
) -> None:
    """One free dimension is worked out; the batch is 1; BYTES are one element."""
    draft = raw_request(model, "1", nbytes)
    assert draft.request.inputs[0].shape == shape
    assert draft.choice.is_binary("anything")
    prefix = struct.pack("<I", nbytes) if model.inputs[0].datatype == "BYTES" else b""
    assert draft.blocks[0].prefix == prefix


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (info("FP32", (-1, -1)), "cannot be worked out"),
        (info("BYTES", (2,)), "cannot be worked out"),
        (info("FP32", (4,), inputs=2), "exactly 1 input, but model 'm' has 2"),
    ],
)
def test_a_raw_request_without_one_shape_is_refused(model: ModelInfo, expected: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(InvalidArgument, match=expected):
        raw_request(model, "", 16)
