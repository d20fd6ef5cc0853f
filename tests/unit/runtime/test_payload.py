# SPDX-License-Identifier: Apache-2.0
"""Payloads: what of a message travels inside its frame, and what through shared memory."""

from __future__ import annotations

import datetime
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from actorserve import Actor, ActorRef, Message, Process
from actorserve.errors import ActorserveError, BootError, InvalidArgument, ProtocolError
from actorserve.runtime.message import reply_type
from actorserve.runtime.naming import name_of, resolve
from actorserve.runtime.payload import (
    Packed,
    is_small,
    pack,
    pack_message,
    packed_of,
    parcel_of,
    unpack,
    unpack_message,
)
from actorserve.runtime.spec import ActorSpec, spec_of
from actorserve.wire.actors import Parcel, WireArray, decode_from_actor, decode_to_actor
from actorserve.wire.messages import Handle


class Door:
    """Makes references, as a system's door does."""

    def ref(self, number: int, name: str) -> ActorRef:
        return ActorRef(self, number, name)  # type: ignore[arg-type]


DOOR: Any = Door()


@dataclass
class Point:
    x: int
    y: float


class Pair(msgspec.Struct):
    left: int
    right: str


class Everything(Message["list[Point]"]):
    numbers: list[int]
    when: datetime.datetime
    point: Point
    pair: Pair
    array: np.ndarray[Any, Any]
    typed: npt.NDArray[np.float32]
    ref: ActorRef
    maybe: ActorRef | None = None
    anything: Any = None


def through(value: Any, expected: Any) -> Any:
    """Send a value as to another process."""
    packed = pack(value, DOOR)
    parcel = parcel_of(packed, place)
    data = msgspec.msgpack.encode(parcel)
    return unpack(packed_of(msgspec.msgpack.decode(data, type=Parcel), view), expected, DOOR)


_placed: dict[int, npt.NDArray[np.uint8]] = {}


def place(array: npt.NDArray[Any]) -> Handle:
    """Keep an array under a number, as an arena does."""
    number = len(_placed) + 1
    _placed[number] = np.frombuffer(array.tobytes(), np.uint8)
    return Handle(1, number, 0, 0, array.nbytes)


def view(handle: Handle) -> npt.NDArray[Any]:
    """Return what is kept."""
    return _placed[handle.block]


def test_a_message_with_everything_in_it_arrives():
    """Fields of all kinds, arrays of any size anywhere in it."""
    message = Everything(
        numbers=[1, 2],
        when=datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc),
        point=Point(1, 2.5),
        pair=Pair(1, "r"),
        array=np.arange(5),
        typed=np.ones((300, 200), np.float32),
        ref=DOOR.ref(7, "müller"),
        anything={"deep": [np.zeros(2000), np.float64(3.5), np.bool_(True), DOOR.ref(9, "")]},
    )
    packed = pack_message(message, DOOR)
    assert not is_small(packed)
    back = unpack_message(packed_of(parcel_of(packed, place), view), DOOR)
    assert isinstance(back, Everything)
    assert back.point == message.point
    assert back.pair == message.pair
    assert back.when == message.when
    np.testing.assert_array_equal(back.array, message.array)
    np.testing.assert_array_equal(back.typed, message.typed)
    assert (back.ref.id, back.ref.name) == (7, "müller")
    deep = back.anything["deep"]
    assert (deep[1], deep[2], deep[3].id) == (3.5, True, 9)
    assert deep[0].shape == (2000,)
    assert not back.array.flags.writeable


def test_small_values_stay_in_the_frame_and_large_ones_leave_it():
    """Up to 4 KiB an array, 16 KiB in all, the body's own bytes too."""
    for value, handles in [
        (np.zeros(512), 0),
        (np.zeros(513), 1),
        ([np.zeros(500)] * 4, 0),
        ([np.zeros(500)] * 5, 1),
        ("x" * 16_000, 0),
        ("x" * 17_000, 1),
        (np.zeros((0, 4)), 0),
    ]:
        packed = pack(value, DOOR)
        assert len(parcel_of(packed, place).handles()) == handles
        assert is_small(packed) == (handles == 0)


