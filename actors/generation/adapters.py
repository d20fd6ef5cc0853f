# SPDX-License-Identifier: Apache-2.0
"""Which adapters the engine has, and which requests wait for one.

    first request with an adapter ─► Call load_adapter ─► loaded: whoever waits is sent
                                                      └─► failed: whoever waits gets that error

What always holds: a request with an adapter is sent only when that adapter is loaded, and one
number stands for one name and one path as long as it is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from actorserve.actors.generation.request import LoRARequest
from actorserve.errors import ActorserveError, InvalidArgument
from actorserve.runtime.answer import Answer
from actorserve.wire.generation import GenRequest


class _Adapter:
    __slots__ = ("answer", "lora", "parked")

    def __init__(self, lora: LoRARequest) -> None:
        self.lora = lora
        self.answer: Answer[Any] | None = None
        self.parked: list[GenRequest] = []

    @property
    def is_loaded(self) -> bool:
        """As its answer says: whoever waits for that may come here before we have heard of it."""
        answer = self.answer
        return answer is not None and answer.is_over() and not answer.has_failed()


class AdapterDesk:
    """The adapters of one executor.

    `start_call(method, args)` reaches the engine, `send(requests)` submits, `abort(ids)` ends what
    was submitted, `fail(id, error)` a request that was never sent.
    """

    def __init__(
        self,
        start_call: Callable[[str, list[Any]], Answer[Any]],
        send: Callable[[list[GenRequest]], None],
        abort: Callable[[list[int]], None],
        fail: Callable[[int, ActorserveError], object],
    ) -> None:
        self._start_call = start_call
        self._send = send
        self._abort = abort
        self._fail = fail
        self._adapters: dict[int, _Adapter] = {}
        self._parked: set[int] = set()
        self._sending: set[int] = set()
        self._on_idle: list[Callable[[], object]] = []
        self._overtaken: list[int] = []  # given up by a finalizer while they were being sent
        self._lock = threading.RLock()  # a finalizer may come here while its thread is here

    @property
    def loaded(self) -> list[LoRARequest]:
        """The adapters that requests can have without waiting."""
        return [each.lora for each in list(self._adapters.values()) if each.is_loaded]

    def check(self, lora: LoRARequest) -> None:
        """Raise InvalidArgument if its number stands for another adapter."""
        known = self._adapters.get(lora.lora_int_id)
        if known is not None and known.lora != lora:
            raise InvalidArgument(
                f"adapter {lora.lora_int_id} is {known.lora.lora_name!r}"
                f" ({known.lora.lora_path}), not {lora.lora_name!r} ({lora.lora_path});"
                " unload that one, or use another number"
            )

    def route(self, lora: LoRARequest, request: GenRequest) -> bool:
        """Whether a request can be sent now; it is sent from here otherwise, once it can."""
        with self._lock:
            self.check(lora)
            adapter = self._adapters.get(lora.lora_int_id)
            if adapter is not None and adapter.is_loaded:
                return True
            self._parked.add(request.id)
            if adapter is not None:
                adapter.parked.append(request)
                return False
            adapter = self._adapters[lora.lora_int_id] = _Adapter(lora)
            adapter.parked.append(request)
            self._load(adapter)
        return False

    def load(self, lora: LoRARequest) -> Answer[Any]:
        """Load an adapter; an answer that comes at once if it is there, or on its way."""
        with self._lock:
            self.check(lora)
            adapter = self._adapters.get(lora.lora_int_id)
            if adapter is not None and adapter.answer is not None:
                return adapter.answer
            adapter = self._adapters[lora.lora_int_id] = _Adapter(lora)
            return self._load(adapter)

    def unload(self, number: int) -> Answer[Any]:
        """Unload an adapter; requests that have it already are the engine's business."""
        with self._lock:
            self._adapters.pop(number, None)
        return self._start_call("unload_adapter", [number])

    def take_back(self, number: int) -> bool:
        """Take back a request that was not sent yet; False if there is none.

        False also means that the request has been sent: an abort comes after it.
        """
        if number not in self._parked:
            return False
        with self._lock:
            if number in self._sending:
                self._overtaken.append(number)
                return False
            if number not in self._parked:
                return False
            self._parked.discard(number)
            for adapter in self._adapters.values():
                adapter.parked = [each for each in adapter.parked if each.id != number]
        self._tell_idle()
        return True

    def when_idle(self, on_idle: Callable[[], object]) -> None:
        """Have it called, once, when no request waits for an adapter; at once if none does."""
        with self._lock:
            self._on_idle.append(on_idle)
        self._tell_idle()

    def forget(self) -> None:
        """Forget everything: the engine is a new one."""
        with self._lock:
            self._adapters.clear()
            self._parked.clear()
        self._tell_idle()

    def _load(self, adapter: _Adapter) -> Answer[Any]:
        lora = adapter.lora
        try:
            answer = self._start_call("load_adapter", [lora.lora_int_id, lora.lora_path])
        except ActorserveError as error:
            self._end(adapter, error)
            raise
        adapter.answer = answer

        def ended() -> None:
            self._end(adapter, _error_of(answer))

        answer.listen(ended)
        if answer.is_over():
            ended()  # it may have been over before anybody listened; twice does no harm
        return answer

    def _end(self, adapter: _Adapter, error: ActorserveError | None) -> None:
        with self._lock:
            parked, adapter.parked = adapter.parked, []
            if error is None:
                self._send_in_order(parked)
            self._parked.difference_update(each.id for each in parked)
            number = adapter.lora.lora_int_id
            if error is not None and self._adapters.get(number) is adapter:
                del self._adapters[number]  # the next request tries again
        if error is not None:
            for request in parked:
                self._fail(request.id, error)
        self._tell_idle()

    def _tell_idle(self) -> None:
        with self._lock:
            listeners = [] if self._parked else self._on_idle
            if listeners:
                self._on_idle = []
        for on_idle in listeners:
            on_idle()

    def _send_in_order(self, parked: list[GenRequest]) -> None:
        """Send what waited, under the lock, so that no abort of it can come first."""
        if not parked:
            return
        self._sending.update(each.id for each in parked)
        self._send(parked)
        self._sending.difference_update(each.id for each in parked)
        overtaken, self._overtaken = self._overtaken, []
        if overtaken:
            self._abort(overtaken)


def _error_of(answer: Answer[Any]) -> ActorserveError | None:
    try:
        answer.outcome()
    except ActorserveError as error:
        return error
    return None
