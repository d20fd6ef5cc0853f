# SPDX-License-Identifier: Apache-2.0
"""Calls of a stub whose inputs lie on a device: by reference first, by host memory where refused.

    placement: by reference? ─► sent, kept ─┬─► any response: forgotten
                                            └─► DEVICE_UNREACHABLE: nothing was done, send again

Who was refused sends to that model by host memory for a while, without asking first.
"""

from __future__ import annotations

from typing import Protocol

from actorserve.clock import monotonic_s
from actorserve.runtime.stub_devices import StubDevices
from actorserve.triton.memory import MemoryType, PreferredMemory
from actorserve.triton.request import InferenceRequest
from actorserve.triton.tensor import Tensor
from actorserve.wire.device_ref import Placement
from actorserve.wire.messages import Infer, WireResponse

ASK_AGAIN_AFTER_S = 30.0


class Call(Protocol):
    """A call that has no end yet."""

    number: int
    on_control: bool

    def put(self, wire: WireResponse) -> None:
        """Take a response; any thread."""


Kept = tuple[Call, Infer, list[Tensor]]


def answer_placement(devices: StubDevices, preferred: PreferredMemory) -> Placement | None:
    """Return where the answer to a call may lie: the model's wish, as far as we can use it.

    Another device than ours is nothing that we can use: then the tensors come by host memory.
    """
    kind = preferred._memory_type
    if not devices.takes_refs or kind is MemoryType.TRITONSERVER_MEMORY_CPU:
        return None
    if kind is MemoryType.TRITONSERVER_MEMORY_GPU:
        if preferred._device_id != devices.pool.ordinal:
            return None
        return Placement(devices.uuid, True)
    return Placement(devices.uuid)


class DeviceCalls:
    """The calls that went by reference and have no response yet. Any thread."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}
        self._refused: dict[tuple[str, int], float] = {}  # model and version: until when

    @property
    def has_calls(self) -> bool:
        """Whether there is any; asked at every response."""
        return bool(self._kept)

    def placement(self, devices: StubDevices, request: InferenceRequest) -> Placement | None:
        """Return which inputs of a call may go by reference; None for none."""
        if self._refused:
            key = (request._model_name, request._model_version)
            until_s = self._refused.get(key)
            if until_s is not None:
                if monotonic_s() < until_s:
                    return None
                self._refused.pop(key, None)
        return Placement(devices.uuid)

    def keep(self, call: Call, message: Infer, inputs: list[Tensor]) -> None:
        """Remember what may have to be sent again."""
        self._kept[call.number] = (call, message, inputs)

    def take_refused(self, number: int) -> Kept | None:
        """Return a call that was refused, which is to go by host memory; None for no such."""
        kept = self._kept.pop(number, None)
        if kept is not None:
            message = kept[1]
            until_s = monotonic_s() + ASK_AGAIN_AFTER_S
            self._refused[message.model_name, message.model_version] = until_s
        return kept

    def forget(self, number: int) -> None:
        """Hear that a call was answered, or is not wanted any more."""
        self._kept.pop(number, None)
