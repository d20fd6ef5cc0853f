# SPDX-License-Identifier: Apache-2.0
"""One version of a model that serves: its rules, its scheduler and its instances."""

from __future__ import annotations

import asyncio
import enum

import msgspec

from actorserve.actors.incarnation import InstancePlan
from actorserve.actors.instance import Instance, InstanceStats
from actorserve.actors.node import Node
from actorserve.actors.ordered_responses import OrderedFactory, OrderedScheduler
from actorserve.actors.response_factory import OnResponse, ResponseFactory, parameters_text
from actorserve.actors.scheduler import Scheduler, SchedulerStats
from actorserve.clock import monotonic_s
from actorserve.errors import ActorserveError, BootError, DecoupledModel, Unavailable
from actorserve.runtime.exchange import ArenaSlab
from actorserve.state.batching import BatchPolicy
from actorserve.state.lifecycle import State
from actorserve.triton.batch_signature import batch_signature
from actorserve.triton.inference import InferRequest, InferTensor, ModelInfo
from actorserve.triton.request_validation import Checked, RequestRules
from actorserve.wire.messages import INLINE_BYTES, Handle, WireTensor


class VersionState(enum.Enum):
    """What a version is to clients; the values are those of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class VersionPlan(msgspec.Struct, frozen=True):
    """How a version is served. `ragged` names the inputs whose shapes may differ in a batch."""

    info: ModelInfo
    config_json: bytes
    rules: RequestRules
    batching: BatchPolicy
    instances: tuple[InstancePlan, ...]
    retries: int = 0
    ragged: frozenset[str] = frozenset()


class VersionStats(msgspec.Struct, frozen=True):
    """Where a version stands."""

    version: str
    state: str
    reason: str
    scheduler: SchedulerStats
    instances: tuple[InstanceStats, ...]


class ModelVersion:
    """A version from its load to its unload."""

    def __init__(self, node: Node, plan: VersionPlan) -> None:
        self._node = node
        self._plan = plan
        self._rules = plan.rules
        self._outputs = [spec.name for spec in plan.info.outputs]
        self._is_batched = plan.batching.is_dynamic
        self._ragged = plan.ragged
        self.info = plan.info
        self.config_json = plan.config_json
        self.state = VersionState.LOADING
        self.reason = ""
        self._settled: asyncio.Future[None] | None = None
        is_ordered = plan.batching.preserve_ordering
        self._factory = OrderedFactory if is_ordered else ResponseFactory
        self._scheduler = (OrderedScheduler if is_ordered else Scheduler)(
            node,
            f"model '{plan.info.name}' version {plan.info.version}",
            plan.batching,
            plan.retries,
        )
        self._instances = [Instance(node, each, self._scheduler) for each in plan.instances]
        self._scheduler.employ(self._instances, self._on_change)

    # --- life ------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start every instance; returns when all are ready. Raises BootError with the reason."""
        for instance in self._instances:
            instance.start()
        self._settled = self._node.loop.create_future()
        try:
            await self._settled
        except asyncio.CancelledError:
            await self.unload(is_quick=True)
            raise
        failed = [each for each in self._instances if each.state is State.FATAL]
        if failed:
            reason = failed[0].reason
            await self.unload(is_quick=True)
            self.reason = reason
            raise BootError(reason)
        if self.state is not VersionState.LOADING:
            raise Unavailable("it was unloaded before it had loaded")
        self.state = VersionState.READY

    def _on_change(self) -> None:
        """Look whether loading has come to an end."""
        settled = self._settled
        if settled is None or settled.done():
            return
        states = [instance.state for instance in self._instances]
        is_over = any(state in (State.FATAL, State.STOPPED) for state in states)
        if is_over or all(state is State.RUNNING for state in states):
            settled.set_result(None)

    async def unload(self, *, is_quick: bool = False, reason: str = "unloaded") -> None:
        """Refuse new requests, fail what is queued, finalize and end every instance."""
        if self.state is VersionState.UNAVAILABLE:
            return
        self.state = VersionState.UNLOADING
        # In reverse order of their start, as supervision trees end.
        await asyncio.gather(*[each.stop(is_quick=is_quick) for each in reversed(self._instances)])
        self._scheduler.fail_all(
            Unavailable(f"model '{self.info.name}' version {self.info.version} was unloaded")
        )
        self._scheduler.close()
        self.state = VersionState.UNAVAILABLE
        self.reason = reason

    def refuse(self) -> None:
        """Take no new requests; those that were accepted go on."""
        self.state = VersionState.UNLOADING

    async def drained(self) -> None:
        """Wait until no accepted request is without its end."""
        await self._scheduler.drained()

    @property
    def pending(self) -> int:
        """How many accepted requests have no end yet."""
        return self._scheduler.pending

    def fail_all(self, error: Unavailable) -> None:
        """End every accepted request now, wherever it is."""
        self._scheduler.fail_all(error)

    # --- requests --------------------------------------------------------------------------------

    def submit(self, request: InferRequest, on_response: OnResponse) -> ResponseFactory:
        """Check and enqueue. Raises ActorserveError; slabs are then still the caller's."""
        if self.info.decoupled and not request.takes_stream:
            raise DecoupledModel(
                f"model '{self.info.name}' is decoupled and answers with any number of responses: "
                "ask it for a stream"
            )
        checked = self._rules.check(request)
        parameters = parameters_text(request)
        self._scheduler.check_available()
        signature = None
        if self._is_batched:
            signature = batch_signature(request.inputs, checked.inputs, self._ragged)
        factory = self._factory(
            self._node.ids.next(),
            request,
            self.info.version,
            self._wire_inputs(request, checked),
            request.outputs or self._outputs,
            parameters,
            checked.rows,
            signature,
            monotonic_s(),
            self._node.exchange,
            self._scheduler,
            on_response,
        )
        try:
            self._scheduler.submit(factory)
        except ActorserveError:
            factory.abandon()
            raise
        return factory

    def _wire_inputs(self, request: InferRequest, checked: Checked) -> list[WireTensor]:
        """Take the bodies over. Where memory runs out, nothing is kept: ResourceExhausted."""
        wires: list[WireTensor] = []
        try:
            for tensor, fitting in zip(request.inputs, checked.inputs):
                wires.append(self._wire_input(tensor, fitting.datatype, fitting.shape))
        except ActorserveError:
            for wire in wires:
                if isinstance(wire.data, Handle):
                    self._node.exchange.drop(wire.data)
            raise
        return wires

    def _wire_input(self, tensor: InferTensor, datatype: int, shape: tuple[int, ...]) -> WireTensor:
        """Put a small body into the message and a large one into the arena, if it is not there."""
        body = tensor.data
        if isinstance(body, (bytes, bytearray, memoryview)):
            nbytes = body.nbytes if isinstance(body, memoryview) else len(body)
            if nbytes <= INLINE_BYTES:
                return WireTensor(tensor.name, datatype, shape, bytes(body))
            slab = self._node.exchange.allocate_now(nbytes)
            slab.buffer[:] = body if not isinstance(body, memoryview) else body.cast("B")
        else:
            assert isinstance(body, ArenaSlab)
            slab = body
            if slab.buffer.nbytes <= INLINE_BYTES:
                data = bytes(slab.buffer)
                slab.release()
                return WireTensor(tensor.name, datatype, shape, data)
        handle = slab.take()
        if self._plan.retries:
            # A stub that writes into its input and dies must not change what the next one gets.
            handle = msgspec.structs.replace(handle, shared=True)
        return WireTensor(tensor.name, datatype, shape, handle)

    # --- looks -----------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether it serves and every instance is initialized now."""
        return self.state is VersionState.READY and all(
            instance.is_running for instance in self._instances
        )

    @property
    def instances(self) -> list[Instance]:
        """The instances."""
        return self._instances

    def watch(self, now_s: float) -> None:
        """Look after hanging stubs."""
        for instance in self._instances:
            instance.watch(now_s)

    def pump(self) -> None:
        """Read what the stubs have written and not yet rung for."""
        for instance in self._instances:
            instance.pump()

    def stats(self) -> VersionStats:
        """Return where it stands."""
        return VersionStats(
            self.info.version,
            self.state.value,
            self.reason,
            self._scheduler.stats(),
            tuple(instance.stats() for instance in self._instances),
        )
