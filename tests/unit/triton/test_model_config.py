# SPDX-License-Identifier: Apache-2.0
"""The schema against the protocol's own, and the JSON form against protobuf's."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.protobuf import descriptor_pb2

from actorserve.errors import ConfigError
from actorserve.triton.config_json import (
    model_config_from_dict,
    model_config_from_json,
    model_config_to_dict,
    model_config_to_json,
)
from actorserve.triton.model_config import ModelConfig, ModelParameter, ModelVersionPolicy
from actorserve.triton.optimization_config import ModelRateLimiter
from actorserve.triton.proto_schema import INTEGER_RANGES, Field, Kind, schema_of, shortest_float32
from actorserve.triton.scheduling_config import ModelDynamicBatching, ModelQueuePolicy
from actorserve.triton.tensor_config import DataType, ModelInput, ModelWarmup
from actorserve.triton.text_format import parse_model_config


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


def client_proto() -> descriptor_pb2.FileDescriptorProto:
    """Return the .proto that tritonclient carries, without importing the client."""
    spec = importlib.util.find_spec("tritonclient")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("tritonclient is not installed")
    source = Path(spec.submodule_search_locations[0], "grpc", "model_config_pb2.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            serialized = ast.literal_eval(node.args[0])
            return descriptor_pb2.FileDescriptorProto.FromString(serialized)
    raise AssertionError("no descriptor in tritonclient's model_config_pb2.py")


def rows(proto: Any) -> dict[str, Any]:
    """Flatten a .proto: each field and each enum value by its qualified name."""
    out: dict[str, Any] = {}

    def walk(scope: Any, prefix: str, messages: Any) -> None:
        for enum in scope.enum_type:
            out[f"{prefix}{enum.name}"] = [(value.name, value.number) for value in enum.value]
        for message in messages:
            oneofs = [one.name for one in message.oneof_decl]
            for order, field in enumerate(message.field):
                oneof = oneofs[field.oneof_index] if field.HasField("oneof_index") else ""
                kind = (field.type, field.type_name.rpartition("inference.")[2], field.label)
                out[f"{prefix}{message.name}.{field.name}"] = (order, field.number, *kind, oneof)
            walk(message, f"{prefix}{message.name}.", message.nested_type)

    walk(proto, "", proto.message_type)
    return out


def test_schema_is_the_protocols(oracle: Any) -> None:
    """Every message, field, number, type, order, oneof and enum value is that of the .proto."""
    assert rows(oracle.proto) == rows(client_proto())


def test_message_without_field_numbers_is_refused() -> None:
    """A Struct that states no field numbers is a mistake of whoever wrote it."""

    class Bare(msgspec.Struct):
        name: str = ""

    with pytest.raises(TypeError, match="has no field number"):
        schema_of(Bare)


def test_all_fields_are_written_in_order() -> None:
    """The JSON form of an empty configuration has every field but absent messages."""
    assert list(model_config_to_dict(ModelConfig())) == [
        "name",
        "platform",
        "backend",
        "runtime",
        "max_batch_size",
        "input",
        "output",
        "batch_input",
        "batch_output",
        "instance_group",
        "default_model_filename",
        "cc_model_filenames",
        "metric_tags",
        "parameters",
        "model_warmup",
    ]


def test_json_form_has_names_numbers_and_empties() -> None:
    """Enums are names, 64-bit integers numbers, and empty values are there."""
    config = ModelConfig(
        name="m",
        version_policy=ModelVersionPolicy(specific=ModelVersionPolicy.Specific(versions=[1 << 60])),
        input=[ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=[-1, 4])],
        dynamic_batching=ModelDynamicBatching(
            priority_queue_policy={
                3: ModelQueuePolicy(timeout_action=ModelQueuePolicy.TimeoutAction.DELAY)
            }
        ),
        parameters={"key": ModelParameter(string_value="value")},
    )
    value = json.loads(model_config_to_json(config))
    assert value["version_policy"] == {"specific": {"versions": [1 << 60]}}
    assert value["input"] == [
        {
            "name": "x",
            "data_type": "TYPE_FP32",
            "format": "FORMAT_NONE",
            "dims": [-1, 4],
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": False,
            "is_non_linear_format_io": False,
        }
    ]
    assert value["dynamic_batching"]["priority_queue_policy"]["3"]["timeout_action"] == "DELAY"
    assert value["parameters"] == {"key": {"string_value": "value"}}
    assert value["metric_tags"] == {}


def test_python_keyword_is_a_field() -> None:
    """The field that Python cannot spell keeps its name outside."""
    text = "instance_group { rate_limiter { resources { name: 'r' global: true } } }"
    config = parse_model_config(text, "f")
    limiter = config.instance_group[0].rate_limiter
    assert limiter == ModelRateLimiter(
        resources=[ModelRateLimiter.Resource(name="r", global_=True)]
    )
    written = model_config_to_dict(config)["instance_group"][0]["rate_limiter"]["resources"][0]
    assert written == {"name": "r", "global": True, "count": 0}


def test_members_of_a_oneof_know_whether_they_are_there() -> None:
    """A member that is set to its default is written; one that is absent is not."""
    config = parse_model_config(
        "model_warmup { inputs { key: 'x' value { zero_data: false } } }", "f"
    )
    inputs = config.model_warmup[0].inputs
    assert inputs == {"x": ModelWarmup.Input(zero_data=False)}
    written = model_config_to_dict(config)["model_warmup"][0]["inputs"]["x"]
    assert written == {"data_type": "TYPE_INVALID", "dims": [], "zero_data": False}
    assert model_config_from_dict(model_config_to_dict(config), "f") == config


class JsonWriter:
    """Writes random proto3 JSON by the schema; with slips, wrong values now and then."""

    def __init__(self, rng: random.Random, slips: float) -> None:
        self._rng = rng
        self._slips = slips

    def message(self, message: Any, depth: int = 0) -> Any:
        """Write one message."""
        if self._slip():
            return self._rng.choice(("x", 1))
        fields = list(schema_of(message).fields.values())
        count = min(len(fields), self._rng.randrange(0, 7 if depth else 12))
        out: dict[str, Any] = {}
        chosen: set[str] = set()
        for field in self._rng.sample(fields, count):
            if field.oneof and field.oneof in chosen and not self._slip():
                continue
            chosen.add(field.oneof)
            name = self._rng.choice((field.name, field.json_name)) + "x" * self._slip()
            out[name] = None if self._rng.random() < 0.05 else self._field(field, depth)
        return out

    def _slip(self) -> bool:
        return self._rng.random() < self._slips

    def _field(self, field: Field, depth: int) -> Any:
        if field.entry is not None:
            key, value = field.entry.fields["key"], field.entry.fields["value"]
            is_text = key.kind is Kind.STRING
            names = ["a", "é", ""] if is_text else ["0", "7", str((1 << 64) - 1)]
            if self._slip() and not is_text:
                names.append("-1")
            return {n: self._single(value, depth) for n in names if self._rng.random() < 0.5}
        if field.is_repeated:
            if self._slip():
                return self._rng.choice((1, "x", {}, [None]))
            return [self._single(field, depth) for _ in range(self._rng.randrange(3))]
        return self._single(field, depth)

    def _single(self, field: Field, depth: int) -> Any:
        if field.kind is Kind.MESSAGE:
            return self.message(field.of, depth + 1)
        if self._slip():
            # Protobuf's own reader takes True and 1.5 for enums, and True for floats; we do not.
            is_strict = field.kind not in (Kind.ENUM, Kind.FLOAT, Kind.DOUBLE)
            return self._rng.choice(("yes", {}, [1], *((True, 1.5, -(1 << 70)) * is_strict)))
        if field.kind is Kind.ENUM:
            value = self._rng.choice(list(field.of or ()))
            return self._rng.choice((value.name, int(value), str(int(value))))
        if field.kind in INTEGER_RANGES:
            least, greatest = INTEGER_RANGES[field.kind]
            number = self._rng.choice((0, 1, least, greatest, self._rng.randint(least, greatest)))
            return self._rng.choice((number, str(number), float(7)))
        if field.kind is Kind.BOOL:
            return self._rng.choice((True, False))
        if field.kind is Kind.STRING:
            return self._rng.choice(("", "a", "é\U0001f600", "\x00\n"))
        return self._rng.choice((0, 1.5, -2e-3, 0.1, "NaN", "Infinity", "-Infinity", "2.5", "1e3"))


@pytest.mark.parametrize(("seed", "slips"), [(1, 0.0), (2, 0.0), (3, 0.03), (4, 0.03)])
def test_random_json_means_the_same_to_protobuf(oracle: Any, seed: int, slips: float) -> None:
    """JSON in both spellings gives protobuf's values, or is refused by both."""
    rng = random.Random(seed)
    outcomes = set()
    for _ in range(120):
        text = json.dumps(JsonWriter(rng, slips).message(ModelConfig))
        expected = oracle.read_json(text)
        try:
            got = model_config_to_dict(model_config_from_json(text, "f"))
        except ConfigError as error:
            assert str(error).startswith("f: "), error
            got = None
        assert encoded(got) == encoded(expected), text
        outcomes.add(expected is None)
    assert outcomes == ({False} if slips == 0 else {False, True})


