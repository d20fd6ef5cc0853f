# SPDX-License-Identifier: Apache-2.0
"""The stub: one process that runs one instance of a model.

    boot socket ─► StubEnd ─► receive ─► Initialize   import the model, initialize(args)
                                         AutoComplete auto_complete_config, then end
                                         Execute      Execution ─► Executed
                                         Finalize     finalize(), then end

The main thread runs the user's code: an asynchronous `execute` in its event loop (stub_loop.py).
A control thread beats, answers pings, and hands on what other threads wait for. User code is
called in one place per hook, and only there is BaseException caught.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actorserve.actors.bodies import Bodies
from actorserve.actors.calls import Calls
from actorserve.actors.execution import Execution
from actorserve.actors.failed_code import watch_threads
from actorserve.actors.forked import end_if_forked
from actorserve.actors.lineage import follow_threads
from actorserve.actors.questions import Questions
from actorserve.actors.readiness_hook import ReadinessHook
from actorserve.actors.stub_device import LostWatch, open_device
from actorserve.actors.stub_log import StubLog
from actorserve.actors.stub_loop import StubLoop
from actorserve.actors.stub_metrics import StubMetrics
from actorserve.actors.stub_model_control import StubModelControl
from actorserve.errors import ActorserveError, ProtocolError
from actorserve.fault import fault_point
from actorserve.runtime.child import BootSocket, PeerGone
from actorserve.runtime.control_thread import start_control_thread
from actorserve.runtime.stub_end import StubEnd
from actorserve.state.lifecycle import Phase
from actorserve.triton import importing
from actorserve.triton.calling import set_caller
from actorserve.triton.failure import format_exception
from actorserve.triton.logger import set_sink
from actorserve.triton.metric import set_metric_store
from actorserve.triton.model_config_builder import ModelConfig
from actorserve.triton.model_control import set_controller
from actorserve.wire.device import DeviceReleased, SlabRetired
from actorserve.wire.messages import (
    Answered,
    AskReady,
    AutoComplete,
    AutoCompleted,
    BootFailed,
    CallMoved,
    CallResponded,
    CancelTold,
    Disowned,
    Execute,
    Finalize,
    Finalized,
    Granted,
    Initialize,
    Initialized,
    PhaseEntered,
    ToStub,
)

_OWN = (__name__, importing.__name__)
_NUMBER = {phase: number for number, phase in enumerate(Phase)}


def main(boot: BootSocket) -> None:
    """Serve one instance until the supervisor says so or is gone. The child's entry function."""
    try:
        end = StubEnd(boot)
    except PeerGone:
        os._exit(0)
    stub = Stub(end)
    watch_threads()
    follow_threads()
    start_control_thread(end)
    try:
        stub.run()
    except PeerGone:
        # Nobody is left to answer; a model's threads and atexit hooks must not keep us here.
        os._exit(0)


