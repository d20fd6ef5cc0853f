# SPDX-License-Identifier: Apache-2.0
"""Whatever the bytes, a decoder yields a value or the error that says it is none.

Row 79 and 83 of the fault matrix. Random, but seeded: a failure comes again.
"""

from __future__ import annotations

import random
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Union

import msgspec
import numpy as np
import pytest

from actorserve.errors import InvalidArgument, ProtocolError
from actorserve.wire import codec, messages
from actorserve.wire.tensors import (
    BytesError,
    check_bytes,
    decode_bytes,
    element_count,
    encode_bytes,
)

DECODERS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "to_stub": (messages.ToStub, codec.decode_to_stub),
    "to_supervisor": (messages.ToSupervisor, codec.decode_to_supervisor),
    "on_boot_socket": (messages.OnBootSocket, codec.decode_on_boot_socket),
}
INTS = [0, 1, 127, 128, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, -1, -33, -(1 << 63)]
TEXTS = ["", "a", "zażółć", "\x00", "INPUT0", "x" * 300, "{}"]


def value(hint: Any, rng: random.Random) -> Any:
    """Return a random value of a field's type."""
    if hint is int:
        return rng.choice(INTS)
    if hint is float:
        return rng.choice([0.0, -1.5, float("inf")])
    if hint is str:
        return rng.choice(TEXTS)
    if hint is bool:
        return rng.random() < 0.5
    if hint is bytes:
        return rng.randbytes(rng.choice([0, 1, 4, 40]))
    if hint is types.NoneType:
        return None
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return value(rng.choice(inner), rng)
    if origin is list:
        return [value(inner[0], rng) for _ in range(rng.randrange(3))]
    if origin is tuple and inner[-1:] != (...,):
        return tuple(value(each, rng) for each in inner)
    if origin is tuple:
        return tuple(value(inner[0], rng) for _ in range(rng.randrange(4)))
    if origin is dict:
        return {value(inner[0], rng): value(inner[1], rng) for _ in range(rng.randrange(3))}
    return hint(**{n: value(field, rng) for n, field in typing.get_type_hints(hint).items()})


def frames(union: Any, rng: random.Random, each: int) -> Iterator[bytes]:
    """Yield encoded messages of every kind of a road, `each` times."""
    for kind in typing.get_args(union):
        for _ in range(each):
            yield codec.encode(value(kind, rng))


def decode(decoder: Callable[[bytes], Any], data: bytes) -> Any:
    """Return the message or None for a ProtocolError; anything else is a failure."""
    try:
        message = decoder(data)
    except ProtocolError as error:
        assert error.message
        return None
    assert isinstance(message, messages.Message)
    return message


@pytest.mark.parametrize("road", DECODERS)
def test_valid_messages_survive(road: str) -> None:
    """Random messages of every kind come back as they were."""
    union, decoder = DECODERS[road]
    rng = random.Random(1)
    for kind in typing.get_args(union):
        for _ in range(50):
            message = value(kind, rng)
            assert decoder(codec.encode(message)) == message


@pytest.mark.parametrize("road", DECODERS)
def test_truncated_messages_are_refused_at_every_offset(road: str) -> None:
    """No prefix of a message is a message."""
    union, decoder = DECODERS[road]
    for data in frames(union, random.Random(2), each=4):
        for end in range(len(data)):
            assert decode(decoder, data[:end]) is None


@pytest.mark.parametrize("road", DECODERS)
def test_flipped_bits_give_a_message_or_an_error(road: str) -> None:
    """One to eight flipped bits anywhere never raise anything else."""
    union, decoder = DECODERS[road]
    rng = random.Random(3)
    for data in frames(union, rng, each=8):
        for _ in range(100):
            broken = bytearray(data)
            for _ in range(rng.choice([1, 1, 2, 8])):
                broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
            decode(decoder, bytes(broken))


@pytest.mark.parametrize("road", DECODERS)
def test_spliced_messages_give_a_message_or_an_error(road: str) -> None:
    """Pieces of two messages put together never raise anything else."""
    union, decoder = DECODERS[road]
    rng = random.Random(4)
    pool = list(frames(union, rng, each=4))
    for _ in range(4000):
        one, two = rng.choice(pool), rng.choice(pool)
        decode(decoder, one[: rng.randrange(len(one) + 1)] + two[rng.randrange(len(two)) :])
        assert decode(decoder, one + two) is None


@pytest.mark.parametrize("road", DECODERS)
def test_random_bytes_give_a_message_or_an_error(road: str) -> None:
    """Noise, and noise behind a plausible head, never raises anything else."""
    _, decoder = DECODERS[road]
    rng = random.Random(5)
    for _ in range(10_000):
        noise = rng.randbytes(rng.randrange(64))
        decode(decoder, noise)
        decode(decoder, bytes([0x90 + rng.randrange(16), rng.randrange(40)]) + noise)


