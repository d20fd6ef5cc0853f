# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.Tensor`: as models make it, as they get it, as the stub sends it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from actorserve.errors import InvalidArgument
from actorserve.triton.pb_utils import Tensor, TritonModelException
from actorserve.wire.tensors import DataType, decode_bytes, encode_bytes

DTYPES = {
    "?": 1, "u1": 2, "u2": 3, "u4": 4, "u8": 5, "i1": 6, "i2": 7, "i4": 8, "i8": 9,
    "f2": 10, "f4": 11, "f8": 12,
}  # fmt: skip


def arena_view(array: npt.NDArray[Any], writable: bool = True) -> npt.NDArray[np.uint8]:
    """Return the bytes of an array as the stub gets them: one-dimensional, over foreign memory."""
    view = np.frombuffer(bytearray(array.tobytes()), np.uint8)
    view.flags.writeable = writable
    return view


# --- made by a model -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "number"), DTYPES.items())
def test_numeric_arrays_are_taken_as_they_are(dtype: str, number: int) -> None:
    """Name, type and shape can be read back, and the array is the model's own."""
    array = np.ones((2, 3), dtype)
    tensor = Tensor("OUT", array)
    assert tensor.name() == "OUT"
    assert int(tensor.triton_dtype()) == number
    assert tensor.shape() == [2, 3]
    assert tensor.as_numpy() is array
    assert tensor.is_cpu() is True
    assert tensor._body()[:2] == (number, (2, 3))
    assert tensor._body()[2] is array


@pytest.mark.parametrize(
    "arguments", [(None, np.ones(1)), ("x", None), ("", None), ("x", [1.0]), ("x", 1.0), (b"x",)]
)
def test_wrong_types_are_type_errors(arguments: tuple[Any, ...]) -> None:
    """Only a str and a numpy array make a tensor; a list or a number does not."""
    with pytest.raises(TypeError):
        Tensor(*arguments)


def test_numpys_scalars_are_no_arrays() -> None:
    """What an index gives is a number, not an array."""
    with pytest.raises(TypeError):
        Tensor("x", np.ones(2, np.float32)[0])  # type: ignore[arg-type]


def test_empty_name_is_refused() -> None:
    """A tensor has a name."""
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor("", np.ones(1))


def test_numpys_own_strings_are_names() -> None:
    """A name that came out of an array becomes a plain str, which alone can travel."""
    assert type(Tensor(np.str_("x"), np.ones(1)).name()) is str


@pytest.mark.parametrize("dtype", ["c8", "U3", "M8[s]", "V2", "g"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    """Complex numbers, unicode arrays and dates have no data type."""
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("x", np.zeros(1, dtype))


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3).T, np.arange(10)[::2]])
def test_arrays_in_another_order_are_copied_into_c_order(array: npt.NDArray[Any]) -> None:
    """What travels is the array's logical order, with its shape and dtype."""
    number, shape, body = Tensor("x", array)._body()
    assert body.flags.c_contiguous
    assert (number, shape) == (9, array.shape)
    assert body.tolist() == array.tolist()


def test_foreign_byte_order_becomes_little_endian() -> None:
    """A big-endian array is the same numbers on the wire."""
    tensor = Tensor("x", np.array([1, 2], ">i4"))
    assert tensor._body()[2].tobytes() == np.array([1, 2], "<i4").tobytes()
    assert tensor.as_numpy().tolist() == [1, 2]


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (0, 3, 2), (1, 1, 1)])
def test_scalars_and_empty_tensors_keep_their_shape(shape: tuple[int, ...]) -> None:
    """No shape is made into another one, for numbers as for BYTES."""
    for dtype in ("f4", "O"):
        array = np.zeros(shape, dtype)
        tensor = Tensor("x", array)
        assert tensor.shape() == list(shape)
        _, sent_shape, body = tensor._body()
        received = Tensor._received("x", int(tensor.triton_dtype()), sent_shape, body.tobytes())
        assert received.as_numpy().shape == shape


