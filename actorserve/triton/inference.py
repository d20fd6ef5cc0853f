# SPDX-License-Identifier: Apache-2.0
"""One inference, in the terms of the v2 protocol: what front ends build and the server answers.

These objects stay inside the supervisor's process; wire/messages.py has their travelling form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from actorserve.errors import ActorserveError
from actorserve.state.metrics import Family
from actorserve.wire.device_ref import Placement

Parameter = bool | int | float | str


class Slab(Protocol):
    """A piece of shared memory for one tensor body, filled in place by whoever asked for it.

    The server takes it over with the request; a slab that never reaches a request is given back
    by `release()` (idempotent).
    """

    @property
    def buffer(self) -> memoryview:
        """The writable bytes, exactly as many as were asked for."""

    @property
    def nbytes(self) -> int:
        """How many bytes the body has."""

    def release(self) -> None:
        """Give the memory back."""


class InferTensor(msgspec.Struct):
    """A named tensor. `datatype` is the protocol's name (FP32, BYTES, …); `shape` has the batch.

    `data` holds the raw little-endian, row-major body (BYTES: length-prefixed elements): any
    C-contiguous bytes-like object, or a slab. Bodies of responses are read-only memoryviews whose
    memory stays valid as long as the view is alive.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview | Slab


class InferRequest(msgspec.Struct):
    """A request to a model. An empty `model_version` means the policy's choice (the highest).

    `outputs` names the wanted outputs, empty for all. `priority` 0 means the default level;
    `timeout_us` 0 means none. `parameters` are the client's own, without the reserved ones.
    `takes_stream` says that any number of responses is welcome, as decoupled models give. `is_call`
    marks what another model asks, which may wait for it; outputs may lie on a device where it
    brings a `placement`.
    """

    model_name: str
    inputs: list[InferTensor]
    model_version: str = ""
    id: str = ""
    outputs: list[str] = []
    parameters: dict[str, Parameter] = {}
    correlation_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    timeout_us: int = 0
    takes_stream: bool = False
    is_call: bool = False
    placement: Placement | None = None


class InferResponse(msgspec.Struct):
    """A response of a model; `error` is set instead of outputs where the model failed.

    `is_empty` marks the bare end of a stream: no response, only `final`. `source` is what it was
    made of, for whoever sends it on without looking at it.
    """

    model_name: str
    model_version: str
    id: str
    outputs: list[InferTensor]
    parameters: dict[str, Parameter] = {}
    error: ActorserveError | None = None
    final: bool = True
    is_empty: bool = False
    source: Any = None


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output of a model. `shape` is what clients see: -1 for free, batch included."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False


class ModelInfo(msgspec.Struct, frozen=True):
    """What a front end needs to know of a model's version that serves."""

    name: str
    version: str
    versions: tuple[str, ...]
    platform: str
    max_batch_size: int
    decoupled: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class IndexEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the repository index. A model that was never loaded has only its name."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class ModelControl(Protocol):
    """Loading and unloading, as a front end sees them. Refused but in explicit mode."""

    async def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load or reload; returns when it serves. Raises what is wrong with it.

        `config` is JSON instead of the model's configuration. `files` ("file:1/model.py") are then
        all that the model's directory holds.
        """

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None:
        """Let a model take no new requests; those that were accepted end. Unknown ones are none."""

    async def index(self, *, is_ready: bool = False) -> list[IndexEntry]:
        """Return every model of the repositories, or the versions that are ready."""


class InFlight(Protocol):
    """A request that has been accepted and not been answered yet."""

    def cancel(self) -> None:
        """Cancel it: queued work is dropped, running work is told. The answer still comes once."""

    def disconnect(self) -> None:
        """Cancel it without an answer: nobody is left to hear one."""

    def consumed(self, count: int = 1) -> None:
        """Say that the client has taken so many responses of a decoupled model.

        The model's sender is some responses ahead of that and no more: without this a stream stops.
        """


class Door(Protocol):
    """The server as a front end sees it. All methods are called on the server's loop."""

    def submit(
        self, request: InferRequest, on_response: Callable[[InferResponse], None]
    ) -> InFlight:
        """Validate and enqueue; `on_response` is called on the loop, for each response once.

        The last one has `final` set, and may carry an error. A decoupled model's responses have to
        be acknowledged with InFlight.consumed. Raises ActorserveError at once for a
        request that cannot be accepted (then nothing is called and every slab is released).
        """

    def allocate(self, nbytes: int) -> Slab | None:
        """Return memory for a tensor body, or None where the arena has to grow first."""

    async def grow(self, nbytes: int) -> None:
        """Make room for `nbytes`, off the loop; raises ResourceExhausted where there is none."""

    def model_info(self, name: str, version: str = "") -> ModelInfo:
        """Describe a version that is loaded. Raises NotFound or Unavailable."""

    def model_config(self, name: str, version: str = "") -> bytes:
        """Return the model's configuration as the protocol's JSON. Raises as model_info."""

    def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether every instance of the version is initialized now; unknown names are not."""

    def statistics(self, name: str = "", version: str = "") -> bytes:
        """Return what was counted, as the protocol's JSON: of all versions, or of those named.

        Raises InvalidArgument for a model or version that does not serve.
        """

    def metrics(self) -> list[Family]:
        """Return all metrics: the server's own and those of models."""

    @property
    def control(self) -> ModelControl:
        """Loading and unloading."""

    async def check_model_ready(self, name: str, version: str = "") -> bool:
        """Whether it is, and the model itself says so; takes up to some seconds."""

    async def check_ready(self) -> bool:
        """Whether the server is ready, and the models themselves say so; as above."""

    async def status(self) -> bytes:
        """Return where the server stands, for its operator, as JSON."""

    def is_live(self) -> bool:
        """Whether the server turns."""

    def is_ready(self) -> bool:
        """Whether every model that should serve does, and nothing is being stopped."""
