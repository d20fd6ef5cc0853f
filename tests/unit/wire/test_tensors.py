# SPDX-License-Identifier: Apache-2.0
"""Data types, shapes and the BYTES codec."""

from __future__ import annotations

import struct
from collections.abc import Callable
from time import process_time

import numpy as np
import pytest

from actorserve.errors import InvalidArgument
from actorserve.wire.tensors import (
    BY_CONFIG_NAME,
    BY_NUMBER,
    BY_WIRE_NAME,
    MAX_ELEMENTS,
    BytesError,
    DataType,
    byte_size,
    check_bytes,
    decode_bytes,
    element_count,
    encode_bytes,
)


def body(*elements: bytes) -> bytes:
    """Build a BYTES body the slow way."""
    return b"".join(struct.pack("<I", len(e)) + e for e in elements)


def failure(call: Callable[[], object]) -> BytesError:
    """Return the BytesError that a call raises."""
    with pytest.raises(BytesError) as caught:
        call()
    return caught.value


# --- data types ----------------------------------------------------------------------------------


def test_numbers_names_and_sizes_are_the_protocols() -> None:
    """Each type has the number, the names and the size that the protocol lists."""
    listed = [(t.wire_name, t.config_name, t.element_bytes) for t in BY_NUMBER]
    assert listed == [
        ("INVALID", "TYPE_INVALID", 0),
        ("BOOL", "TYPE_BOOL", 1),
        ("UINT8", "TYPE_UINT8", 1),
        ("UINT16", "TYPE_UINT16", 2),
        ("UINT32", "TYPE_UINT32", 4),
        ("UINT64", "TYPE_UINT64", 8),
        ("INT8", "TYPE_INT8", 1),
        ("INT16", "TYPE_INT16", 2),
        ("INT32", "TYPE_INT32", 4),
        ("INT64", "TYPE_INT64", 8),
        ("FP16", "TYPE_FP16", 2),
        ("FP32", "TYPE_FP32", 4),
        ("FP64", "TYPE_FP64", 8),
        ("BYTES", "TYPE_STRING", 0),
        ("BF16", "TYPE_BF16", 2),
    ]
    assert [int(t) for t in BY_NUMBER] == list(range(15))


def test_names_lead_back_to_their_types() -> None:
    """Look-ups by either name give the type; INVALID is no name that anyone may use."""
    for datatype in BY_NUMBER[1:]:
        assert DataType.of_wire_name(datatype.wire_name) is datatype
        assert DataType.of_config_name(datatype.config_name) is datatype
    assert "INVALID" not in BY_WIRE_NAME
    assert "TYPE_INVALID" not in BY_CONFIG_NAME


@pytest.mark.parametrize("name", ["", "fp32", "FP32 ", "INVALID", "STRING", "TYPE_FP32"])
def test_unknown_wire_name_is_refused_with_the_known_ones(name: str) -> None:
    """An unknown name's error quotes it and lists what would do."""
    with pytest.raises(InvalidArgument, match=r"unknown data type .* one of BOOL, UINT8"):
        DataType.of_wire_name(name)


def test_unknown_config_name_is_refused() -> None:
    """A configuration's name is looked up among those of configurations only."""
    with pytest.raises(InvalidArgument, match="unknown data type 'FP32'"):
        DataType.of_config_name("FP32")


def test_numpy_dtypes_lead_to_their_types() -> None:
    """Every numpy spelling of a type, in either byte order, is the same data type."""
    for datatype in BY_NUMBER:
        if datatype.numpy_dtype is not None:
            assert DataType.of_dtype(datatype.numpy_dtype) is datatype
    assert DataType.of_dtype(np.dtype(np.longlong)) is DataType.INT64
    assert DataType.of_dtype(np.dtype(">f8")) is DataType.FP64
    assert DataType.of_dtype(np.dtype("S5")) is DataType.BYTES


@pytest.mark.parametrize("dtype", ["c8", "c16", "U3", "M8[s]", "m8[s]", "V4", "g"])
def test_numpy_dtypes_without_counterpart_are_refused(dtype: str) -> None:
    """A dtype that the protocol lacks is an error that names it."""
    with pytest.raises(InvalidArgument, match="no counterpart"):
        DataType.of_dtype(np.dtype(dtype))


