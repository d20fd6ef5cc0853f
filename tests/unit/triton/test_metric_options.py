# SPDX-License-Identifier: Apache-2.0
"""Labels and buckets that a model's configuration chooses."""

from __future__ import annotations

import pytest

from actorserve.triton.config_support import unsupported
from actorserve.triton.metric_options import first_response_buckets, metric_labels
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.text_format import parse_model_config

DECOUPLED = "model_transaction_policy { decoupled: true } "
CONTROL = (
    "model_metrics {{ metric_control {{ metric_identifier {{ family: "
    "'nv_inference_first_response_histogram_ms' }} histogram_options {{ buckets: {} }} }} }}"
)


def config(text: str) -> ModelConfig:
    """Read a configuration of a Python model."""
    return parse_model_config("name: 'm' backend: 'python' " + text, "config.pbtxt")


def test_tags_are_labels_and_never_hide_the_model() -> None:
    """Sorted; those that cannot be labels are left out."""
    tags = "".join(
        f"metric_tags {{ key: '{name}' value: 'x' }} " for name in ("z", "a", "a-b", "model")
    )
    assert metric_labels(config(tags), 3) == (
        ("a", "x"),
        ("model", "m"),
        ("version", "3"),
        ("z", "x"),
    )


def test_only_decoupled_models_count_first_responses() -> None:
    """With the documented buckets, unless they choose their own."""
    assert first_response_buckets(config("")) is None
    assert first_response_buckets(config(DECOUPLED)) == (100, 500, 2000, 5000)
    own = config(DECOUPLED + CONTROL.format("[ 1, 2.5 ]"))
    assert first_response_buckets(own) == (1, 2.5)
    other = CONTROL.replace("first_response", "other").format("[ 1 ]")
    assert first_response_buckets(config(DECOUPLED + other)) == (100, 500, 2000, 5000)


@pytest.mark.parametrize("buckets", ["[ 2, 1 ]", "[ 1, 1 ]", "[ nan ]"])
def test_buckets_that_do_not_ascend_fail_the_load(buckets: str) -> None:
    """They say what is wrong."""
    errors, _ = unsupported(config(CONTROL.format(buckets)))
    assert len(errors) == 1
    assert "model_metrics: 'nv_inference_first_response_histogram_ms': buckets must be" in errors[0]
