# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a process, and the protocol's number.

Who sends what, on which road (lanes are described in shm/lane.py, the boot socket in
process/boot.py):

    supervisor ── boot socket ──► stub   Hello, JoinGroup, MapSegment (with descriptors)
    supervisor ── boot socket ──► unpacker Unpack                     (with the archive's)
    stub       ── boot socket ──► superv. Attached, MapSegment         (with descriptors)
    either     ── boot socket ──► other   SlabOffer (with a descriptor); see device.py
    supervisor ── work lane ────► main    Initialize, AutoComplete, Execute, Finalize
    supervisor ── control lane ─► control Ping, Granted, CallMoved, AskReady, CancelTold,
                                          Disowned
    supervisor ── either lane ──► stub    CallResponded, Answered (the lane that was asked for)
    stub       ── up lane ──────► superv. PhaseEntered, Initialized, AutoCompleted, BootFailed,
                                          Executed, Responded, Finalized, LogRecord, Pong,
                                          Infer, CancelCall, MoveCall, Asked, MetricsChanged,
                                          SaidReady

All are tagged, frozen, array-like Structs: a change of field order is a change of PROTOCOL.
"""

from __future__ import annotations

import msgspec

from actorserve.wire.device import (
    DeviceBroken,
    DevicePlan,
    DeviceReleased,
    DevicesFound,
    FindDevices,
    SlabAccepted,
    SlabOffer,
    SlabRetired,
)
from actorserve.wire.device_ref import DeviceRef, Placement
from actorserve.wire.message import Message as Message
from actorserve.wire.questions import OpenFamily, OpenMetric, ReadMetric

PROTOCOL = 5
"""Both ends must agree; the handshake compares it (Hello, Attached)."""

INLINE_BYTES = 4096
"""A tensor body up to this size travels inside the frame, a larger one through an arena."""


class Handle(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where the bytes of a tensor lie: a block of some process's arena.

    `block` is the arena's number for this one allocation and is never used again, so that a stale
    handle can be told from a fresh one; `offset` and `nbytes` are in bytes, within `segment`.
    `shared` says that others hold the block too: its reader must not write into it.
    """

    arena: int
    block: int
    segment: int
    offset: int
    nbytes: int
    shared: bool = False


class WireTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor on the wire. `datatype` is the model API's number (1 BOOL … 13 BYTES, 14 BF16).

    `data` holds the little-endian, row-major bytes (BYTES: length-prefixed elements), or the
    handle of the block that does. It is empty where they lie on a `device`.
    """

    name: str
    datatype: int
    shape: tuple[int, ...]
    data: bytes | Handle
    device: DeviceRef | None = None


class WireError(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An error on the wire: the code of errors.Code and the text."""

    code: int
    message: str


class WireRequest(msgspec.Struct, frozen=True, array_like=True):
    """One inference request as the stub gets it.

    `id` is the server's (never reused), `request_id` the client's. `cancel_slot` is the index of
    the request's cancel word on the health page. `parameters` is a JSON object as text. Outputs
    may lie on a device where there is a `placement`.
    """

    id: int
    request_id: str
    inputs: list[WireTensor]
    requested_outputs: list[str]
    parameters: str = "{}"
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    cancel_slot: int = 0
    placement: Placement | None = None


class WireResponse(msgspec.Struct, frozen=True, array_like=True):
    """One response to the request `id`. With `error`, there are no outputs.

    `is_empty` is the bare end of a stream: `final`, and no response at all.
    """

    id: int
    outputs: list[WireTensor] = []
    error: WireError | None = None
    parameters: str = "{}"
    final: bool = True
    is_empty: bool = False


# --- what a model may ask the supervisor (Asked); more of it stands in questions.py ---------------


class LoadModel(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Load or reload a model; the answer comes when it serves. No result.

    `config` is JSON instead of the model's own configuration. `files` maps the names of the API
    ("file:1/model.py") to contents, and is then all that the model's directory holds.
    """

    name: str
    config: str = ""
    files: dict[str, bytes | Handle] = {}


class UnloadModel(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Unload a model; the answer comes when it takes no new requests. No result."""

    name: str
    unload_dependents: bool = False


class CheckModelReady(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Ask whether a version (the highest, where it is empty) is ready; the result is a bool."""

    name: str
    version: str = ""


Question = LoadModel | UnloadModel | CheckModelReady | OpenFamily | OpenMetric | ReadMetric
Result = bool | int | float | str | None

# --- boot socket ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """Open the handshake. Its descriptors stand in the order of `runtime.channel.HELLO_FDS`.

    `arena` is the number of the child's own arena, with the sizes it grows by (bytes).
    """

    protocol: int
    instance: str
    arena: int
    first_segment_bytes: int
    growth_bytes: int
    version: str


class Attached(Message, frozen=True, tag=2):
    """Answer Hello: the child mapped everything. A wrong protocol is a boot error."""

    protocol: int
    python: str
    pid: int


class MapSegment(Message, frozen=True, tag=3):
    """Carry one descriptor: segment number `segment` of arena `arena`, `nbytes` long."""

    arena: int
    segment: int
    nbytes: int


class Unpack(Message, frozen=True, tag=4):
    """Unpack the archive whose descriptor comes along; only for process/unpacker.py.

    It sends the same back when that is done.
    """


class JoinGroup(Message, frozen=True, tag=5):
    """Be rank `rank` of `size`, in the group's life number `epoch`; right behind Hello.

    Its descriptors: the board, the broadcast ring, the space of the collectives, and the bells of
    all ranks, in order, each one descriptor or two.
    """

    rank: int
    size: int
    epoch: int


# --- supervisor to stub --------------------------------------------------------------------------


class Initialize(Message, frozen=True, tag=10):
    """Import the model and call `initialize(args)`; `args` holds the seven strings of the API.

    `concurrent_executes` is how many batches an asynchronous `execute` may have at a time;
    `device` is what the model works on beside the CPU.
    """

    model_path: str
    args: dict[str, str]
    decoupled: bool
    max_batch_size: int
    shared_inputs: bool = False
    concurrent_executes: int = 1
    device: DevicePlan | None = None


class AutoComplete(Message, frozen=True, tag=11):
    """Import the model and call `auto_complete_config`, in a throw-away stub.

    `model_dir` is the version's folder, which is not the file's with a Python-based backend.
    """

    model_path: str
    model_name: str
    config_json: str
    model_dir: str


class Execute(Message, frozen=True, tag=12):
    """Run one batch."""

    batch: int
    requests: list[WireRequest]


class Finalize(Message, frozen=True, tag=13):
    """Call `finalize`, answer Finalized and end."""


class Ping(Message, frozen=True, tag=14):
    """Ask the control thread for a Pong."""

    number: int


class CallResponded(Message, frozen=True, tag=15):
    """Responses to calls of the stub's model (Infer); each one's `id` is the call's number."""

    responses: list[WireResponse]


class Granted(Message, frozen=True, tag=16):
    """Wake the senders of these requests: the page has more credit for them, or they may drop."""

    requests: list[int]


class CallMoved(Message, frozen=True, tag=17):
    """Answer MoveCall: what comes for the call from now on comes on the control lane."""

    call: int


class Answered(Message, frozen=True, tag=18):
    """Answer Asked: with the question's result, or with an error."""

    number: int
    result: Result = None
    error: WireError | None = None


class AskReady(Message, frozen=True, tag=19):
    """Ask the model's `is_ready`; the answer is SaidReady. One at a time."""

    number: int


class CancelTold(Message, frozen=True, tag=20):
    """Say that the cancel words of these requests are set, to a stub that may wait for that."""

    requests: list[int]


class Disowned(Message, frozen=True, tag=28):
    """Say that nobody hears of these requests any more: the stub is to end them.

    They have outlived their batches; the model, which has kept their senders, may never end them.
    """

    requests: list[int]


# --- stub to supervisor --------------------------------------------------------------------------


class PhaseEntered(Message, frozen=True, tag=30):
    """The stub's main thread entered a phase of loading: "importing", "initializing", …."""

    phase: str


class Initialized(Message, frozen=True, tag=31):
    """The model is ready to execute. `device` is the UUID of what it works on, "" for none."""

    is_async: bool = False
    has_is_ready: bool = False
    device: str = ""


class AutoCompleted(Message, frozen=True, tag=32):
    """The model's own answer to auto_complete_config, or None where it has no such method."""

    config_json: str | None


class BootFailed(Message, frozen=True, tag=33):
    """Loading failed for a reason that a retry does not cure; `reason` is for people."""

    reason: str
    traceback: str = ""


class Executed(Message, frozen=True, tag=34):
    """A batch is done and the instance free; the responses that were not sent before.

    `execute_ns` is the time that the user's code took, 0 where it was not called; `input_ns` and
    `output_ns` are what lies before and behind it. The requests in `still_open` will be answered
    later, by Responded.
    """

    batch: int
    responses: list[WireResponse]
    execute_ns: int = 0
    still_open: list[int] = msgspec.field(default_factory=list)
    input_ns: int = 0
    output_ns: int = 0


class Responded(Message, frozen=True, tag=35):
    """Responses that are sent while their batch still runs, or after it."""

    responses: list[WireResponse]


class Finalized(Message, frozen=True, tag=36):
    """`finalize` returned; `error` is its exception as text, if any."""

    error: str | None = None


class LogRecord(Message, frozen=True, tag=37):
    """A line for the server's log. `level` is 0 info, 1 warning, 2 error, 3 verbose."""

    level: int
    file: str
    line: int
    message: str


class Pong(Message, frozen=True, tag=38):
    """Answer Ping."""

    number: int
    arena_used_bytes: int = 0


class Infer(Message, frozen=True, tag=39):
    """Call another model. `call` numbers the calls of this stub and is never used again.

    `model_version` -1 lets the server choose. `waits` says that the stub's main thread does
    nothing until the answer is there. `parents` are the requests on whose behalf the call is made,
    as far as they are known. With `decoupled`, any number of responses may come; `placement` says
    where their tensors may lie.
    """

    call: int
    model_name: str
    model_version: int
    request_id: str
    inputs: list[WireTensor]
    requested_outputs: list[str]
    parameters: str = "{}"
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    decoupled: bool = False
    on_control: bool = False
    waits: bool = False
    parents: list[int] = msgspec.field(default_factory=list)
    placement: Placement | None = None


class CancelCall(Message, frozen=True, tag=40):
    """Cancel a call; where it `is_dropped`, nobody wants its responses either."""

    call: int
    is_dropped: bool = False


class CallTaken(Message, frozen=True, tag=45):
    """Say that the caller has looked at `count` more responses of a stream."""

    call: int
    count: int


class MoveCall(Message, frozen=True, tag=41):
    """Send what comes for a call on the control lane: another thread than the main one waits."""

    call: int


class Asked(Message, frozen=True, tag=42):
    """Ask for what somebody in the stub waits for.

    `number` counts the questions of this stub; `on_control` says which lane the answer takes: the
    work lane where the main thread itself waits, else the control lane.
    """

    number: int
    question: Question
    on_control: bool = False


class SaidReady(Message, frozen=True, tag=44):
    """Answer AskReady; `problem` says what went wrong where `is_ready` did not return a bool."""

    number: int
    is_ready: bool
    problem: str = ""


class MetricsChanged(Message, frozen=True, tag=43):
    """What the model did to its metrics, in order: (what, the handle's number, the amount).

    What it is is a number of state.metric_registry.Change.
    """

    changes: list[tuple[int, int, float]]


ToStub = (
    Initialize
    | AutoComplete
    | Execute
    | Finalize
    | Ping
    | CallResponded
    | Granted
    | CallMoved
    | Answered
    | AskReady
    | CancelTold
    | Disowned
    | DeviceReleased
    | SlabRetired
)
ToSupervisor = (
    PhaseEntered
    | Initialized
    | AutoCompleted
    | BootFailed
    | Executed
    | Responded
    | Finalized
    | LogRecord
    | Pong
    | Infer
    | CancelCall
    | CallTaken
    | MoveCall
    | Asked
    | MetricsChanged
    | SaidReady
    | DeviceReleased
    | SlabAccepted
    | SlabRetired
    | DeviceBroken
)
OnBootSocket = (
    Hello | Attached | MapSegment | Unpack | JoinGroup | SlabOffer | FindDevices | DevicesFound
)
