# SPDX-License-Identifier: Apache-2.0
"""Turn instance groups into instances: which device each runs on and what it is called.

A group without a name is `<model>_<number of the group>`; a model without any group gets one that
is called as the model. An instance is `<group>_<index>`, so that the usual name is `add_sub_0_0`.
"""

from __future__ import annotations

import copy

import msgspec

from actorserve.triton.model_config import ModelConfig, ModelInstanceGroup

Kind = ModelInstanceGroup.Kind

_KIND_NAMES = {Kind.KIND_GPU: "GPU", Kind.KIND_MODEL: "MODEL"}


class InstanceSpec(msgspec.Struct, frozen=True):
    """One instance to start. `kind` is CPU, GPU or MODEL; `device_id` is 0 but for GPU."""

    name: str
    kind: str
    device_id: int


def complete_groups(config: ModelConfig, gpu_count: int) -> list[ModelInstanceGroup]:
    """Return the groups with every name, kind, count and list of GPUs filled in.

    KIND_AUTO becomes KIND_GPU where all GPUs that it needs are there, KIND_CPU otherwise; a group
    of KIND_GPU that lists none runs on all.
    """
    groups = copy.deepcopy(config.instance_group) or [ModelInstanceGroup(name=config.name)]
    for number, group in enumerate(groups):
        group.name = group.name or f"{config.name}_{number}"
        group.count = group.count or 1
        if group.kind is Kind.KIND_AUTO:
            has_all = gpu_count > 0 and all(0 <= gpu < gpu_count for gpu in group.gpus)
            group.kind = Kind.KIND_GPU if has_all else Kind.KIND_CPU
            group.gpus = group.gpus if has_all else []
        if group.kind is Kind.KIND_GPU and not group.gpus:
            group.gpus = list(range(gpu_count))
    return groups


def expand_instances(config: ModelConfig) -> list[InstanceSpec]:
    """Return the instances of a completed configuration; every name is unique.

    A KIND_GPU group has its count for each of its GPUs. Groups of the same name go on counting.
    """
    instances: list[InstanceSpec] = []
    next_index: dict[str, int] = {}
    for group in config.instance_group:
        devices = group.gpus if group.kind is Kind.KIND_GPU else [0]
        for device_id in devices * group.count:
            index = next_index.get(group.name, 0)
            next_index[group.name] = index + 1
            kind = _KIND_NAMES.get(group.kind, "CPU")
            instances.append(InstanceSpec(f"{group.name}_{index}", kind, device_id))
    return instances
