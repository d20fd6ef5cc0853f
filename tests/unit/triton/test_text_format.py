# SPDX-License-Identifier: Apache-2.0
"""The text reader against protobuf's own, and the errors that it gives."""

from __future__ import annotations

import json
import math
import random
from typing import Annotated, Any

import msgspec
import pytest

from actorserve.errors import ConfigError
from actorserve.triton.config_json import model_config_to_dict
from actorserve.triton.model_config import ModelConfig, ModelInstanceGroup
from actorserve.triton.proto_schema import INTEGER_RANGES, Field, Kind, Schema, schema_of
from actorserve.triton.tensor_config import DataType
from actorserve.triton.text_format import MAX_DEPTH, parse, parse_model_config

EXAMPLE = """
# An example with most of what people write.
name: "add_sub"
backend: 'python'
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 4 ] },
  { name: "INPUT1", data_type: TYPE_STRING; dims: 4 dims: 0x10, reshape < shape: [] > }
]
output: { name: "OUT" "PUT0" data_type: TYPE_FP16 dims: [ 4 ] }
instance_group [ { count: 2 kind: KIND_CPU } ]
version_policy: { specific: { versions: [1, 3] } }
parameters: { key: "EXECUTE_TIMEOUT_S" value: { string_value: "5" } }
parameters [ { key: "a" }, { key: "a" value { string_value: "last" } } ]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  priority_queue_policy { key: 2 value { timeout_action: DELAY } }
}
model_transaction_policy { decoupled: True };
"""


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


class Tree(msgspec.Struct, kw_only=True):
    """A message that holds itself."""

    child: Annotated[Tree | None, 1] = None


class TextWriter:
    """Writes random texts by the schema, in every style that the grammar allows.

    With a number of slips, something that is wrong in the grammar or in the schema is written
    now and then.
    """

    def __init__(self, rng: random.Random, slips: float = 0.0) -> None:
        self._rng = rng
        self._slips = slips

    def message(self, schema: Schema, depth: int = 0) -> str:
        """Write the fields of one message."""
        names = list(schema.fields)
        count = min(len(names), self._rng.randrange(0, 7 if depth else 12))
        chosen: set[str] = set()
        parts = []
        for name in self._rng.sample(names, count):
            field = schema.fields[name]
            if field.oneof and field.oneof in chosen and not self._slip():
                continue
            chosen.add(field.oneof)
            parts.append(self._field(field, depth))
            if (field.is_repeated and self._rng.random() < 0.3) or self._slip():
                parts.append(self._field(field, depth))
        return "".join(parts)

    def _slip(self) -> bool:
        return self._rng.random() < self._slips

    def _space(self) -> str:
        return self._rng.choice((" ", " ", "\n", "\t ", "\r\n", "  # a 'comment\" }\n", " \f\v "))

    def _field(self, field: Field, depth: int) -> str:
        is_message = field.kind is Kind.MESSAGE
        colon = "" if is_message and self._rng.random() < 0.5 else self._rng.choice((":", " : "))
        if self._slip():
            colon = self._rng.choice(("", "::", "="))
        if field.is_repeated and self._rng.random() < 0.5:
            values = [self._value(field, depth) for _ in range(self._rng.randrange(4))]
            comma = " " if self._slip() else self._rng.choice((",", " ,\n"))
            value = f"[{self._space()}{comma.join(values)}]"
        else:
            value = self._value(field, depth)
        name = field.name + ("x" if self._slip() else "")
        end = self._rng.choice((",", ";", "", "")) + self._space()
        return f"{name}{colon}{self._space() if self._rng.random() < 0.3 else ' '}{value}{end}"

    def _value(self, field: Field, depth: int) -> str:
        if field.kind is Kind.MESSAGE:
            opening, closing = self._rng.choice(("{}", "<>"))
            if self._slip():
                closing = self._rng.choice(("}", ">", "", "]"))
            schema = field.entry or schema_of(field.of)
            return f"{opening}{self._space()}{self.message(schema, depth + 1)}{closing}"
        kind = self._rng.choice(list(_SCALARS)) if self._slip() else field.kind
        if field.kind is Kind.ENUM and kind in INTEGER_RANGES:
            kind = Kind.STRING  # a number that an enum lacks: protobuf takes it, we do not
        return _SCALARS[kind](self._rng, field, self._slip())