def test_written_json_is_read_back(oracle: Any) -> None:
    """What the writer writes is what both readers read."""
    rng = random.Random(9)
    for _ in range(60):
        config = model_config_from_dict(JsonWriter(rng, 0.0).message(ModelConfig), "f")
        text = model_config_to_json(config)
        again = model_config_from_json(text, "f")
        assert model_config_to_json(again) == text
        assert encoded(oracle.read_json(text.decode())) == encoded(model_config_to_dict(config))


def encoded(value: Any) -> str:
    """Make JSON values comparable: 1.0 is 1, the order of names is none."""
    integral = json.loads(
        json.dumps(value), parse_float=lambda x: int(float(x)) if float(x) % 1 == 0 else float(x)
    )
    return json.dumps(integral, sort_keys=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"input": [{"naem": "x"}]}', "input[0]: ModelInput has no field 'naem' (did you mean"),
        ('{"max_batch_size": "x"}', "max_batch_size: expected an integer from -2147483648 to"),
        ('{"maxBatchSize": 1, "max_batch_size": 1}', "ModelConfig has 'max_batch_size' twice"),
        ('{"name": "a", "name": "b"}', "'name' is given twice in one object"),
        ('{"name": 1}', "name: expected a string, got 1"),
        ('{"name": "\\ud800"}', "name: expected a string of whole characters"),
        ('{"input": [null]}', "input[0]: expected an object, got None"),
        ('{"input": {}}', "input: expected a list, got a dict"),
        (
            '{"input": [{"data_type": "FP32"}]}',
            "input[0].data_type: expected a value of DataType (did you mean 'TYPE_FP32'?), "
            "got 'FP32'",
        ),
        ('{"input": [{"data_type": 99}]}', "input[0].data_type: expected a value of DataType"),
        ('{"parameters": {"k": {"value": ""}}}', "parameters['k']: ModelParameter has no field"),
        (
            '{"dynamic_batching": {}, "sequence_batching": {}}',
            "ModelConfig has both 'dynamic_batching' and 'sequence_batching': "
            "only one scheduling_choice is allowed",
        ),
        (
            '{"sequence_batching": {"direct": {"minimum_slot_utilization": NaN}}}',
            'NaN is no JSON: write it in quotes, "NaN"',
        ),
        (
            '{"sequence_batching": {"direct": {"minimum_slot_utilization": 1e39}}}',
            "sequence_batching.direct.minimum_slot_utilization: expected a number (float), got 1e",
        ),
        ("[]", "expected an object, got a list"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[" * 100_000, "the JSON is nested too deep"),
        ('{"max_batch_size": ' + "9" * 5000 + "}", ""),
        ('{"version_policy": {"latest": {"num_versions": -1}}}', "version_policy.latest.num"),
    ],
)
def test_wrong_json_says_where_and_what(text: str, message: str) -> None:
    """An error names the source, the path and what was expected."""
    with pytest.raises(ConfigError) as caught:
        model_config_from_json(text, "override")
    assert str(caught.value).startswith(f"override: {message}")


