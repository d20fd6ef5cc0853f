# SPDX-License-Identifier: Apache-2.0
"""What `actorserve start` says when it is ready: where it is, and a request that works."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import Any

from actorserve.frontend.colour import painted
from actorserve.triton.inference import ModelInfo, TensorSpec

BINARY_ONLY = ("FP16", "BF16")
MOST_ELEMENTS = 16
_SAMPLES: dict[str, Any] = {"BYTES": "text", "BOOL": True, "FP32": 1.0, "FP64": 1.0}


def greeting(
    url: str, is_ready: bool, models: Iterable[ModelInfo], *, is_coloured: bool = False
) -> str:
    """Return where the server is and whether it is ready, with a request to try.

    The request is for the first of the models that serve which takes short JSON.
    """
    state = "Ready:" if is_ready else "Serving, but not ready:"
    if is_coloured:
        state = painted("ready" if is_ready else "not ready", state)
    lines = ["", f"{state} {url}   (health: {url}/v2/health/ready; stop with Ctrl-C)"]
    for info in models:
        body = sample_request(info)
        if body is not None:
            data = shlex.quote(json.dumps(body))
            lines.append(f"Try:   curl -s {url}/v2/models/{info.name}/infer -d {data}")
            break
    return "\n".join(lines)


def sample_request(info: ModelInfo) -> dict[str, Any] | None:
    """Return a small request that fits the model, or None where JSON is no good for it."""
    inputs = [_sample(spec) for spec in info.inputs if not spec.optional]
    if info.decoupled or not inputs or None in inputs:
        return None
    return {"inputs": inputs}


def _sample(spec: TensorSpec) -> dict[str, Any] | None:
    shape = [1 if extent < 0 else extent for extent in spec.shape]
    count = 1
    for extent in shape:
        count *= extent
    if spec.datatype in BINARY_ONLY or count > MOST_ELEMENTS:
        return None
    value = _SAMPLES.get(spec.datatype, 1)
    return {
        "name": spec.name,
        "datatype": spec.datatype,
        "shape": shape,
        "data": [value] * count,
    }