class Stub:
    """The main thread's life: one message after the other."""

    def __init__(self, end: StubEnd) -> None:
        self._end = end
        self.questions = Questions(end)
        self._metrics = StubMetrics(end, self.questions)
        self._log = StubLog(end)
        self._lost_watch = LostWatch()
        self._readiness: ReadinessHook | None = None
        self._model: Any = None
        self._execution: Execution | None = None
        self._calls: Calls | None = None
        self._loop: StubLoop | None = None
        end.take_work = self._take_work
        end.take_control = self._take_control
        end.reap = self._reap

    def run(self) -> None:
        """Answer messages until Finalize, or until loading failed."""
        end = self._end
        importing.install()
        set_sink(self._log.write)
        atexit.register(self._log.drain)  # after the model's exit functions, which come later
        while True:
            message = end.receive()
            if isinstance(message, Execute):
                if self._execution is None:
                    raise ProtocolError("Execute came before Initialize")
                self._execution.run(message)
            elif isinstance(message, Initialize):
                if not self._initialize(message):
                    return
                if self._loop is not None:
                    self._loop.run()
                    self._finalize()
                    return
            elif isinstance(message, AutoComplete):
                self._auto_complete(message)
                return
            elif isinstance(message, Finalize):
                self._finalize()
                return
            message = None  # type: ignore[assignment]  # nothing may outlive its batch here

    # --- what does not wait for the main thread --------------------------------------------------

    def _take_work(self, message: ToStub) -> bool:
        if isinstance(message, CallResponded) and self._calls is not None:
            self._calls.take(message.responses)
            return True
        if isinstance(message, Answered):
            self.questions.take(message)
            return True
        if isinstance(message, DeviceReleased):
            if self._end.devices is not None:
                self._end.devices.returned(message)
            return True
        return False

    def _take_control(self, message: ToStub) -> None:
        if isinstance(message, Granted):
            if self._execution is not None:
                self._execution.replies.granted(message.requests)
        elif isinstance(message, CancelTold):
            if self._execution is not None:
                self._execution.replies.cancel_told(message.requests)
        elif isinstance(message, Disowned):
            if self._execution is not None:
                self._execution.replies.disowned(message.requests)
        elif isinstance(message, Answered):
            self.questions.take(message)
        elif isinstance(message, SlabRetired):
            if self._end.devices is not None:
                self._end.devices.retire(message)
        elif isinstance(message, AskReady):
            if self._readiness is not None:
                self._readiness.ask(message.number)
        elif self._calls is not None:
            if isinstance(message, CallResponded):
                self._calls.take(message.responses)
            elif isinstance(message, CallMoved):
                self._calls.moved()

    def _reap(self) -> None:
        self._log.tick()
        self._metrics.flush()
        if self._calls is not None:
            self._calls.reap()
        if self._execution is not None:
            self._execution.replies.reap()
        self._lost_watch.look(self._end.devices)

    # --- loading ---------------------------------------------------------------------------------

    def _initialize(self, message: Initialize) -> bool:
        """Import and initialize the model; False where that failed, with the reason sent."""
        end = self._end
        args = message.args
        set_metric_store(self._metrics)
        importing.set_model_dir(str(Path(args["model_repository"], args["model_version"])))
        if message.device is not None:
            open_device(end, message.device)
        model = self._guard(lambda: self._construct(message.model_path), message.model_path)
        if model is None:
            return False
        self._model = model[0]
        end.send(PhaseEntered("initializing"))
        end.page.enter_phase(_NUMBER[Phase.INITIALIZING])
        set_controller(StubModelControl(end, self.questions))
        initialize = getattr(self._model, "initialize", None)
        if initialize is not None:
            fault_point("stub.initialize")
            if self._guard(lambda: initialize(message.args), message.model_path) is None:
                return False
        bodies = Bodies(end, shared_inputs=message.shared_inputs)
        self._calls = Calls(end, bodies)
        self._execution = Execution(end, self._model, message, bodies)
        self._execution.replies.before_send = self._metrics.flush
        if self._execution.is_async:
            limit = message.concurrent_executes
            self._loop = StubLoop(end, self._execution, self._calls, limit)
            self.questions.after_main_wait = self._calls.after_main_wait
        set_caller(self._calls)
        end.page.enter_phase(_NUMBER[Phase.IDLE])
        self._metrics.flush()
        hook = getattr(self._model, "is_ready", None)
        if callable(hook):
            loop = self._calls.main_loop
            self._readiness = ReadinessHook(end, hook, message.model_path, loop)
        device = end.devices.uuid if end.devices is not None else ""
        end.send(Initialized(self._execution.is_async, self._readiness is not None, device))
        return True

    def _construct(self, model_path: str) -> Any:
        """Import model.py and build its TritonPythonModel."""
        self._end.send(PhaseEntered("importing"))
        self._end.page.enter_phase(_NUMBER[Phase.IMPORTING])
        fault_point("stub.import")
        return importing.load_model_class(model_path)()

    def _guard(self, step: Callable[[], Any], model_path: str) -> tuple[Any] | None:
        """Run a step of loading; where user code raised, send BootFailed and return None."""
        try:
            result = step()
            end_if_forked(self._end)
            return (result,)
        except PeerGone:
            raise
        except BaseException as error:
            end_if_forked(self._end, error)
            reason = format_exception(error, model_path)
            if not isinstance(error, ActorserveError):
                _print_traceback(error)
            self._end.send(BootFailed(reason))
            return None

    def _auto_complete(self, message: AutoComplete) -> None:
        """Ask the model to complete its configuration, and send what it says."""
        importing.set_model_dir(message.model_dir)

        def ask() -> str | None:
            self._end.send(PhaseEntered("importing"))
            model_class = importing.load_model_class(message.model_path)
            hook = getattr(model_class, "auto_complete_config", None)
            if hook is None:
                return None
            self._end.send(PhaseEntered("completing the configuration"))
            completed = hook(ModelConfig(message.config_json))
            if not isinstance(completed, ModelConfig):
                raise ActorserveError(
                    f"auto_complete_config function in model '{message.model_name}' must return "
                    "a valid pb.ModelConfig object."
                )
            return json.dumps(completed.as_dict())

        answer = self._guard(ask, message.model_path)
        if answer is not None:
            self._end.send(AutoCompleted(answer[0]))

    def _finalize(self) -> None:
        """Call finalize; an error is reported, never raised."""
        end = self._end
        end.page.enter_phase(_NUMBER[Phase.FINALIZING])
        error = None
        set_caller(None)
        set_controller(None)
        finalize = getattr(self._model, "finalize", None)
        if self._loop is not None and finalize is not None:
            self._loop.hand_over()
        if finalize is not None:
            try:
                fault_point("stub.finalize")
                finalize()
                end_if_forked(end)
            except BaseException as problem:
                end_if_forked(end, problem)
                error = format_exception(problem, "")
        if self._loop is not None:
            self._loop.close()
        self._model = None
        self._metrics.flush()
        self._log.drain()
        end.send(Finalized(error))


def _print_traceback(error: BaseException) -> None:
    """Print the traceback of user code: from where it was entered, without the frames before."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _OWN:
        trace = trace.tb_next
    with contextlib.suppress(Exception):  # whatever a __str__ may do
        traceback.print_exception(type(error), error, trace or error.__traceback__)
