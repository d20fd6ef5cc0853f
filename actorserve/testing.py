# SPDX-License-Identifier: Apache-2.0
"""Test a model without a server: its class runs in this process, with the server's own rules.

    from actorserve.testing import run_model

    def test_add_sub():
        outputs = run_model("repo/add_sub", {"INPUT0": a, "INPUT1": b})

Each call imports the model anew, initializes it, executes the requests as one batch and finalizes
it. Requests are checked against config.pbtxt as the server does; nothing travels, so inputs and
outputs are the arrays themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actorserve.actors.repository import MODEL_FILE, ModelEntry, Repository
from actorserve.errors import InternalError, InvalidArgument, error_for
from actorserve.triton import importing
from actorserve.triton.arrays import array_of, tensor_of
from actorserve.triton.config_json import model_config_to_json
from actorserve.triton.inference import InferRequest, InferTensor
from actorserve.triton.instance_group import expand_instances
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.model_info import input_rules
from actorserve.triton.request import InferenceRequest
from actorserve.triton.request_validation import Checked, RequestRules
from actorserve.triton.response import InferenceResponse
from actorserve.triton.tensor import Tensor
from actorserve.triton.version_policy import select_versions
from actorserve.wire.tensors import BY_NUMBER

Arrays = dict[str, npt.NDArray[Any]]


def run_model(
    path: str | Path, inputs: Mapping[str, npt.ArrayLike], *, parameters: str = "{}"
) -> Arrays:
    """Run one request and return its outputs by name; see `run_batch`."""
    return run_batch(path, [inputs], parameters=parameters)[0]


def run_batch(
    path: str | Path,
    requests: Sequence[Mapping[str, npt.ArrayLike]],
    *,
    parameters: str = "{}",
) -> list[Arrays]:
    """Run requests as one batch of the model in folder `path`; returns the outputs of each.

    `path` is the model's folder (with config.pbtxt and numbered versions); the highest version of
    its policy runs. `parameters` is the requests' JSON object. Raises what the model raises,
    ConfigError for its configuration, InvalidArgument for a request that does not fit, and the
    error of a response.
    """
    folder = Path(path).absolute()
    source = Repository([folder.parent]).read(ModelEntry(folder.name, folder))
    versions = select_versions(source.config, source.versions)
    if not versions:
        raise InvalidArgument(f"'{folder}' has no version to run")
    file = folder / str(versions[-1]) / (source.config.default_model_filename or MODEL_FILE)
    rules = _rules(source.config)
    received = [_received(rules, source.config, each, parameters) for each in requests]
    with _imported(file) as model_class:
        model = model_class()
        if hasattr(model, "initialize"):
            model.initialize(_args(source.config, folder, versions[-1]))
        try:
            answers = model.execute(received)
            if inspect.isawaitable(answers):
                answers = asyncio.run(_awaited(answers))
            return _outputs(answers, len(received), source.config)
        finally:
            if hasattr(model, "finalize"):
                model.finalize()


async def _awaited(answers: Any) -> Any:
    return await answers


@contextlib.contextmanager
def _imported(file: Path) -> Iterator[Any]:
    """Import the model's class, and forget its modules and paths afterwards."""
    modules, paths = set(sys.modules), list(sys.path)
    importing.install()
    importing.set_model_dir(str(file.parent))
    try:
        yield importing.load_model_class(str(file))
    finally:
        importing.set_model_dir(None)
        sys.path[:] = paths
        for name in set(sys.modules) - modules:
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if origin.startswith(str(file.parent.parent)):
                del sys.modules[name]


def _rules(config: ModelConfig) -> RequestRules:
    outputs = [output.name for output in config.output]
    return RequestRules(config.name, config.max_batch_size, input_rules(config), outputs)


def _args(config: ModelConfig, folder: Path, version: int) -> dict[str, str]:
    instance = expand_instances(config)[0]
    return {
        "model_config": model_config_to_json(config).decode(),
        "model_instance_kind": instance.kind,
        "model_instance_name": instance.name,
        "model_instance_device_id": str(instance.device_id),
        "model_repository": str(folder),
        "model_version": str(version),
        "model_name": config.name,
    }


def _received(
    rules: RequestRules, config: ModelConfig, inputs: Mapping[str, npt.ArrayLike], parameters: str
) -> InferenceRequest:
    """Make what `execute` gets, checked as the server checks it."""
    tensors = []
    for name, value in inputs.items():
        tensor, body = tensor_of(name, value)
        if body is not None:
            tensor.data = body.tobytes()
        tensors.append(tensor)
    checked: Checked = rules.check(InferRequest(config.name, tensors))
    return InferenceRequest._received(
        [
            Tensor._received(tensor.name, fitting.datatype, fitting.shape, tensor.data)  # type: ignore[arg-type]
            for tensor, fitting in zip(tensors, checked.inputs)
        ],
        "",
        0,
        [output.name for output in config.output],
        parameters,
        0,
        0,
        lambda: False,
    )


def _outputs(answers: Any, count: int, config: ModelConfig) -> list[Arrays]:
    """Turn what `execute` returned into arrays; raises what the server would answer."""
    if not isinstance(answers, list) or len(answers) != count:
        raise InternalError(f"execute returned {answers!r} for {count} requests: expected a list")
    wanted = {output.name for output in config.output}
    found = []
    for answer in answers:
        if not isinstance(answer, InferenceResponse):
            raise InternalError(f"execute returned {type(answer)}: expected an InferenceResponse")
        error = answer.error()
        if error is not None:
            raise error_for(int(error.code()), error.message())
        found.append({t.name(): _array(t) for t in answer.output_tensors() if t.name() in wanted})
    return found


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    number, shape, body = tensor._body()
    data = np.ascontiguousarray(body).reshape(-1).view(np.uint8).data
    return array_of(InferTensor(tensor.name(), BY_NUMBER[number].wire_name, shape, data))