def test_the_type_of_an_answer_is_read_from_its_message():
    """Also where it is given as text, inherited, or not at all."""

    class Base(Message[dict[str, int]]):
        pass

    class Derived(Base):
        pass

    class Silent(Message):  # type: ignore[type-arg]
        pass

    assert reply_type(Everything) == list[Point]
    assert reply_type(Derived) == dict[str, int]
    assert reply_type(Silent) is Any
    assert through([Point(1, 2.0)], list[Point]) == [Point(1, 2.0)]


@pytest.mark.parametrize(
    "value",
    [object(), [lambda: 1], {"k": {1: object()}}, np.array([object()]), 1 << 70, {1j: 1}],
)
def test_what_cannot_travel_is_named(value: Any):
    """An error of ours; and the next value is not disturbed by it."""
    with pytest.raises(InvalidArgument, match="cannot be sent to another process"):
        pack([np.ones(3), value], DOOR)
    assert through([np.ones(2)], Any)[0].shape == (2,)


@pytest.mark.parametrize(
    "value",
    [
        np.ma.masked_array([1, 2], [0, 1]),  # its mask would be lost
        np.longdouble(1),
        np.datetime64(1, "ns"),  # its unit would be lost
        np.timedelta64(1, "ns"),
        np.datetime64("NaT", "D"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_lose_a_part_of_it_is_refused(value: Any):
    """In words that name it, and not as something else."""
    with pytest.raises(InvalidArgument, match="a masked array has a mask|numpy.* is neither"):
        pack([value], DOOR)


def test_scalars_of_numpy_are_plain_values():
    """Those that are."""
    values = [np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("ü"), np.uint64(2**64 - 1)]
    assert through(values, Any) == [1.5, -3, True, "ü", 2**64 - 1]
    assert through(np.datetime64("2020-01-02"), datetime.date) == datetime.date(2020, 1, 2)


@pytest.mark.parametrize(
    "array",
    [
        WireArray("<f8", (2,), b"1234567"),
        WireArray("<f8", (3,), b"x" * 16),
        WireArray("|O", (1,), b"x" * 8),
        WireArray("|V8", (1,), b"x" * 8),
        WireArray("nonsense", (1,), b"x" * 8),
        WireArray("<f8", (-1, 7), b"x" * 16),
        WireArray("|S0", (1,), b""),
    ],
)
def test_a_false_array_is_refused(array: WireArray):
    """Whatever of it is wrong: no pointer is ever taken out of foreign bytes."""
    with pytest.raises(ProtocolError):
        packed_of(Parcel("", b"\xc0", [array]), view)


def test_false_extensions_are_refused():
    """An index beyond the arrays, a short one, an unknown code, a reference without an id."""
    for code, data in [
        (1, b"\x05\0\0\0"),
        (1, b"\0"),
        (3, b""),
        (2, b"123"),
        (2, b"\0" * 8 + b"\xff"),
    ]:
        body = msgspec.msgpack.encode(msgspec.msgpack.Ext(code, data))
        with pytest.raises(ProtocolError):
            unpack(Packed("", body, []), Any, DOOR)


def test_only_messages_are_read_as_messages():
    """A name of something else, of nothing, or of a module that is not there."""
    for name in (
        "builtins:int",
        "os:system",
        "os:environ",
        f"{__name__}:Point",
        f"{__name__}:Nothing",
        "no_such_module:X",
        "",
        ":",
    ):
        with pytest.raises(ActorserveError):
            unpack_message(Packed(name, b"\x90", []), DOOR)


def test_names_lead_back_to_their_classes():
    """And only to them."""
    assert resolve(name_of(Everything)) is Everything
    with pytest.raises(BootError, match="has no 'Nothing'"):
        resolve(f"{__name__}:Nothing")
    with pytest.raises(BootError, match="there is no module 'no_such_module'"):
        resolve("no_such_module.inner:X")

    class Local:
        pass

    with pytest.raises(InvalidArgument, match="defined inside a function"):
        name_of(Local)


def test_a_main_module_without_a_file_is_a_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A notebook has none, `python -i script.py` takes it away, and in an archive it is none."""
    script = tmp_path / "script.py"
    script.touch()
    main = ModuleType("__main__")
    main.Act = type("Act", (Actor,), {"__module__": "__main__"})  # type: ignore[attr-defined]
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def spec() -> ActorSpec:
        return spec_of(DOOR, main.Act, (), {}, Process(), None)

    assert spec().class_name == name_of(main.Act) == "__main__:Act"
    main.__file__ = str(tmp_path / "app.pyz" / "__main__.py")
    with pytest.raises(InvalidArgument, match=r"defined in .*app.pyz/__main__.py, from which no"):
        spec()
    for text in ("<stdin>", None):
        main.__file__ = text
        with pytest.raises(InvalidArgument, match="defined in an interactive session"):
            spec()


def test_whatever_the_bytes_a_value_comes_out_or_an_error_of_ours():
    """Random bytes, and changed ones, into every decoder."""
    dice = random.Random(7)
    message = pack_message(
        Everything(
            [1],
            datetime.datetime.now(),
            Point(1, 1),
            Pair(1, ""),
            np.ones(3),
            np.ones(3, np.float32),
            DOOR.ref(1, "x"),
        ),
        DOOR,
    )
    assert isinstance(message.body, bytes)
    for _ in range(3000):
        data = bytearray(message.body)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        for body in (bytes(data), dice.randbytes(dice.randrange(40))):
            for expected in (Everything, Any, list[Point]):
                try:
                    unpack(Packed("", body, message.arrays), expected, DOOR)
                except ProtocolError:
                    pass
            for decode in (decode_to_actor, decode_from_actor):
                try:
                    decode(body)
                except ProtocolError:
                    pass


class Sends(np.ndarray):
    """An array that has something packed and unpacked of its own while it is packed itself."""

    inner: Any = None

    def reshape(self, *shape: Any, **options: Any) -> Any:
        if Sends.inner is None:
            Sends.inner = pack({"inner": np.array([7])}, DOOR)
            assert unpack(pack([np.array([8])], DOOR), list[np.ndarray], DOOR)[0][0] == 8
            with pytest.raises(InvalidArgument):
                pack([np.array([9]), object()], DOOR)
        return super().reshape(*shape, **options)


def test_a_value_packed_in_the_middle_of_another_has_its_own_arrays(monkeypatch):
    """As a finalizer or a signal handler does that sends."""
    monkeypatch.setattr(np, "ascontiguousarray", lambda array: array)
    arrays = [np.array([1]), np.array([2]).view(Sends), np.array([3])]
    Sends.inner = None
    outer = pack(arrays, DOOR)
    assert [each.tolist() for each in outer.arrays] == [[1], [2], [3]]
    assert [each.tolist() for each in Sends.inner.arrays] == [[7]]
    assert [each[0] for each in unpack(outer, list[np.ndarray], DOOR)] == [1, 2, 3]


class Curious(msgspec.Struct):
    """Sends something as soon as it is made."""

    first: Any
    sent: Any = None

    def __post_init__(self) -> None:
        self.sent = unpack(pack([np.array([5]), REF], DOOR), tuple[np.ndarray, ActorRef], DOOR)


REF = ActorRef(DOOR, 3, "other", None)  # type: ignore[arg-type]


def test_a_value_unpacked_in_the_middle_of_another_leaves_its_arrays():
    """As a `__post_init__` does that asks another actor."""
    body = pack([{"first": np.array([1])}, np.array([2]), {"first": np.array([3])}], DOOR)
    one, array, other = unpack(body, tuple[Curious, np.ndarray, Curious], DOOR)
    assert (one.first[0], array[0], other.first[0]) == (1, 2, 3)
    assert one.sent[0][0] == other.sent[0][0] == 5


class Choosy(msgspec.Struct):
    """Refuses what it is made of, with whatever error is asked for."""

    what: str

    def __post_init__(self) -> None:
        raise REFUSALS[self.what]


class Silent(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise KeyError("no text")


REFUSALS: dict[str, Exception] = {
    "ours": InvalidArgument("it is negative"),
    "theirs": KeyError("unknown"),
    "silent": Silent(),
}


@pytest.mark.parametrize(
    ("what", "text"),
    [("ours", "it is negative"), ("theirs", "unknown"), ("silent", "text cannot be had")],
)
def test_what_the_expected_type_raises_is_a_wrong_value(what: str, text: str):
    """Whoever reads an answer counts on ProtocolError; an error of this package is none."""
    with pytest.raises(ProtocolError, match=text):
        unpack(pack({"what": what}, DOOR), Choosy, DOOR)
