# SPDX-License-Identifier: Apache-2.0
"""Arrays of outputs on the wire, and what engines say that no wire takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.logits import packed, unpack
from actorserve.actors.generation.rank_sink import plain
from actorserve.errors import ProtocolError, ResourceExhausted
from actorserve.wire.codec import encode
from actorserve.wire.generation import Output, Outputs, decode_from_rank
from actorserve.wire.messages import Handle


class Memory:
    """Shared memory, as a dict."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def place(self, array: np.ndarray) -> Handle:
        self.blocks.append(array.tobytes())
        return Handle(1, len(self.blocks) - 1, 0, 0, array.nbytes)

    def view(self, handle: Handle) -> memoryview:
        return memoryview(self.blocks[handle.block])


def over_the_wire(outputs: list[Output], memory: Memory) -> list[Output]:
    """Send outputs; return what arrives."""
    message = decode_from_rank(encode(Outputs(packed(outputs, memory.place))))
    assert isinstance(message, Outputs)
    unpack(message.outputs, memory.view)
    return message.outputs


@pytest.mark.parametrize("shape", [(), (0, 5), (3, 7), (50, 400)])
@pytest.mark.parametrize("dtype", ["f4", ">f4", "f2", "i8", "?"])
def test_arrays_arrive_as_they_were(shape: tuple[int, ...], dtype: str):
    """Of every shape and dtype; only large ones take shared memory."""
    array = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3).astype(dtype)
    memory = Memory()
    (output,) = over_the_wire([Output(1, 0, [5], arrays={"x": array})], memory)
    assert output.arrays is not None
    assert output.arrays["x"].shape == shape
    assert (output.arrays["x"] == array).all()
    assert len(memory.blocks) == (1 if array.nbytes > 4096 else 0)


def test_outputs_without_arrays_stay_as_they_are():
    """The usual case costs nothing."""
    outputs = [Output(1, 0, [5]), Output(2, 0, [6], "stop", True)]
    assert packed(outputs, Memory().place) is outputs
    assert over_the_wire(outputs, Memory()) == outputs


def test_arrays_that_cannot_travel_end_their_request_alone():
    """For want of memory, or for a dtype that has no name here."""

    def full(array: np.ndarray) -> Handle:
        raise ResourceExhausted("no memory")

    large = Output(1, 0, [1], arrays={"x": np.zeros(5000)})
    odd = Output(2, 0, [1], arrays={"x": np.zeros(2, "c16")})
    good = Output(3, 0, [1])
    ended = packed([large, odd, good], full)
    assert [output.final for output in ended] == [True, True, False]
    assert [output.finish for output in ended] == ["error", "error", None]
    assert "no memory" in (ended[0].error or "")
    assert "complex128" in (ended[1].error or "")
    assert ended[2] is good


@pytest.mark.parametrize(
    "value",
    [
        "text",
        ["x", 99, [1], b""],
        ["x", 11, [3], b"1234"],
        ["x", 11, [-1], b"1234"],
        ["x", 11, [2], [1, 0, 0, 0, 4]],
    ],
)
def test_what_is_no_tensor_is_refused(value: Any):
    """A rank that lies about its arrays broke the wire."""
    memory = Memory()
    memory.place(np.zeros(4, np.uint8))
    with pytest.raises(ProtocolError):
        unpack([Output(1, arrays={"x": value})], memory.view)


def test_numbers_of_numpy_become_python_s():
    """In statistics, events and results of calls."""
    said = {"a": np.int64(3), "b": [np.float32(0.5), {"c": np.arange(2)}], "d": b"x", "e": None}
    assert plain(said) == {"a": 3, "b": [0.5, {"c": [0, 1]}], "d": b"x", "e": None}
    with pytest.raises(TypeError, match="object"):
        plain([object()])