def _integer_text(rng: random.Random, field: Field, slip: bool) -> str:
    least, greatest = INTEGER_RANGES.get(field.kind, (0, 9))
    value = rng.choice((0, 1, 7, least, greatest, rng.randint(least, greatest)))
    if slip:
        value = rng.choice((least - 1, greatest + 1))
    sign, size = ("-", -value) if value < 0 else (rng.choice(("", "", "+")), value)
    sign = "" if sign == "+" and size >= 8 else sign
    return rng.choice((f"{sign}{size}", f"{sign}0x{size:x}", f"{sign}0X{size:X}")) + "." * slip


def _float_text(rng: random.Random, field: Field, slip: bool) -> str:
    number = rng.choice(
        (0.1, 1.5, -2e-3, 1e30, 3.4028235677973366e38, 1e39, rng.uniform(-1e6, 1e6))
    )
    special = ("inf", "-inf", "nan", "Infinity", "-INF", "NaNf", "inff", "1.", ".5", "1e5", "2f")
    text = rng.choice((*special, repr(number), repr(number) + "f", f"{number:.3e}f", "17", "-17"))
    return text + ("x" if slip else "")


def _string_text(rng: random.Random, field: Field, slip: bool) -> str:
    def piece() -> str:
        quote = rng.choice("'\"")
        inside = "".join(
            rng.choice(
                ("a", "Z", " ", "é", "\U0001f600", "#", "{", "\\n", "\\\\", "\\'", '\\"', "\\x4")
                + ("\\x41", "\\101", "\\0", "\\u00e9", "\\U0001F600", "\\xc3\\xa9", "\\t\\a\\v")
                + (("\\ud800", "\\777", "\\xff", "\n", quote) if slip else ())
            )
            for _ in range(rng.randrange(6))
        )
        return f"{quote}{inside}{quote}"

    return rng.choice((" ", "", "\n", "  # 'x\n")).join(
        piece() for _ in range(rng.choice((1, 1, 3)))
    )


def _enum_text(rng: random.Random, field: Field, slip: bool) -> str:
    if field.of is None:
        return "TYPE_FP32"
    value = rng.choice(list(field.of))
    return rng.choice((value.name, value.name, str(int(value)), hex(value))) + "X" * slip


def _bool_text(rng: random.Random, field: Field, slip: bool) -> str:
    good = ("true", "True", "t", "1", "false", "False", "f", "0")
    return rng.choice(("TRUE", "yes", "2", "01", '"true"') if slip else good)


_SCALARS: dict[Kind, Any] = {
    **dict.fromkeys(INTEGER_RANGES, _integer_text),
    Kind.FLOAT: _float_text,
    Kind.DOUBLE: _float_text,
    Kind.STRING: _string_text,
    Kind.BOOL: _bool_text,
    Kind.ENUM: _enum_text,
}


def ours(text: str | bytes) -> dict[str, Any] | None:
    """Return what our reader makes of a text, None for a refusal."""
    try:
        config = parse_model_config(text, "f")
    except ConfigError as error:
        assert str(error).startswith("f:"), error
        return None
    return model_config_to_dict(config)


