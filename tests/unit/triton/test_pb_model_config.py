# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`, as `auto_complete_config` gets it: what it fills in, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from actorserve.triton.pb_utils import ModelConfig

FP32 = {"name": "I", "data_type": "TYPE_FP32", "dims": [4]}
Add = Callable[[ModelConfig, dict[str, Any]], None]
BOTH = pytest.mark.parametrize(
    ("kind", "add"), [("input", ModelConfig.add_input), ("output", ModelConfig.add_output)]
)


def config(**fields: Any) -> ModelConfig:
    """Return the configuration of model 'M'."""
    return ModelConfig(json.dumps({"name": "M", **fields}))


def refusal(call: Callable[[], object]) -> str:
    """Return the text of the ValueError that a call raises."""
    with pytest.raises(ValueError, match="'M'") as caught:
        call()
    return str(caught.value)


def test_dict_is_live() -> None:
    """Changes show in it, whenever it was asked for, and the other way round."""
    model = config(max_batch_size=0)
    live = model.as_dict()
    model.set_max_batch_size(4)
    assert live == {"name": "M", "max_batch_size": 4}
    live["max_batch_size"] = 8
    assert "specified max_batch_size 8" in refusal(lambda: model.set_max_batch_size(2))


def test_max_batch_size_may_only_grow() -> None:
    """The text is the real server's."""
    config(max_batch_size=4).set_max_batch_size(4)
    config().set_max_batch_size(1)
    assert refusal(lambda: config(max_batch_size=4).set_max_batch_size(2)) == (
        "configuration specified max_batch_size 4, but in auto-complete-config function for model "
        "'M' specified max_batch_size 2"
    )


def test_dynamic_batching_is_added_or_kept() -> None:
    """What is configured already stays as it is."""
    model = config()
    model.set_dynamic_batching()
    assert model.as_dict()["dynamic_batching"] == {}
    model = config(dynamic_batching={"max_queue_delay_microseconds": 5})
    model.set_dynamic_batching()
    assert model.as_dict()["dynamic_batching"] == {"max_queue_delay_microseconds": 5}


@pytest.mark.parametrize("choice", ["sequence_batching", "ensemble_scheduling"])
def test_dynamic_batching_against_another_scheduling_is_refused(choice: str) -> None:
    """The text is the real server's."""
    assert refusal(config(**{choice: {}}).set_dynamic_batching) == (
        f"Configuration specified scheduling_choice as '{choice}', but auto-complete-config "
        "function for model 'M' tries to set scheduling_choice as 'dynamic_batching'"
    )


def test_transaction_policy_is_set_once() -> None:
    """The same again is fine, another value is refused in the real server's words."""
    model = config()
    model.set_model_transaction_policy({"decoupled": True})
    model.set_model_transaction_policy({"decoupled": True})
    model.set_model_transaction_policy({})
    assert model.as_dict()["model_transaction_policy"] == {"decoupled": True}
    assert refusal(lambda: model.set_model_transaction_policy({"decoupled": False})) == (
        "trying to change decoupled property in auto-complete-config for model 'M', which is "
        "already set to 'True'."
    )


def test_transaction_policy_has_one_property() -> None:
    """The text is the real server's."""
    assert refusal(lambda: config().set_model_transaction_policy({"other": 1})) == (
        "model transaction property in auto-complete-config function for model 'M' contains "
        "property other than 'decoupled'."
    )


@BOTH
def test_new_entries_are_appended(kind: str, add: Add) -> None:
    """Order and properties are those given."""
    model = config()
    add(model, FP32)
    add(model, {**FP32, "name": "J"})
    assert model.as_dict()[kind] == [FP32, {**FP32, "name": "J"}]


def test_optional_is_kept() -> None:
    """An input may say that it is optional, and only then does it."""
    model = config()
    model.add_input({**FP32, "optional": True})
    assert model.as_dict()["input"] == [{**FP32, "optional": True}]


@BOTH
def test_open_properties_are_filled_in(kind: str, add: Add) -> None:
    """A configured entry without type and dims gets the model's; other properties stay."""
    model = config(**{kind: [{"name": "I", "data_type": "TYPE_INVALID", "dims": [], "x": 1}]})
    add(model, FP32)
    assert model.as_dict()[kind] == [{**FP32, "x": 1}]
    model = config(**{kind: [{"name": "I"}]})
    add(model, FP32)
    assert model.as_dict()[kind] == [FP32]


@BOTH
def test_agreement_changes_nothing(kind: str, add: Add) -> None:
    """Saying what is configured is allowed."""
    model = config(**{kind: [FP32]})
    add(model, {**FP32, "dims": (4,)})
    assert len(model.as_dict()[kind]) == 1


@BOTH
def test_another_data_type_is_refused(kind: str, add: Add) -> None:
    """The text is the real server's."""
    model = config(**{kind: [{**FP32, "data_type": "TYPE_INT8"}]})
    assert refusal(lambda: add(model, FP32)) == (
        f"unable to load model 'M', configuration expects datatype TYPE_INT8 for {kind} 'I', "
        "model provides TYPE_FP32"
    )


@BOTH
def test_other_dims_are_refused(kind: str, add: Add) -> None:
    """The text is the real server's."""
    model = config(**{kind: [{**FP32, "dims": [2, 2]}]})
    assert refusal(lambda: add(model, FP32)) == (
        "model 'M', tensor 'I': the model expects dims [4] but the model configuration specifies "
        "dims [2, 2]"
    )


def test_other_optional_is_refused_where_both_say_it() -> None:
    """The text is the real server's; a side that says nothing agrees."""
    config(input=[FP32]).add_input({**FP32, "optional": True})
    config(input=[{**FP32, "optional": True}]).add_input(FP32)
    model = config(input=[{**FP32, "optional": False}])
    assert refusal(lambda: model.add_input({**FP32, "optional": True})) == (
        "model 'M', tensor 'I': the model expects optional True but the model configuration "
        "specifies optional False"
    )


@pytest.mark.parametrize("kind", ["input", "output"])
@pytest.mark.parametrize("missing", ["name", "data_type", "dims"])
def test_missing_properties_are_named(kind: str, missing: str) -> None:
    """The texts are the real server's."""
    entry = {key: value for key, value in FP32.items() if key != missing}
    add = getattr(config(), f"add_{kind}")
    subject = kind if missing == "name" else f"{kind} 'I'"
    assert refusal(lambda: add(entry)) == (
        f"{subject} in auto-complete-config function for model 'M' is missing '{missing}' property."
    )


def test_unknown_properties_are_refused() -> None:
    """The texts are the real server's; an output has no `optional`."""
    where = "in auto-complete-config function for model 'M' contains property other than"
    assert refusal(lambda: config().add_input({**FP32, "x": 1})) == (
        f"input 'I' {where} 'name', 'data_type', 'dims' and 'optional'."
    )
    assert refusal(lambda: config().add_output({**FP32, "optional": True})) == (
        f"output 'I' {where} 'name', 'data_type' and 'dims'."
    )
