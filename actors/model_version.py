# SPDX-License-Identifier: Apache-2.0
"""One version of a model that serves: its rules, its scheduler and its instances."""

from __future__ import annotations

import asyncio
import enum

import msgspec

from actorserve.actors.instance import Instance, InstanceStats
from actorserve.actors.node import Node
from actorserve.actors.ordered_responses import OrderedFactory, OrderedScheduler
from actorserve.actors.request_parameters import parameters_text
from actorserve.actors.response_factory import OnResponse, ResponseFactory
from actorserve.actors.retirement import all_ended
from actorserve.actors.scheduler import Scheduler, SchedulerStats
from actorserve.actors.server_metrics import VersionGauges, VersionView
from actorserve.actors.version_plan import VersionPlan, is_same_instance
from actorserve.clock import epoch_s, monotonic_s
from actorserve.errors import ActorserveError, BootError, DecoupledModel, Unavailable
from actorserve.runtime.exchange import ArenaSlab, HeldRef
from actorserve.state.lifecycle import State
from actorserve.state.statistics import MemoryUsage, ModelStatistics, Reason
from actorserve.triton.batch_signature import batch_signature
from actorserve.triton.inference import InferRequest, InferTensor
from actorserve.triton.request_validation import Checked
from actorserve.wire.messages import INLINE_BYTES, WireTensor


