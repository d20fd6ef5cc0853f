# SPDX-License-Identifier: Apache-2.0
"""Which versions of a model are served."""

from __future__ import annotations

from collections.abc import Iterable

from actorserve.triton.model_config import ModelConfig


def select_versions(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """Return the versions to serve, in ascending order, out of those that have a folder.

    Without a policy the highest one is served, as with `latest { num_versions: 1 }`.
    """
    versions = sorted(set(available))
    policy = config.version_policy
    if policy is not None and policy.all is not None:
        return versions
    if policy is not None and policy.specific is not None:
        wanted = set(policy.specific.versions)
        return [version for version in versions if version in wanted]
    latest = policy.latest if policy is not None else None
    count = latest.num_versions if latest is not None else 0
    return versions[-(count or 1) :]


def missing_versions(config: ModelConfig, available: Iterable[int]) -> list[int]:
    """Return the versions that the policy names and that have no folder, for a warning."""
    policy = config.version_policy
    if policy is None or policy.specific is None:
        return []
    return sorted(set(policy.specific.versions) - set(available))
