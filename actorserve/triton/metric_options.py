# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says of the server's metrics about it: labels and buckets. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from actorserve.state.metric_registry import is_name
from actorserve.state.metrics import Labels, check_buckets
from actorserve.state.statistics import FIRST_RESPONSE_BUCKETS_MS
from actorserve.triton.model_config import ModelConfig

FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
"""The one family whose buckets a model may choose."""

_OWN = ("model", "version", "reason", "state", "le", "quantile")


def metric_labels(config: ModelConfig, version: int) -> Labels:
    """Return the labels of a version's metrics: its own tags, its name and its number."""
    labels = {tag: value for tag, value in config.metric_tags.items() if _is_tag(tag)}
    labels.update(model=config.name, version=str(version))
    return tuple(sorted(labels.items()))


def first_response_buckets(config: ModelConfig) -> tuple[float, ...] | None:
    """Return the buckets (ms) of first responses' times; None for a model that is not decoupled."""
    if not config.is_decoupled:
        return None
    chosen: tuple[float, ...] = FIRST_RESPONSE_BUCKETS_MS
    for family, buckets in _chosen_buckets(config):
        if family == FIRST_RESPONSE:
            chosen = buckets
    return chosen


def metric_problems(config: ModelConfig) -> Iterator[str]:
    """Yield what cannot be: buckets that do not ascend."""
    for family, buckets in _chosen_buckets(config):
        try:
            check_buckets(buckets)
        except ValueError as error:
            yield f"model_metrics: '{family}': {error}"


def metric_warnings(config: ModelConfig) -> Iterator[str]:
    """Yield what is ignored: tags that are no labels, and choices for other families."""
    for tag in config.metric_tags:
        if not _is_tag(tag):
            yield f"metric_tags: '{tag}' is ignored: no label of a metric may be called that here"
    if config.model_metrics is None:
        return
    for control in config.model_metrics.metric_control:
        family = control.metric_identifier.family if control.metric_identifier is not None else ""
        if family != FIRST_RESPONSE:
            yield f"model_metrics: '{family}' is ignored: only {FIRST_RESPONSE} has such options"


def _chosen_buckets(config: ModelConfig) -> Iterator[tuple[str, tuple[float, ...]]]:
    controls = config.model_metrics.metric_control if config.model_metrics is not None else []
    for control in controls:
        options, identifier = control.histogram_options, control.metric_identifier
        if options is not None and identifier is not None:
            yield identifier.family, tuple(options.buckets)


def _is_tag(name: str) -> bool:
    return is_name(name) and not name.startswith("__") and name not in _OWN