def same(one: Any, other: Any) -> bool:
    """Compare JSON values; as text, -0.0 is not 0.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def test_reads_what_people_write() -> None:
    """A file in the usual styles gives the values that it states."""
    config = parse_model_config(EXAMPLE, "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == ("add_sub", "python", 8)
    assert [one.dims for one in config.input] == [[-1, 4], [4, 16]]
    assert config.input[1].reshape is not None and config.input[1].reshape.shape == []
    assert config.output[0].name == "OUTPUT0"
    assert config.output[0].data_type is DataType.TYPE_FP16
    assert config.instance_group[0].kind is ModelInstanceGroup.Kind.KIND_CPU
    assert config.version_policy is not None and config.version_policy.latest is None
    assert config.parameters["a"].string_value == "last"
    assert config.is_decoupled


def test_example_means_the_same_to_protobuf(oracle: Any) -> None:
    """The same file gives the same values through protobuf."""
    assert same(ours(EXAMPLE), oracle.read_text(EXAMPLE))
    assert same(ours(EXAMPLE.encode()), oracle.read_text(EXAMPLE.encode()))


@pytest.mark.parametrize("seed", range(3))
def test_random_texts_mean_the_same_to_protobuf(oracle: Any, seed: int) -> None:
    """Texts in every style of the grammar give the same values through protobuf."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(100):
        text = TextWriter(rng).message(schema_of(ModelConfig))
        expected = oracle.read_text(text)
        accepted += expected is not None
        assert same(ours(text), expected), text
    assert accepted > 70