def test_body_dtype_has_the_elements_size() -> None:
    """A body lies in an array of elements of the right size, BYTES in single bytes."""
    for datatype in BY_NUMBER[1:]:
        assert datatype.body_dtype.itemsize == (datatype.element_bytes or 1)


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "count"),
    [((), 1), ((0,), 0), ((3,), 3), ((2, 3, 4), 24), ((1, 0, 5), 0), ((MAX_ELEMENTS,), 2**63 - 1)],
)
def test_element_count_multiplies(shape: tuple[int, ...], count: int) -> None:
    """The number of elements is the product of the extents; a scalar has one."""
    assert element_count(shape) == count


def test_negative_dimension_is_refused_by_its_place() -> None:
    """The error names the dimension and the shape."""
    with pytest.raises(InvalidArgument, match=r"dimension 1 of shape \[2,-1\] is -1"):
        element_count((2, -1))


def test_two_negative_dimensions_do_not_cancel_out() -> None:
    """A product that would be positive again is refused all the same."""
    with pytest.raises(InvalidArgument, match="dimension 0"):
        element_count((-2, -2))


@pytest.mark.parametrize("shape", [(2**32, 2**31), (2**63,), (2**40,) * 10])
def test_too_many_elements_are_refused(shape: tuple[int, ...]) -> None:
    """A product beyond 63 bits is an error, not a number that wrapped."""
    with pytest.raises(InvalidArgument, match="too many elements"):
        element_count(shape)


def test_empty_shape_that_numpy_cannot_hold_is_refused() -> None:
    """A zero does not excuse other extents that no array can have."""
    with pytest.raises(InvalidArgument, match="too many elements"):
        element_count((2**62, 4, 0))


def test_rank_beyond_numpys_is_refused() -> None:
    """64 dimensions are allowed, 65 are not."""
    assert element_count((1,) * 64) == 1
    with pytest.raises(InvalidArgument, match="65 dimensions: expected at most 64"):
        element_count((1,) * 65)


def test_byte_size_is_exact() -> None:
    """The size is the number of elements times the element's."""
    assert byte_size(DataType.FP64, (3, 5)) == 120
    assert byte_size(int(DataType.BF16), ()) == 2
    assert byte_size(DataType.BOOL, (0, 7)) == 0


def test_byte_size_beyond_63_bits_is_refused() -> None:
    """Elements that count, but whose bytes do not, are refused."""
    with pytest.raises(InvalidArgument, match="too large"):
        byte_size(DataType.FP64, (2**61,))


@pytest.mark.parametrize("datatype", [DataType.BYTES, DataType.INVALID])
def test_byte_size_of_varying_elements_is_refused(datatype: DataType) -> None:
    """BYTES has no size that a shape could tell."""
    with pytest.raises(InvalidArgument, match="no fixed byte size"):
        byte_size(datatype, (1,))


# --- BYTES ---------------------------------------------------------------------------------------

SAMPLES: list[list[bytes]] = [
    [],
    [b""],
    [b"abc"],
    [b"\x00", b"a\x00b", b"\x00" * 5],
    [b"\xff\xfe", "żółw".encode(), b"", b"z" * 300],
    [b"x" * (i % 23) for i in range(1000)],
    [bytes([i % 256]) * (i * 7) for i in range(200)],
]


@pytest.mark.parametrize("elements", SAMPLES)
def test_elements_survive_the_round_trip(elements: list[bytes]) -> None:
    """Empty elements, NUL bytes and bytes that are no UTF-8 come back as they were."""
    encoded = encode_bytes(elements)
    assert encoded == body(*elements)
    assert decode_bytes(encoded).tolist() == elements
    assert decode_bytes(encoded, len(elements)).dtype == np.object_
    assert check_bytes(encoded, len(elements)) == len(elements)