class VersionState(enum.Enum):
    """What a version is to clients; the values are those of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class VersionStats(msgspec.Struct, frozen=True):
    """Where a version stands."""

    version: str
    state: str
    reason: str
    scheduler: SchedulerStats
    instances: tuple[InstanceStats, ...]
    statistics: ModelStatistics  # without `memory_usage`, which costs a look at each process


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
        self.load_duration_s = 0.0
        self.counts = node.metrics.counts(plan.info.name, plan.info.version, plan.first_response_ms)
        self.counts.is_streamed = plan.info.decoupled
        self.counts.refusal_reason = Reason.OTHER if plan.refuses_for_us else Reason.BACKEND
        self._starting: list[Instance] = []
        self._settled: asyncio.Future[None] | None = None
        self._leaving: list[Instance] = []  # taken out by `adopt` and not gone yet
        is_ordered = plan.batching.preserve_ordering
        self._factory = OrderedFactory if is_ordered else ResponseFactory
        self._scheduler = (OrderedScheduler if is_ordered else Scheduler)(
            node,
            f"model '{plan.info.name}' version {plan.info.version}",
            plan.batching,
            plan.retries,
            self.counts,
        )
        self._instances = [Instance(node, each, self._scheduler) for each in plan.instances]
        self._scheduler.employ(self._instances, self._on_change)

    # --- life ------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start every instance; returns when all are ready. Raises BootError with the reason."""
        begun_s = monotonic_s()
        try:
            await self._start(self._instances)
        except asyncio.CancelledError:
            await self.unload(is_quick=True)
            raise
        except BootError as error:
            await self.unload(is_quick=True)
            self.reason = error.message
            raise
        if self.state is not VersionState.LOADING:
            raise Unavailable("it was unloaded before it had loaded")
        self.state = VersionState.READY
        self.load_duration_s = monotonic_s() - begun_s

    async def _start(self, instances: list[Instance]) -> None:
        """Start instances and wait until all are ready. Raises BootError with the reason."""
        self._starting = instances
        try:
            for instance in instances:
                instance.start()
            # Only now: an instance that is not started yet looks like one that was stopped.
            self._settled = self._node.loop.create_future()
            self._on_change()
            await self._settled
        finally:
            self._starting, self._settled = [], None
        failed = [each for each in instances if each.state is State.FATAL]
        if failed:
            raise BootError(failed[0].reason)

    def _on_change(self) -> None:
        """Look whether a start has come to an end."""
        settled = self._settled
        if settled is None or settled.done():
            return
        states = [instance.state for instance in self._starting]
        is_over = any(state in (State.FATAL, State.STOPPED) for state in states)
        if is_over or all(state is State.RUNNING for state in states):
            settled.set_result(None)

    # --- other plans -----------------------------------------------------------------------------

    def can_become(self, plan: VersionPlan) -> bool:
        """Whether nothing but the number of instances has to change, and all is well with them."""
        old = {each.name: each.plan for each in self._instances}
        both = [(old[each.name], each) for each in plan.instances if each.name in old]
        return self.is_ready and bool(both) and all(is_same_instance(a, b) for a, b in both)

    async def grow(self, plan: VersionPlan) -> list[Instance]:
        """Start the instances that another plan has beyond this one's; returns them ready.

        They get no work before `adopt`. Raises BootError where one fails; then none is left.
        """
        names = {each.name for each in self._instances}
        added = [
            Instance(self._node, each, self._scheduler)
            for each in plan.instances
            if each.name not in names
        ]
        try:
            await self._start(added)
        except BaseException:
            await _stop_all(added)
            raise
        return added

    def adopt(self, plan: VersionPlan, added: list[Instance]) -> None:
        """Go over to another plan, with what `grow` has made of it.

        Instances that it has not end when they have ended what they are at.
        """
        plans = {each.name: each for each in plan.instances}
        leaving = [each for each in self._instances if each.name not in plans]
        self._instances = [each for each in self._instances if each.name in plans] + added
        for instance in self._instances:
            instance.replan(plans[instance.name])
        self._plan, self.info, self.config_json = plan, plan.info, plan.config_json
        self._scheduler.employ(self._instances, self._on_change)
        self._scheduler.has_room()
        self._leaving += leaving
        for instance in leaving:
            self._node.run(self._let_go(instance))

    async def _let_go(self, instance: Instance) -> None:
        try:
            name = f"instance '{instance.name}'"
            await all_ended(instance.idle(), instance.kept, self._grace_s, name)
            await instance.stop()
        finally:
            if instance in self._leaving:
                self._leaving.remove(instance)

    async def unload(self, *, is_quick: bool = False, reason: str = "unloaded") -> None:
        """Refuse new requests, fail what is queued, finalize and end every instance."""
        if self.state is VersionState.UNAVAILABLE:
            return
        self.state = VersionState.UNLOADING
        # In reverse order of their start, as supervision trees end.
        instances = [*self._instances, *self._leaving]
        await asyncio.gather(*[each.stop(is_quick=is_quick) for each in reversed(instances)])
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

    async def ended(self) -> None:
        """Wait as `drained`; but a sender that is kept and says nothing has a limit."""

        def kept() -> list[ResponseFactory]:
            instances = (*self._instances, *self._leaving)
            return [factory for instance in instances for factory in instance.kept()]

        name = f"model '{self.info.name}' version {self.info.version}"
        await all_ended(self.drained(), kept, self._grace_s, name)

    @property
    def _grace_s(self) -> float:
        return self._node.settings.exit_timeout_s

    @property
    def pending(self) -> int:
        """How many accepted requests have no end yet."""
        return self._scheduler.pending

    def fail_all(self, error: Unavailable) -> None:
        """End every accepted request now, wherever it is."""
        self._scheduler.fail_all(error)

    # --- requests --------------------------------------------------------------------------------

    @property
    def devices(self) -> frozenset[tuple[str, str]]:
        """The devices on which its instances can take tensors: driver and UUID."""
        plans = [each.plan.initialize.device for each in self._instances]
        return frozenset((plan.driver, plan.uuid) for plan in plans if plan is not None)

    def submit(self, request: InferRequest, on_response: OnResponse) -> ResponseFactory:
        """Check and enqueue. Raises ActorserveError; slabs are then still the caller's."""
        if self.info.decoupled and not request.takes_stream:
            raise DecoupledModel(
                f"model '{self.info.name}' is decoupled and answers with any number of responses: "
                "ask it for a stream"
            )
        try:
            checked = self._rules.check(request)
            parameters = parameters_text(request)
            self._scheduler.check_available()
            signature = None
            if self._is_batched:
                signature = batch_signature(request.inputs, checked.inputs, self._ragged)
            inputs = self._wire_inputs(request, checked)
        except ActorserveError:
            self.counts.failed(Reason.OTHER, 0.0)
            raise
        factory = self._factory(
            self._node.ids.next(),
            request,
            self.info.version,
            inputs,
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
            self.counts.failed(Reason.REJECTED, 0.0)
            raise
        return factory

    def _wire_inputs(self, request: InferRequest, checked: Checked) -> list[WireTensor]:
        """Take the bodies over. Where memory runs out, nothing is kept: ResourceExhausted."""
        wires: list[WireTensor] = []
        try:
            for tensor, fitting in zip(request.inputs, checked.inputs):
                body = tensor.data
                if type(body) is bytes and len(body) <= INLINE_BYTES:  # most are
                    wires.append(WireTensor(tensor.name, fitting.datatype, fitting.shape, body))
                else:
                    wires.append(self._wire_input(tensor, fitting.datatype, fitting.shape))
        except ActorserveError:
            for wire in wires:
                self._node.exchange.drop_tensor(wire)
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
        elif isinstance(body, HeldRef):
            return WireTensor(tensor.name, datatype, shape, b"", body.take())
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

    async def check_ready(self, max_age_s: float = 0.0) -> bool:
        """Whether it is ready, and every instance's model says so, at most `max_age_s` ago."""
        if not self.is_ready:
            return False
        asked = [each for each in self._instances if each.has_readiness_hook]
        if not asked:
            return True
        said = await asyncio.gather(*[each.check_ready(max_age_s) for each in asked])
        return all(said) and self.is_ready

    @property
    def instances(self) -> list[Instance]:
        """The instances."""
        return self._instances

    def watch(self, now_s: float) -> None:
        """Look after hanging stubs."""
        for instance in dict.fromkeys((*self._instances, *self._starting, *self._leaving)):
            instance.watch(now_s)

    def pump(self) -> None:
        """Read what the stubs have written and not yet rung for."""
        for instance in (*self._instances, *self._leaving):
            instance.pump()

    def view(self) -> VersionView:
        """Return what its metrics are made of."""
        stats = self._scheduler.stats()
        gauges = VersionGauges(stats.queued, stats.in_flight)
        for instance in self._instances:
            gauges.backlog += instance.backlog
            state = instance.state.value
            gauges.states[state] = gauges.states.get(state, 0) + 1
        return VersionView(self._plan.metric_labels, self.counts, gauges, self.load_duration_s)

    def statistics(self) -> ModelStatistics:
        """Return what the statistics API says of it, the memory of its stubs included."""
        nbytes = sum(instance.resident_bytes() for instance in self._instances)
        return self._statistics((MemoryUsage("CPU", 0, nbytes),))

    def _statistics(self, memory: tuple[MemoryUsage, ...] = ()) -> ModelStatistics:
        name, version = self.info.name, self.info.version
        return self.counts.statistics(name, version, epoch_s=epoch_s(), memory=memory)

    def stats(self) -> VersionStats:
        """Return where it stands."""
        return VersionStats(
            self.info.version,
            self.state.value,
            self.reason,
            self._scheduler.stats(),
            tuple(instance.stats() for instance in self._instances),
            self._statistics(),
        )


async def _stop_all(instances: list[Instance]) -> None:
    await asyncio.gather(*[each.stop(is_quick=True) for each in instances])