def test_bytes_are_encoded_when_the_tensor_is_made() -> None:
    """What happens to the array later is not seen, yet the array is given back."""
    array = np.array([["a", b"\xff"], [7, ""]], np.object_)
    tensor = Tensor("x", array)
    array[0, 0] = "changed"
    number, shape, body = tensor._body()
    assert (number, shape) == (13, (2, 2))
    assert decode_bytes(body).tolist() == [b"a", b"\xff", b"7", b""]
    assert tensor.as_numpy() is array


def test_fixed_width_bytes_are_bytes() -> None:
    """An `S` array is BYTES too."""
    tensor = Tensor("x", np.array([b"ab", b"c"]))
    assert tensor.triton_dtype() == DataType.BYTES
    assert decode_bytes(tensor._body()[2]).tolist() == [b"ab", b"c"]


def test_text_that_cannot_be_encoded_is_refused() -> None:
    """A lone surrogate is the model's error, located."""
    with pytest.raises(TritonModelException, match="element 0 "):
        Tensor("x", np.array(["\ud800"], np.object_))


def test_public_names_are_the_apis() -> None:
    """Nothing shows but what models know."""
    assert [n for n in dir(Tensor) if not n.startswith("_")] == [
        "as_numpy", "from_dlpack", "is_cpu", "name", "shape", "to_dlpack", "triton_dtype",
    ]  # fmt: skip


# --- received ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: memoryview(bytearray(b))])
def test_inline_bodies_become_writable_arrays(dtype: str, kind: Any) -> None:
    """Whatever the body came in, the model can write into its array."""
    array = np.arange(6).astype(dtype).reshape(2, 3)
    tensor = Tensor._received("IN", DTYPES[dtype], (2, 3), kind(array.tobytes()))
    got = tensor.as_numpy()
    assert got.dtype == array.dtype
    assert got.tolist() == array.tolist()
    assert tensor.as_numpy() is got
    got[0, 0] = 1


def test_body_in_own_memory_is_not_copied() -> None:
    """The array lies over the bytes that the stub owns."""
    body = bytearray(8)
    Tensor._received("IN", 11, (2,), body).as_numpy()[1] = 1.0
    assert bytes(body) == np.array([0, 1], "<f4").tobytes()


def test_body_in_shared_memory_is_viewed_in_place() -> None:
    """A leased view becomes a writable array of type and shape without a copy."""
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    view = arena_view(array)
    got = Tensor._received("IN", 11, (3, 4), view).as_numpy()
    assert np.shares_memory(got, view)
    assert got.tolist() == array.tolist()
    got[0, 0] = 5


def test_body_that_others_hold_is_copied_when_read() -> None:
    """The model writes into its own copy, and the lease of the memory ends with it."""
    array = np.arange(4, dtype=np.int32)
    view = arena_view(array, writable=False)
    tensor = Tensor._received("IN", 8, (4,), view, True)
    assert tensor._body()[2] is view
    got = tensor.as_numpy()
    got[0] = 9
    assert view.view(np.int32)[0] == 0
    assert tensor._body()[2] is got
    dead = weakref.ref(view)
    del view
    gc.collect()
    assert dead() is None


def test_body_that_others_hold_can_be_read_in_place() -> None:
    """A model that promised not to write gets a read-only view."""
    view = arena_view(np.arange(4, dtype=np.int32), writable=False)
    got = Tensor._received("IN", 8, (4,), view, False).as_numpy()
    assert np.shares_memory(got, view)
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1


def test_array_keeps_the_memory_alive() -> None:
    """The view lives as long as anything made from it."""
    view = arena_view(np.arange(4, dtype=np.int32))
    dead = weakref.ref(view)
    tensor = Tensor._received("IN", 8, (2, 2), view)
    piece = tensor.as_numpy()[1:]
    del view, tensor
    gc.collect()
    assert dead() is not None
    assert piece.tolist() == [[2, 3]]
    del piece
    gc.collect()
    assert dead() is None