@pytest.mark.parametrize("seed", range(3))
def test_wrong_texts_are_refused_when_protobuf_refuses_them(oracle: Any, seed: int) -> None:
    """Texts with slips are refused by both readers, or mean the same to both."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(150):
        text = TextWriter(rng, slips=0.04).message(schema_of(ModelConfig))
        expected = oracle.read_text(text)
        refused += expected is None
        assert same(ours(text), expected), text
    assert refused > 50


def test_cut_and_garbled_texts_never_surprise(oracle: Any) -> None:
    """Whatever is cut out of a file or put into it, both readers agree, and errors have a place."""
    rng = random.Random(7)
    for _ in range(300):
        text = EXAMPLE
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(text))
            cut = rng.randrange(0, 9)
            text = text[:at] + rng.choice(
                ("", "", "{", "}", "]", '"', "#", ":", "é", "-", ".", "/")
            )
            text += EXAMPLE[at + cut :]
        assert same(ours(text), oracle.read_text(text)), text


@pytest.mark.parametrize(
    "text",
    [
        'name: "a" name: "b"',
        'parameters { key: "a" key: "b" }',
        "dynamic_batching {} dynamic_batching {}",
        "dynamic_batching {} sequence_batching {}",
        'model_warmup { inputs { key: "a" value { zero_data: false zero_data: false } } }',
        "max_batch_size: 2147483648",
        "max_batch_size: 08",
        "max_batch_size: 1.0",
        "max_batch_size: [1]",
        "input { dims [1] }",
        "input [{},]",
        'name: "a",,',
        'name: "\\xff"',
        'name: "\\777"',
        'name: "\\ud83d\\ude00"',
        'name: "a\nb"',
        "name: 'a",
        "input { name: 'a' >",
        "1: 'a'",
        "\ufeffname: 'a'",
        b"\xef\xbb\xbfname: 'a'",
        b"name: '\xff'",
    ],
)
def test_refused_by_both(oracle: Any, text: str | bytes) -> None:
    """What protobuf refuses, each for its own reason, is refused here."""
    assert oracle.read_text(text) is None
    assert ours(text) is None


@pytest.mark.parametrize(
    "text",
    [
        'name: "" name: "b"',
        "max_batch_size: 0, max_batch_size: 4;",
        'parameters { key: "" key: "b" }',
        "max_batch_size: " + "0" * 100 + "7",
        'name: "a"runtime: "b"',
        'name:\u00a0"a"',
        'name: "\x00\t"',
        "sequence_batching { direct { minimum_slot_utilization: 1e39 } }",
        "",
        "# nothing",
    ],
)
def test_accepted_by_both(oracle: Any, text: str) -> None:
    """What protobuf lets pass, however odd, means the same here."""
    assert oracle.read_text(text) is not None
    assert same(ours(text), oracle.read_text(text))


@pytest.mark.parametrize(
    "text",
    [
        "max_batch_size: 1_0",
        "max_batch_size: 0b1",
        'name: "\\q"',
        'name: "\\N{BULLET}"',
        "input { data_type: 99 }",
        "sequence_batching { direct { minimum_slot_utilization: 1ff } }",
        "sequence_batching { direct { minimum_slot_utilization: 010 } }",
    ],
)
def test_slack_beyond_the_grammar_is_refused(text: str) -> None:
    """What only one implementation lets pass, and the reference server does not, is an error."""
    assert ours(text) is None


def test_escaped_question_mark_is_the_mark() -> None:
    """The escape of a question mark, which the grammar has, is read."""
    assert parse_model_config('name: "a\\?"', "f").name == "a?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name: "a"\n  nmae: "b"', "f:2:3: ModelConfig has no field 'nmae' (did you mean 'name'?)"),
        ("input {\n dims: x }", "f:2:8: dims: expected an integer (int64), found 'x'"),
        (
            "max_batch_size: -2147483649",
            "f:1:17: max_batch_size: out of range for int32: "
            "expected -2147483648 to 2147483647, found '-2147483649'",
        ),
        (
            "input { data_type: TYPE_F32 }",
            "f:1:20: data_type: expected a value of DataType (did you mean 'TYPE_FP32'?), "
            "found 'TYPE_F32'",
        ),
        ('name "a"', "f:1:6: expected ':' after 'name'"),
        (
            'name: "a',
            "f:1:7: name: expected a string in quotes, found a string without its closing",
        ),
        (
            'name: "a"\n "\\q"',
            "f:2:2: name: unknown escape \\q in a string, found '\"\\\\q\"'",
        ),
        ("input { ", "f:1:9: expected a field of ModelInput or '}', found the end of the text"),
        ("version_policy { all }", "f:1:22: expected '{' to open 'all', found '}'"),
        ("input { dims: [1 2] }", "f:1:18: expected ',' between the values of 'dims', or ']'"),
        (
            "dynamic_batching {}\nsequence_batching {}",
            "f:2:1: ModelConfig has both 'dynamic_batching' and 'sequence_batching': "
            "only one scheduling_choice is allowed",
        ),
        ("[type.googleapis.com/x] {}", "f:1:1: extensions and Any values"),
        ("\x01", "f:1:1: expected a field of ModelConfig, found the character U+0001"),
        ("metric_tags { kye: 'a' }", "f:1:15: ModelConfig.MetricTagsEntry has no field 'kye'"),
    ],
)
def test_errors_say_where_and_what(text: str, message: str) -> None:
    """An error begins with file, line and column and says what was expected."""
    with pytest.raises(ConfigError) as caught:
        parse_model_config(text, "f")
    assert str(caught.value).startswith(message)


def test_bytes_that_are_no_utf8_have_a_place() -> None:
    """An error about the encoding says at which line and column it is."""
    with pytest.raises(ConfigError, match=r"^f:2:4: the text is not UTF-8: byte 0xff$"):
        parse_model_config("# é\n é \xff".encode("latin-1").replace(b"\xe9", b"\xc3\xa9"), "f")


def test_nesting_has_a_limit() -> None:
    """Messages nest to the limit and not beyond it, and never exhaust the stack."""
    parse("child {" * (MAX_DEPTH - 1) + "}" * (MAX_DEPTH - 1), Tree, "f")
    with pytest.raises(ConfigError, match="nested more than 100 deep"):
        parse("child {" * 100_000, Tree, "f")


def test_large_literals_are_quick() -> None:
    """Very many digits, backslashes or an unclosed string neither hang nor crash."""
    many = 1 << 16
    assert ours("max_batch_size: " + "9" * many) is None
    assert ours("name: '" + "\\\\" * many + "'") is not None
    assert ours("name: '" + "\\\\" * many) is None


def test_floats_are_rounded_to_their_width() -> None:
    """A float has the value that 32 bits can hold, and is shown by its shortest form."""
    config = parse_model_config(
        "sequence_batching { direct { minimum_slot_utilization: 0.1 } }", "f"
    )
    assert config.sequence_batching is not None and config.sequence_batching.direct is not None
    value = config.sequence_batching.direct.minimum_slot_utilization
    assert value != 0.1 and math.isclose(value, 0.1, rel_tol=1e-7)
    shown = model_config_to_dict(config)["sequence_batching"]["direct"]
    assert shown["minimum_slot_utilization"] == 0.1