@pytest.mark.parametrize("count", [1, 31, 33, 500])
def test_what_is_not_bytes_is_encoded_as_its_text(count: int) -> None:
    """Texts, and numbers by their `str`, become UTF-8, in few elements as in many."""
    elements: list[object] = ["ascii", "zażółć", 7, 1.5, None, b"raw"] * count
    expected = [b"ascii", "zażółć".encode(), b"7", b"1.5", b"None", b"raw"] * count
    assert encode_bytes(elements) == body(*expected)
    texts = ["ascii", "żółw"] * count
    assert encode_bytes(texts) == body(*(t.encode() for t in texts))
    assert encode_bytes(["ascii"] * count) == body(*[b"ascii"] * count)


def test_arrays_are_encoded_in_c_order() -> None:
    """The order is that of the array's indices, whatever its memory's."""
    array = np.array([["a", "b"], ["c", "d"]], np.object_)
    assert encode_bytes(array.T) == body(b"a", b"c", b"b", b"d")
    assert encode_bytes(np.array([b"ab", b"c"], "S4")) == body(b"ab", b"c")
    assert encode_bytes(np.array("scalar", np.object_)) == body(b"scalar")


def test_text_that_utf8_cannot_express_is_refused_by_its_index() -> None:
    """A lone surrogate is an error that says which element it is in."""
    with pytest.raises(InvalidArgument, match=r"element 2 .* at character 1"):
        encode_bytes(["a", "b", "c\ud800"])
    with pytest.raises(InvalidArgument, match="element 99 "):
        encode_bytes(["a"] * 99 + ["\ud800"])


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, "u1")])
def test_any_bytes_like_body_is_decoded(kind: Callable[[bytes], object]) -> None:
    """Bodies come as bytes, views and arrays alike."""
    for elements in ([], [b"ab", b""]):
        raw = kind(body(*elements))
        assert decode_bytes(raw).tolist() == elements  # type: ignore[arg-type]
        assert check_bytes(raw, len(elements)) == len(elements)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_length_that_is_cut_off_is_located(left: int) -> None:
    """The error says which element, where, and how many bytes are there."""
    data = body(b"ab", b"cde") + b"\x00" * left
    for call in (lambda: check_bytes(data, 3), lambda: decode_bytes(data)):
        error = failure(call)
        assert error.kind == "length_truncated"
        assert (error.index, error.offset, error.available) == (2, 13, left)
        assert "element 2" in error.message
        assert "offset 13" in error.message


def test_element_that_is_cut_off_is_located() -> None:
    """The last element may not say that it is longer than what is left."""
    data = body(b"ab", b"cde")[:-1]
    for call in (lambda: check_bytes(data), lambda: decode_bytes(data, 2)):
        error = failure(call)
        assert error.kind == "element_truncated"
        assert (error.index, error.offset) == (1, 6)
        assert (error.declared, error.available) == (3, 2)


def test_length_that_lies_by_gigabytes_is_refused() -> None:
    """A length near 4 GiB is compared with what is there, not allocated."""
    error = failure(lambda: decode_bytes(b"\xff\xff\xff\xffab"))
    assert (error.declared, error.available) == (2**32 - 1, 2)


def test_too_few_elements_are_counted() -> None:
    """The error carries the number of elements that are there."""
    error = failure(lambda: check_bytes(body(b"a", b"b"), 3))
    assert (error.kind, error.index) == ("too_few", 2)
    assert failure(lambda: decode_bytes(b"", 1)).kind == "too_few"


def test_too_many_elements_end_the_check_early() -> None:
    """What is left over is not walked through."""
    error = failure(lambda: check_bytes(body(b"a", b"b", b"c", b"d"), 2))
    assert (error.kind, error.index, error.offset) == ("too_many", 3, 10)
    assert failure(lambda: decode_bytes(body(b"a"), 0)).kind == "too_many"


def test_a_million_short_strings_take_well_under_a_second() -> None:
    """Both ways and the check take about 0.25 s each of one slow core; allowed are 6 in all."""
    texts = [str(i) for i in range(1_000_000)]
    started_s = process_time()
    encoded = encode_bytes(texts)
    decoded = decode_bytes(encoded, len(texts))
    assert check_bytes(encoded, len(texts)) == len(texts)
    assert process_time() - started_s < 6
    assert decoded[-1] == b"999999"
