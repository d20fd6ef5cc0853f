# SPDX-License-Identifier: Apache-2.0
"""Test a model without a server: its class runs in this process, with the server's own rules.

    from actorserve.testing import run_model

    def test_add_sub():
        outputs = run_model("repo/add_sub", {"INPUT0": a, "INPUT1": b})

Each call imports the model anew, initializes it, executes the requests as one batch and finalizes
it. Requests are checked against config.pbtxt as the server does; nothing travels, so inputs and
outputs are the arrays themselves. Calls to other models need a server, and are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from actorserve.triton.response_sender import InferenceResponseSender, check_sending
from actorserve.triton.tensor import Tensor
from actorserve.triton.version_policy import select_versions
from actorserve.wire.tensors import BY_NUMBER

Arrays = dict[str, npt.NDArray[Any]]

STREAM_TIMEOUT_S = 60.0


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
    streams = _run(path, requests, parameters)
    for stream in streams:
        if len(stream) != 1:
            raise InternalError(f"a request got {len(stream)} responses: use stream_model")
    return [stream[0] for stream in streams]


def stream_model(
    path: str | Path, inputs: Mapping[str, npt.ArrayLike], *, parameters: str = "{}"
) -> list[Arrays]:
    """Run one request of a model that sends its responses; returns all of them.

    As `run_batch`. Waits until the model has sent its last response, up to STREAM_TIMEOUT_S.
    """
    return _run(path, [inputs], parameters)[0]


def _run(
    path: str | Path, requests: Sequence[Mapping[str, npt.ArrayLike]], parameters: str
) -> list[list[Arrays]]:
    folder = Path(path).absolute()
    source = Repository([folder.parent]).read(ModelEntry(folder.name, folder))
    versions = select_versions(source.config, source.versions)
    if not versions:
        raise InvalidArgument(f"'{folder}' has no version to run")
    file = folder / str(versions[-1]) / (source.config.default_model_filename or MODEL_FILE)
    rules = _rules(source.config)
    replies = [_CollectedReply(source.config.is_decoupled) for _ in requests]
    received = [
        _received(rules, source.config, each, parameters, reply)
        for each, reply in zip(requests, replies)
    ]
    with _imported(file) as model_class:
        model = model_class()
        if hasattr(model, "initialize"):
            model.initialize(_args(source.config, folder, versions[-1]))
        try:
            answers = model.execute(received)
            if inspect.isawaitable(answers):
                answers = asyncio.run(_awaited(answers))
            _collect(answers, replies, source.config)
            return [reply.outputs(source.config) for reply in replies]
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


class _CollectedReply:
    """Keeps what a model sends; see triton.response_sender.Reply."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._responses: list[InferenceResponse] = []
        self._is_closed = False
        self._sender: InferenceResponseSender | None = None
        self._end = threading.Event()

    @property
    def is_taken(self) -> bool:
        """Whether the model has asked for the sender."""
        return self._sender is not None

    def sender(self) -> InferenceResponseSender:
        """Return the request's sender."""
        if self._sender is None:
            self._sender = InferenceResponseSender._of(self)
        return self._sender

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Keep a response, by the rules."""
        check_sending(
            response,
            flags,
            decoupled=self._decoupled,
            sent=len(self._responses),
            is_closed=self._is_closed,
        )
        if response is not None:
            self._responses.append(response)
        self._is_closed = bool(flags)
        if flags or not self._decoupled:
            self._end.set()

    def is_cancelled(self) -> bool:
        """Tell that nobody gives up in a test."""
        return False

    def watch_cancel(self, on_cancel: Callable[[], object]) -> None:
        """Never call it; see `is_cancelled`."""

    def unwatch_cancel(self) -> None:
        """Forget nothing."""

    def when_drained(self, on_drained: Callable[[], None]) -> bool:
        """Say that all has gone: what is sent is kept here at once."""
        return False

    def outputs(self, config: ModelConfig) -> list[Arrays]:
        """Return the outputs of each response, waiting for the last. Raises a response's error."""
        if not self._end.wait(STREAM_TIMEOUT_S):
            raise InternalError("the model's sender never sent its final response")
        wanted = {output.name for output in config.output}
        found = []
        for response in self._responses:
            error = response.error()
            if error is not None:
                raise error_for(int(error.code()), error.message())
            tensors = response.output_tensors()
            found.append({t.name(): _array(t) for t in tensors if t.name() in wanted})
        return found


def _received(
    rules: RequestRules,
    config: ModelConfig,
    inputs: Mapping[str, npt.ArrayLike],
    parameters: str,
    reply: _CollectedReply,
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
        reply,
    )


def _collect(answers: Any, replies: Sequence[_CollectedReply], config: ModelConfig) -> None:
    """Take what `execute` returned; raises what the server would answer."""
    if answers is None:
        answers = [None] * len(replies)
    elif config.is_decoupled:
        raise InternalError("the execute function of a decoupled model must return None")
    if not isinstance(answers, list) or len(answers) != len(replies):
        raise InternalError(f"execute returned {answers!r} for {len(replies)} requests")
    for answer, reply in zip(answers, replies):
        if answer is None:
            if not reply.is_taken:
                raise InternalError("execute returned None and no response sender was taken")
        elif isinstance(answer, InferenceResponse):
            reply.send(answer, 0)
        else:
            raise InternalError(f"execute returned {type(answer)}: expected an InferenceResponse")


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    number, shape, body = tensor._body()
    data = np.ascontiguousarray(body).reshape(-1).view(np.uint8).data
    return array_of(InferTensor(tensor.name(), BY_NUMBER[number].wire_name, shape, data))
