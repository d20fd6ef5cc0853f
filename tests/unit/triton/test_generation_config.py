# SPDX-License-Identifier: Apache-2.0
"""Entries that name the backend "generation": completed tensors, and parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorserve.errors import ConfigError
from actorserve.triton.config_completion import complete
from actorserve.triton.config_json import model_config_from_json, model_config_to_json
from actorserve.triton.config_support import unsupported
from actorserve.triton.config_validation import validate
from actorserve.triton.generation_parameters import (
    PARAMETERS,
    GenerationParameters,
    read_generation_parameters,
)
from actorserve.triton.generation_tensors import INPUTS, OUTPUTS
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.model_info import model_info
from actorserve.triton.text_format import parse_model_config

HEAD = 'backend: "generation"\n'


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


def done(text: str = "") -> ModelConfig:
    """Read a text and fill in the defaults of a model called m."""
    return complete(parse_model_config(HEAD + text, "config.pbtxt"), "m", has_model_py=False)


def parameter(name: str, value: str) -> str:
    """Return a parameter in config.pbtxt's words."""
    return f"parameters {{ key: '{name}' value: {{ string_value: '{value}' }} }}\n"


def read(*texts: str, folder: Path = Path("/models/m")) -> GenerationParameters:
    """Read the parameters of a model's version 1."""
    return read_generation_parameters(done("".join(texts)), str(folder), str(folder / "1"))


def test_all_tensors_and_the_policy_are_filled_in() -> None:
    """The configuration is valid and says what clients see."""
    config = done()
    validate(config)
    assert unsupported(config, is_python_based=True) == ([], [])
    info = model_info(config, 1, [1])
    assert info.platform == "generation"
    assert info.decoupled
    assert [each.name for each in info.inputs] == [each.name for each in INPUTS]
    assert [each.name for each in info.outputs] == [each.name for each in OUTPUTS]
    assert all(each.optional for each in info.inputs)
    shapes = {each.name: (each.datatype, each.shape) for each in info.inputs}
    assert shapes["text_input"] == ("BYTES", (1,))
    assert shapes["input_ids"] == ("INT32", (-1,))
    assert shapes["random_seed"] == ("INT64", (1,))


def test_completing_twice_changes_nothing() -> None:
    """The configuration that the endpoint shows can be loaded again."""
    config = done("input { name: 'messages' data_type: TYPE_STRING dims: [ 1 ] }")
    again = complete(
        model_config_from_json(model_config_to_json(config), "it"), "m", has_model_py=False
    )
    assert again == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_size: 4", "max_batch_size is 4, expected 0"),
        ("model_transaction_policy { decoupled: false }", "it always is"),
        ("default_model_filename: 'model.py'", "there is no model file: leave it out"),
        ("runtime: 'model.py'", "runtime is 'model.py'"),
        ("input { name: 'prompt' }", "there is no input 'prompt': inputs are text_input"),
        ("output { name: 'text' }", "there is no output 'text': outputs are text_output"),
        ("input { name: 'top_k' data_type: TYPE_FP32 }", "TYPE_FP32, expected TYPE_INT32"),
        ("input { name: 'top_k' dims: [ -1 ] }", "dims [-1], expected [1]"),
        ("input [ { name: 'n' }, { name: 'n' } ]", "more than once"),
        ("input { name: 'n' allow_ragged_batch: true }", "allow_ragged_batch"),
        ("output { name: 'index' dims: [1] reshape { shape: [1] } }", "cannot have reshape"),
    ],
)
def test_contradictions_are_refused(text: str, expected: str) -> None:
    """Each is named, with what was expected."""
    with pytest.raises(ConfigError) as caught:
        done(text)
    assert caught.value.message.startswith("backend 'generation': ")
    assert expected in caught.value.message


def test_an_engine_s_name_is_enough() -> None:
    """All else has defaults."""
    assert read(parameter("ENGINE", "tinygpt")) == GenerationParameters(engine="tinygpt")


