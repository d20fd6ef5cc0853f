# SPDX-License-Identifier: Apache-2.0
"""JSON values to tensor bodies and back."""

from __future__ import annotations

import json
import struct

import msgspec
import numpy as np
import pytest

from actorserve.errors import InternalError, InvalidArgument
from actorserve.frontend.v2_values import MAX_DEPTH, body_of_json, json_of_body
from actorserve.wire.tensors import DataType, encode_bytes


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Nothing here opens anything, so the costly look for leaks is left out."""


def to_body(datatype: str, count: int, text: str | bytes) -> bytes:
    """Read `data` of an input I."""
    raw = msgspec.Raw(text.encode() if isinstance(text, str) else text)
    return body_of_json("I", DataType.of_wire_name(datatype), count, raw)


def to_json(datatype: str, body: bytes, strict: bool = False) -> str:
    """Print the body of an output O."""
    return bytes(json_of_body("O", DataType.of_wire_name(datatype), body, strict)).decode()


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]),
        ("UINT8", [0, 255]),
        ("UINT16", [0, 65535]),
        ("UINT32", [0, 2**32 - 1]),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]),
        ("INT16", [-32768, 32767]),
        ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]),
        ("FP32", [-1.5, 3.4028234663852886e38]),
        ("FP64", [5e-324, 1.7976931348623157e308]),
        ("BYTES", ["", "héllo\u0000"]),
    ],
)
def test_values_survive_the_round_trip(datatype: str, values: list[object]) -> None:
    """The smallest and largest values of each type come back as they were."""
    body = to_body(datatype, 2, json.dumps(values))
    assert json.loads(to_json(datatype, body)) == values


def test_nested_arrays_are_flattened_in_order() -> None:
    """Only the number of elements has to agree with the shape, as for existing clients."""
    assert to_body("INT32", 4, "[[1,2],[3,4]]") == struct.pack("<4i", 1, 2, 3, 4)
    assert to_body("INT32", 4, "[[[1],[2]],[[3],[4]]]") == struct.pack("<4i", 1, 2, 3, 4)
    assert to_body("BYTES", 2, '[["a"],["b"]]') == encode_bytes([b"a", b"b"])
    assert to_body("FP32", 0, "[[],[]]") == b""


def test_integers_are_taken_for_floats() -> None:
    """1 is a good FP32 value."""
    assert to_body("FP32", 2, "[1, -2]") == struct.pack("<2f", 1, -2)


@pytest.mark.parametrize(
    ("datatype", "text", "expected"),
    [
        ("UINT8", "[1, 300]", "element 1 is 300, which does not fit into UINT8 (0 to 255)"),
        ("UINT32", "[-1, 0]", "element 0 is -1, which does not fit into UINT32"),
        ("INT64", "[1, 9223372036854775808]", "element 1 is 9223372036854775808"),
        ("UINT64", "[1, 18446744073709551616]", "element 1 is 18446744073709551616"),
        ("INT8", f"[0, {'9' * 400}]", "element 1 is 9999999999999999999999999999999999999999…"),
        ("FP32", "[0, 1e39]", "element 1 is 1e+39, which does not fit into FP32"),
        ("FP32", "[0, 1e999]", "out of range - at `data[1]`"),
        ("INT32", "[0, 1.5]", "Expected `int`, got `float` - at `data[1]`"),
        ("INT32", "[0, true]", "Expected `int`, got `bool` - at `data[1]`"),
        ("FP32", '["a", "b"]', "Expected `float`, got `str` - at `data[0]`"),
        ("FP32", "[0, true]", "Expected `float`, got `bool` - at `data[1]`"),
        ("FP64", "[0, null]", "Expected `float`, got `null` - at `data[1]`"),
        ("BOOL", "[0, 1]", "Expected `bool`, got `int` - at `data[0]`"),
        ("BYTES", '["a", 1]', "Expected `str`, got `int` - at `data[1]`"),
        ("BYTES", b'["a", "\xff"]', "Unable to parse 'data'"),
        ("BYTES", '["a", "\\ud800"]', "input 'I'"),
        ("FP32", "[[0], 1]", "arrays and elements are mixed at depth 1"),
        ("FP32", '[[0], ["x"]]', "Expected `float`, got `str` - at `data[1]`"),
        ("FP32", "5", "Expected `array`, got `int`"),
        ("FP32", '{"a": 1}', "Expected `array`, got `object`"),
    ],
)
def test_wrong_values_are_named(datatype: str, text: str | bytes, expected: str) -> None:
    """The error says which element of which input is wrong, and why."""
    with pytest.raises(InvalidArgument) as caught:
        to_body(datatype, 2, text)
    assert expected in caught.value.message
    assert "'I'" in caught.value.message


@pytest.mark.parametrize("text", ["[1]", "[1,2,3]", "[]", "[[1],[2],[3]]"])
def test_wrong_number_of_elements_is_an_error(text: str) -> None:
    """The text is the one that clients know."""
    with pytest.raises(InvalidArgument, match="Shape does not match true shape of 'data' field"):
        to_body("FP32", 2, text)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_needs_binary_data(datatype: str) -> None:
    """JSON numbers are refused for types that they cannot carry exactly, in both directions."""
    with pytest.raises(InvalidArgument) as caught:
        to_body(datatype, 1, "[1]")
    assert caught.value.message == (
        f"receiving {datatype} data via JSON is not supported. "
        "Please use the binary data format for input 'I'"
    )
    with pytest.raises(InvalidArgument) as caught:
        to_json(datatype, b"\0\0")
    assert caught.value.message == (
        f"sending {datatype} data via JSON is not supported. "
        "Please use the binary data format for output 'O'"
    )


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 5_000, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    """Row 85: no depth of nesting crashes anything."""
    with pytest.raises(InvalidArgument, match="nested deeper than 100 levels"):
        to_body("FP32", 1, "[" * depth + "1" + "]" * depth)


def test_nesting_up_to_the_limit_is_fine() -> None:
    """A hundred levels are read."""
    text = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    assert to_body("INT8", 1, text) == b"\1"


def test_many_values_are_packed_exactly() -> None:
    """More values than are packed at once keep their order."""
    values = np.arange(200_000, dtype="<i4")
    assert to_body("INT32", 200_000, json.dumps(values.tolist())) == values.tobytes()


def test_fp32_is_printed_as_the_double_it_is() -> None:
    """0.1 as FP32 is not 0.1 as a double."""
    assert to_json("FP32", struct.pack("<2f", 0.1, 11)) == "[0.10000000149011612,11.0]"


def test_nan_and_infinity_are_bare_words_unless_strict() -> None:
    """Clients read them; a strict server says to use binary data."""
    body = struct.pack("<4f", 1, float("nan"), float("inf"), float("-inf"))
    assert to_json("FP32", body) == "[1.0,NaN,Infinity,-Infinity]"
    with pytest.raises(InvalidArgument, match=r"NaN or Infinity.*binary data format"):
        to_json("FP32", body, strict=True)


def test_bytes_that_are_not_utf_8_need_binary_data() -> None:
    """The error names the output and the way out."""
    with pytest.raises(InvalidArgument, match=r"output 'O'.*not UTF-8.*binary data format"):
        to_json("BYTES", encode_bytes([b"\xff"]))


@pytest.mark.parametrize(("datatype", "body"), [("FP32", b"123"), ("BYTES", b"\x05\0\0\0ab")])
def test_a_body_that_cannot_be_is_an_internal_error(datatype: str, body: bytes) -> None:
    """A model's impossible output is the server's fault, not the client's."""
    with pytest.raises(InternalError, match="output 'O'"):
        to_json(datatype, body)


def test_no_elements_are_an_empty_array() -> None:
    """Empty outputs are valid."""
    assert to_json("FP32", b"") == "[]"
    assert to_json("BYTES", b"") == "[]"