def test_json_that_is_no_utf8_is_refused() -> None:
    """Bytes that are not UTF-8 are an error, not a crash."""
    with pytest.raises(ConfigError, match=r"^override: "):
        model_config_from_json(b'{"name": "\xff"}', "override")


def test_null_means_the_default() -> None:
    """A field that is null is as if it were not there, also for the choice in a oneof."""
    config = model_config_from_json(
        '{"name": null, "input": null, "dynamic_batching": null, "sequence_batching": {}}', "f"
    )
    assert (config.name, config.input, config.dynamic_batching) == ("", [], None)
    assert config.sequence_batching is not None


def test_integers_may_be_written_as_whole_numbers() -> None:
    """A number with a point or an exponent is an integer if it is one, in quotes or not."""
    for text in ("1000", '"1000"', "1000.0", "1e3", '"1000.0"', '"1e3"'):
        assert model_config_from_json(f'{{"maxBatchSize": {text}}}', "f").max_batch_size == 1000
    for text in ("1.5", '"1.5"', "true", '" 1"', '"1_0"', '"0x1"', '""'):
        with pytest.raises(ConfigError, match="expected an integer"):
            model_config_from_json(f'{{"maxBatchSize": {text}}}', "f")


@pytest.mark.parametrize("value", [0.1, 1.5, 3.4028234663852886e38, 1e-30, 16777216.0, -2.5e-3])
def test_floats_are_shown_by_their_shortest_form(value: float) -> None:
    """The shortest number that stands for a float32 is found from what 32 bits hold."""
    import numpy as np

    assert shortest_float32(float(np.float32(value))) == float(str(np.float32(value)))