def test_parameters_are_read(tmp_path: Path) -> None:
    """Options of the engine are gathered, and paths are those of the version or the model."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "w.npz").touch()
    (tmp_path / "a.npz").touch()
    found = read(
        parameter("ENGINE", " my.engine:Class "),
        parameter("WEIGHTS", "w.npz"),
        parameter("SLOTS", "8"),
        parameter("RANKS", "2"),
        parameter("MAX_IN_FLIGHT", "10"),
        parameter("MAX_BEAM_WIDTH", "3"),
        parameter("DEFAULT_MAX_TOKENS", "7"),
        parameter("LOAD_TIMEOUT_S", "1.5"),
        parameter("HANG_TIMEOUT_S", "none"),
        parameter("ADAPTERS", '{"a": "$$TRITON_MODEL_DIRECTORY/a.npz"}'),
        parameter("ENGINE_OPTIONS", '{"depth": [1, 2]}'),
        parameter("EXECUTE_TIMEOUT_S", "9"),  # every model's
        folder=tmp_path,
    )
    assert found == GenerationParameters(
        engine="my.engine:Class",
        options={"depth": [1, 2], "weights": str(tmp_path / "1" / "w.npz"), "slots": 8},
        ranks=2,
        max_in_flight=10,
        max_beam_width=3,
        default_max_tokens=7,
        load_timeout_s=1.5,
        hang_timeout_s=0.0,
        adapters={"a": str(tmp_path / "a.npz")},
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ENGINE", " ", "expected the name of an engine"),
        ("RANKS", "0", "expected a whole number from 1 to 30, got '0'"),
        ("RANKS", "two", "expected a whole number from 1 to 30, got 'two'"),
        ("MAX_IN_FLIGHT", "1000", "from 1 to 999"),
        ("LOAD_TIMEOUT_S", "0", "expected a number of seconds greater than 0"),
        ("HANG_TIMEOUT_S", "nan", "or none"),
        ("WEIGHTS", "gone.bin", "WEIGHTS of model 'm': there is nothing at '/models/m/1/gone.bin'"),
        ("WEIGHTS", "", "expected a path"),
        ("ADAPTERS", '{"a": 1}', "expected a JSON object of names and paths"),
        ("ADAPTERS", '{"a": "b"}', "adapter 'a' of model 'm': there is nothing at"),
        ("ENGINE_OPTIONS", "[1]", "expected a JSON object"),
        ("ENGINE_OPTIONS", '{"slots": 1}', "'slots' is in ENGINE_OPTIONS and in SLOTS"),
        ("ENGINES", "x", "unknown parameter 'ENGINES': perhaps ENGINE?"),
        ("slots", "x", "unknown parameter 'slots': perhaps SLOTS?"),
        ("colour", "x", "unknown parameter 'colour': expected ENGINE, WEIGHTS"),
    ],
)
def test_wrong_parameters_are_named(name: str, value: str, expected: str) -> None:
    """The text says which, what was expected and what came."""
    others = {"ENGINE": "tinygpt", "SLOTS": "4"}
    others.pop(name, None)
    with pytest.raises(ConfigError) as caught:
        read(parameter(name, value), *(parameter(*each) for each in others.items()))
    assert expected in caught.value.message


def test_an_engine_has_to_be_named() -> None:
    """The text gives an example."""
    with pytest.raises(ConfigError, match="model 'm' names no engine: expected a parameter ENGINE"):
        read(parameter("RANKS", "1"))


def test_each_parameter_sets_a_field_of_its_own() -> None:
    """WEIGHTS and SLOTS are options of the engine."""
    fields = [rule.field for rule in PARAMETERS]
    own = {each for each in fields if each not in ("weights", "slots")}
    assert own == set(GenerationParameters.__struct_fields__)
    assert len(set(fields)) == len(fields)