def test_untouched_bodies_travel_on_as_they_came() -> None:
    """A tensor that is only handed on is neither decoded nor copied."""
    view = arena_view(np.arange(4, dtype=np.int32))
    assert Tensor._received("IN", 8, (4,), view)._body()[2] is view
    number, shape, body = Tensor._received("IN", 8, (4,), b"\x01" * 16)._body()
    assert (number, shape, body.tobytes()) == (8, (4,), b"\x01" * 16)


def test_changes_to_a_received_array_travel_on() -> None:
    """The array is the tensor's memory: what the model writes is what it sends."""
    tensor = Tensor._received("IN", 11, (1,), b"\x00" * 4)
    tensor.as_numpy()[0] = 2.0
    assert tensor._body()[2].tolist() == [2.0]


def test_received_bytes_are_decoded_once() -> None:
    """Elements are `bytes`, in the tensor's shape, and the same array each time."""
    elements = [b"a", b"", "żółw".encode(), b"\x00"]
    raw = encode_bytes(elements)
    for body in (raw, bytearray(raw), np.frombuffer(raw, np.uint8)):
        tensor = Tensor._received("IN", 13, (2, 2), body)
        array = tensor.as_numpy()
        assert array.dtype == np.object_
        assert array.tolist() == [elements[:2], elements[2:]]
        assert tensor.as_numpy() is array
        array[0, 0] = b"changed"
        assert tensor._body()[2].tobytes() == raw


def test_received_bytes_that_lie_are_the_models_error() -> None:
    """A body that slipped through names the tensor and the element."""
    with pytest.raises(TritonModelException, match=r"^Tensor 'IN': element 0 of a BYTES body"):
        Tensor._received("IN", 13, (1,), b"\xff\x00\x00\x00a").as_numpy()
    with pytest.raises(TritonModelException, match="expected 2"):
        Tensor._received("IN", 13, (2,), encode_bytes([b"a"])).as_numpy()


@pytest.mark.parametrize("nbytes", [0, 3, 4, 9, 12])
@pytest.mark.parametrize("kind", [bytes, bytearray, lambda b: np.frombuffer(b, np.uint8)])
def test_body_of_the_wrong_size_is_refused(nbytes: int, kind: Any) -> None:
    """No array is made that is longer, or shorter, than its memory."""
    tensor = Tensor._received("IN", 11, (2,), kind(b"\x00" * nbytes))
    with pytest.raises(TritonModelException, match=rf"'IN' of shape \[2\] .* {nbytes} bytes"):
        tensor.as_numpy()


def test_bf16_has_no_numpy() -> None:
    """The text says what to use instead."""
    tensor = Tensor._received("IN", 14, (2,), b"\x80\x3f\x00\x40")
    with pytest.raises(TritonModelException) as caught:
        tensor.as_numpy()
    assert str(caught.value) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
        "instead."
    )
    assert tensor.shape() == [2]
    assert tensor._body()[2].tobytes() == b"\x80\x3f\x00\x40"


def test_tensor_without_a_data_type_cannot_be_read_or_sent() -> None:
    """DLPack may bring a type that no tensor has; that shows when it is used, with the name."""
    tensor = Tensor.from_dlpack("odd", np.ones(2, np.complex64))
    assert tensor.triton_dtype() == DataType.INVALID
    assert tensor.shape() == [2]
    with pytest.raises(TritonModelException, match="'odd'"):
        tensor.as_numpy()
    with pytest.raises(InvalidArgument, match="'odd'"):
        tensor._body()


def test_repr_says_what_it_is() -> None:
    """A printed tensor shows name, type and shape, not its data."""
    assert repr(Tensor("x", np.ones((2, 1), np.float32))) == "Tensor('x', FP32, [2, 1])"
