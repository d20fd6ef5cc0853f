# SPDX-License-Identifier: Apache-2.0
"""Messages and their codec: what is sent arrives, and only on its road."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, Union

import msgspec
import pytest

from actorserve.errors import ProtocolError
from actorserve.wire import codec, messages

ROADS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "to a stub": (messages.ToStub, codec.decode_to_stub),
    "to the supervisor": (messages.ToSupervisor, codec.decode_to_supervisor),
    "of the boot socket": (messages.OnBootSocket, codec.decode_on_boot_socket),
}
KINDS = [(road, kind) for road, (union, _) in ROADS.items() for kind in typing.get_args(union)]

PLAIN: dict[Any, Any] = {
    int: 1 << 40,
    float: 2.5,
    str: "zażółć",
    bool: True,
    bytes: b"\x00\xff",
    types.NoneType: None,
}


def sample(hint: Any) -> Any:
    """Return a value of a field's type; of a union, one of the first type that is not None."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return sample(next(kind for kind in inner if kind is not types.NoneType))
    if origin is list:
        return [sample(inner[0])] * 2
    if origin is tuple:
        kinds = (inner[0], inner[0]) if inner[-1] is Ellipsis else inner
        return tuple(sample(kind) for kind in kinds)
    if origin is dict:
        return {sample(inner[0]): sample(inner[1])}
    return hint(**{name: sample(field) for name, field in typing.get_type_hints(hint).items()})


@pytest.mark.parametrize(("road", "kind"), KINDS)
def test_every_kind_arrives_as_it_was_sent(road: str, kind: Any) -> None:
    """A message of each kind is decoded to its equal."""
    message = sample(kind)
    assert ROADS[road][1](codec.encode(message)) == message


@pytest.mark.parametrize("kind", [kind for _, kind in KINDS])
def test_no_kind_is_taken_on_another_road(kind: Any) -> None:
    """A peer cannot send what is not its own to send."""
    data = codec.encode(sample(kind))
    for other, (union, decode) in ROADS.items():
        if kind not in typing.get_args(union):
            with pytest.raises(ProtocolError, match=f"no message {other}"):
                decode(data)


def test_tags_tell_all_kinds_apart() -> None:
    """No two kinds share a tag, on whichever road."""
    kinds = {kind for _, kind in KINDS}
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", [kind for _, kind in KINDS])
def test_messages_are_frozen(kind: Any) -> None:
    """What was received cannot be changed behind another reader's back."""
    message = sample(kind)
    for field in msgspec.structs.fields(message):
        with pytest.raises(AttributeError):
            setattr(message, field.name, None)


@pytest.mark.parametrize("kind", [kind for _, kind in KINDS])
def test_messages_travel_as_arrays(kind: Any) -> None:
    """No field names are on the wire."""
    assert isinstance(msgspec.msgpack.decode(codec.encode(sample(kind))), list)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x91\xcd\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000 + b"\x90",
        b"\x92\x0e\xa2\xff\xfe",
        b"\x92\x0e\xcf\xff\xff\xff\xff\xff\xff\xff\xff" * 2,
    ],
    ids=["empty", "reserved", "no tag", "unknown tag", "huge", "deep", "no UTF-8", "trailing"],
)
def test_nonsense_is_a_protocol_error(road: str, data: bytes) -> None:
    """Whatever the bytes, nothing but a ProtocolError that says how many there were."""
    with pytest.raises(ProtocolError, match=f"a frame of {len(data)} bytes is no message {road}"):
        ROADS[road][1](data)


def test_small_tensor_request_is_small_on_the_wire() -> None:
    """The frame of a one-float request stays far below a hundred bytes."""
    tensor = messages.WireTensor("INPUT0", 11, (1,), b"\x00\x00\x80\x3f")
    request = messages.WireRequest(1 << 60, "", [tensor], [])
    assert len(codec.encode(messages.Execute(1, [request]))) < 100