@pytest.mark.parametrize("road", DECODERS)
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\x81", b"\xdd\x00\x00\x00\x01"])
def test_deep_nesting_is_refused(road: str, opening: bytes) -> None:
    """A hundred thousand levels end in an error, at the top and inside a field."""
    _, decoder = DECODERS[road]
    for tag in range(40):
        data = bytes([0x9F, tag]) + b"\xa0" * (tag % 14) + opening * 100_000
        assert decode(decoder, data) is None
    assert decode(decoder, opening * 100_000 + b"\xc0") is None


@pytest.mark.parametrize("road", DECODERS)
def test_lengths_that_lie_are_refused_without_the_memory(road: str) -> None:
    """Headers that promise four billion elements or bytes are refused at once."""
    union, decoder = DECODERS[road]
    headers = [b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"]
    for data in frames(union, random.Random(6), each=1):
        for at in range(len(data)):
            for header in headers:
                decode(decoder, data[:at] + header + b"\xff\xff\xff\xff" + data[at:])


@pytest.mark.parametrize("road", DECODERS)
def test_wrong_types_in_any_field_are_refused(road: str) -> None:
    """A field of another type is an error, whichever field and type."""
    union, decoder = DECODERS[road]
    wrong: list[Any] = [None, 1.5, "x", b"x", [1], {"a": 1}, msgspec.msgpack.Ext(5, b"x"), 1 << 63]
    for data in frames(union, random.Random(7), each=2):
        fields = msgspec.msgpack.decode(data)
        for at in range(len(fields)):
            for bad in wrong:
                broken = [*fields[:at], bad, *fields[at + 1 :]]
                decode(decoder, msgspec.msgpack.encode(broken))


# --- BYTES and shapes ----------------------------------------------------------------------------


def decoded(data: bytes, count: int | None) -> list[bytes] | None:
    """Return the elements or None for an error, on which decoder and checker must agree."""
    try:
        elements = decode_bytes(data, count)
    except BytesError as error:
        assert 0 <= error.offset <= len(data)
        with pytest.raises(BytesError) as caught:
            check_bytes(data, count)
        assert (caught.value.kind, caught.value.index) == (error.kind, error.index)
        return None
    assert elements.dtype == np.object_
    assert elements.ndim == 1
    assert check_bytes(data, count) == len(elements)
    return typing.cast("list[bytes]", elements.tolist())


def test_random_bodies_decode_or_are_refused() -> None:
    """Noise that is small in its lengths, so that some of it is right."""
    rng = random.Random(8)
    right = 0
    for _ in range(20_000):
        data = b"".join(
            bytes([rng.randrange(4), 0, 0, 0]) + rng.randbytes(rng.randrange(4))
            for _ in range(rng.randrange(4))
        )
        elements = decoded(data, rng.choice([None, 0, 1, 2, 3]))
        if elements is not None:
            assert encode_bytes(elements) == data
            right += 1
    assert right > 500


def test_bodies_cut_anywhere_are_refused_or_shorter() -> None:
    """A prefix is a body only where it ends between two elements."""
    rng = random.Random(9)
    elements = [rng.randbytes(rng.randrange(20)) for _ in range(60)]
    data = encode_bytes(elements)
    ends = {0}
    for element in elements:
        ends.add(max(ends) + 4 + len(element))
    for end in range(len(data) + 1):
        assert (decoded(data[:end], None) is not None) == (end in ends)
        assert (decoded(data[:end], len(elements)) is not None) == (end == len(data))


def test_random_elements_survive_the_round_trip() -> None:
    """Every split of random elements into few and many, short and long."""
    rng = random.Random(10)
    for _ in range(200):
        longest = rng.choice([1, 20, 2000])
        elements = [
            rng.randbytes(rng.randrange(longest)) for _ in range(rng.choice([0, 1, 31, 33, 300]))
        ]
        assert decoded(encode_bytes(elements), len(elements)) == elements


def test_random_shapes_are_counted_or_refused() -> None:
    """A shape that is accepted can be made into an array's, as far as its size goes."""
    rng = random.Random(11)
    extents = [0, 1, 2, 3, 2**16, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -1, -(2**63)]
    for _ in range(20_000):
        shape = [rng.choice(extents) for _ in range(rng.choice([0, 1, 2, 3, 5, 66]))]
        try:
            count = element_count(shape)
        except InvalidArgument:
            continue
        assert 0 <= count < 2**63
        if count == 0:
            assert np.empty(shape, np.float64).size == 0
