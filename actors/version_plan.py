# SPDX-License-Identifier: Apache-2.0
"""How a version of a model is served, as its configuration says, and what two plans share."""

from __future__ import annotations

import msgspec

from actorserve.actors.incarnation import InstancePlan
from actorserve.state.batching import BatchPolicy
from actorserve.state.metrics import Labels
from actorserve.triton.inference import ModelInfo
from actorserve.triton.request_validation import RequestRules


class VersionPlan(msgspec.Struct, frozen=True):
    """How a version is served. `ragged` names the inputs whose shapes may differ in a batch.

    `metric_labels` are those of its metrics, `first_response_ms` the buckets of its first
    responses' times, None where they are not counted. `refuses_for_us`: the model's code is the
    server's own, which checks there what clients ask.
    """

    info: ModelInfo
    config_json: bytes
    rules: RequestRules
    batching: BatchPolicy
    instances: tuple[InstancePlan, ...]
    retries: int = 0
    ragged: frozenset[str] = frozenset()
    metric_labels: Labels = ()
    first_response_ms: tuple[float, ...] | None = None
    refuses_for_us: bool = False


def is_same_instance(a: InstancePlan, b: InstancePlan) -> bool:
    """Whether two plans differ in nothing but what the configuration says of other instances."""
    return _without_config(a) == _without_config(b)


def _without_config(plan: InstancePlan) -> InstancePlan:
    args = {key: value for key, value in plan.initialize.args.items() if key != "model_config"}
    initialize = msgspec.structs.replace(plan.initialize, args=args)
    return msgspec.structs.replace(plan, initialize=initialize)
