# SPDX-License-Identifier: Apache-2.0
"""The bodies of POST …/generate and …/generate_stream: flat JSON to a request, responses to JSON.

Pure: no I/O. A member named like an input of the model is that tensor, every other one is a
parameter; `parameters` is an object whose members count as if they stood beside it.

    {"id": "7", "TEXT": "hello", "parameters": {"temperature": 0.5, "timeout": 100000}}

A response is as flat: outputs and parameters are members, in the order of their names. An output
of one element is that element, any other one an array without its shape.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actorserve.errors import InternalError, InvalidArgument
from actorserve.frontend.v2_request import UNKNOWN_ID, OutputChoice, take_parameters
from actorserve.frontend.v2_response import body_bytes, encode_error
from actorserve.frontend.v2_values import FLAT_RULE, flat_values, json_of_body, pack_values
from actorserve.triton.inference import (
    InferRequest,
    InferResponse,
    InferTensor,
    ModelInfo,
    TensorSpec,
)
from actorserve.wire.tensors import BY_WIRE_NAME, DataType

_Members = dict[str, msgspec.Raw]

_ID = "id"
_PARAMETERS = "parameters"
_NULL = b"null"
_decode_members = msgspec.json.Decoder(_Members).decode
_decode_any = msgspec.json.Decoder(Any).decode
_encode = msgspec.json.Encoder().encode


# --- requests ------------------------------------------------------------------------------------


def parse_generate(
    document: bytes | bytearray | memoryview, info: ModelInfo, version: str, max_input_bytes: int
) -> InferRequest:
    """Read the document of a request to a model's version ("" for the policy's choice).

    `max_input_bytes` bounds all tensors together, as a character or two of JSON may be eight
    bytes. Raises InvalidArgument for anything a client got wrong; whether the inputs are all that
    the model needs is not looked at here. `null` stands for an absent input, id or `parameters`.
    """
    request = InferRequest(info.name, [], version, takes_stream=True)
    reading = _Reading(request, info, max_input_bytes)
    members = _decode_document(document)
    if not reading.is_input(_ID):
        request.id = _read_id(members.pop(_ID, None))
    nested = members.pop(_PARAMETERS, None)
    if nested is not None and reading.is_input(_PARAMETERS):
        raise InvalidArgument(
            f"keyword '{_PARAMETERS}' for nested schema also given as input tensor name"
        )
    reading.take(members)
    if nested is not None and not _is_null(nested):
        reading.take(_decode_nested(nested))
    if reading.parameters:
        request.parameters = {}
        take_parameters(request, OutputChoice(), reading.parameters)
    return request


class _Reading:
    """The state of reading one document: its members become inputs and parameters."""

    def __init__(self, request: InferRequest, info: ModelInfo, max_input_bytes: int) -> None:
        self.parameters: dict[str, Any] = {}
        self._request = request
        self._specs = {spec.name: spec for spec in info.inputs}
        self._has_batch = info.max_batch_size > 0
        self._limit_bytes = max_input_bytes
        self._nbytes = 0
        self._given: set[str] = set()

    def is_input(self, name: str) -> bool:
        """Whether the model has an input of this name."""
        return name in self._specs

    def take(self, members: _Members) -> None:
        """Take the members of one level; what both levels name is refused."""
        for name, value in members.items():
            spec = self._specs.get(name)
            if spec is None:
                if name in self.parameters:
                    raise InvalidArgument(f"'{name}' is given in '{_PARAMETERS}' and beside it")
                self.parameters[name] = _plain(name, value)
            elif not _is_null(value):
                if name in self._given:
                    raise InvalidArgument(
                        f"[request id: {self._request.id or UNKNOWN_ID}] input '{name}' "
                        "already exists in request"
                    )
                self._given.add(name)
                self._request.inputs.append(self._read_input(spec, value))

    def _read_input(self, spec: TensorSpec, value: msgspec.Raw) -> InferTensor:
        datatype = BY_WIRE_NAME.get(spec.datatype, DataType.INVALID)
        values = flat_values(spec.name, datatype, value)
        shape = shape_of(spec, self._has_batch, len(values))
        self._count(spec.name, len(values) * datatype.element_bytes)
        body = pack_values(spec.name, datatype, values)
        if datatype is DataType.BYTES:
            self._count(spec.name, len(body))
        return InferTensor(spec.name, spec.datatype, shape, body)

    def _count(self, name: str, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > self._limit_bytes:
            raise InvalidArgument(
                f"input '{name}' makes the request's tensors {self._nbytes} bytes, which exceeds "
                f"the maximum allowed input size of {self._limit_bytes} bytes. "
                "Use --http-max-input-size to increase the limit."
            )


def shape_of(spec: TensorSpec, has_batch: bool, count: int) -> tuple[int, ...]:
    """Return the shape of an input that was given as `count` elements in a row.

    The batch is 1, and one free dimension takes what the others leave; where there are more, only
    the least request has one shape, that in which all of them are 1. Raises InvalidArgument where
    there is none.
    """
    shape = list(spec.shape)
    if has_batch and shape:
        shape[0] = 1
    known = 1
    for extent in shape:
        known *= extent if extent >= 0 else 1
    free = [at for at, extent in enumerate(shape) if extent < 0]
    if len(free) == 1 and known and count % known == 0:
        shape[free[0]] = count // known
    elif count == known:
        for at in free:
            shape[at] = 1
    else:
        raise InvalidArgument(
            f"The schema can not convert input '{spec.name}' to tensor with proper shape: "
            f"the model expects {list(spec.shape)}, got {count} elements ({FLAT_RULE})"
        )
    return tuple(shape)


def _decode_document(document: bytes | bytearray | memoryview) -> _Members:
    try:
        return _decode_members(document)
    except msgspec.ValidationError as error:
        text = f"Unable to parse the request JSON: {error}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"failed to parse the request JSON buffer of {len(document)} bytes: {error}"
        if any(word in bytes(document) for word in (b"NaN", b"Infinity")):
            text += " (NaN and Infinity are not JSON: send them as binary data to infer)"
    except RecursionError:
        text = "failed to parse the request JSON buffer: it is nested too deeply"
    raise InvalidArgument(text)


def _decode_nested(value: msgspec.Raw) -> _Members:
    try:
        return _decode_members(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"Unable to parse '{_PARAMETERS}': {error}") from None


def _plain(name: str, value: msgspec.Raw) -> Any:
    try:
        return _decode_any(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(f"Unable to parse '{name}': {error}") from None


def _read_id(value: msgspec.Raw | None) -> str:
    found = "" if value is None or _is_null(value) else _plain(_ID, value)
    if not isinstance(found, str):
        raise InvalidArgument(f"Unable to parse '{_ID}': expected a string")
    return found


def _is_null(value: msgspec.Raw) -> bool:
    return memoryview(value) == _NULL


# --- responses -----------------------------------------------------------------------------------


class GenerateEncoder:
    """Responses to one request as JSON objects.

    All responses of a stream mostly have the same outputs and no parameters: what stands between
    their values is made once. `strict_json` refuses NaN and Infinity, as for /infer.
    """

    __slots__ = ("_between", "_names", "_strict_json")

    def __init__(self, strict_json: bool) -> None:
        self._strict_json = strict_json
        self._names: list[str] | None = None
        self._between: list[tuple[bytes, int]] = []

    def encode(self, response: InferResponse) -> bytes:
        """Return a response without an error as one JSON object.

        The names of the server's own members win, then those of outputs. Raises InvalidArgument
        for an output that JSON cannot carry, InternalError for one that cannot be what it says.
        """
        outputs = response.outputs
        names = [tensor.name for tensor in outputs]
        if response.parameters or len(set(names)) != len(names):
            return self._encode_anew(response)
        if names != self._names:
            self._learn(response, names)
        pieces: list[bytes] = []
        for text, index in self._between:
            pieces.append(text)
            if index >= 0:
                pieces.append(self._value(outputs[index]))
        return b"".join(pieces)

    def _learn(self, response: InferResponse, names: list[str]) -> None:
        """Make what stands between the values of these outputs, with the value's index behind."""
        members: dict[str, int | bytes] = {name: at for at, name in enumerate(names)}
        members.update(_own_members(response))
        between: list[tuple[bytes, int]] = []
        text = b"{"
        for name in sorted(members):
            member = members[name]
            text += _encode(name) + b":"
            if isinstance(member, int):
                between.append((text, member))
                text = b","
            else:
                text += member + b","
        between.append((text[:-1] + b"}", -1) if text != b"," else (b"}", -1))
        self._names, self._between = names, between

    def _encode_anew(self, response: InferResponse) -> bytes:
        members = {name: _encode(value) for name, value in response.parameters.items()}
        for tensor in reversed(response.outputs):  # of two with one name, the first counts
            members[tensor.name] = self._value(tensor)
        members.update(_own_members(response))
        text = b",".join([b"%b:%b" % (_encode(name), members[name]) for name in sorted(members)])
        return b"{%b}" % text

    def _value(self, tensor: InferTensor) -> bytes:
        datatype = BY_WIRE_NAME.get(tensor.datatype)
        if datatype is None:
            raise InternalError(f"output '{tensor.name}' has no datatype: {tensor.datatype!r}")
        return bytes(
            json_of_body(tensor.name, datatype, body_bytes(tensor), self._strict_json, unwrap=True)
        )


def _own_members(response: InferResponse) -> dict[str, bytes]:
    members = {
        "model_name": _encode(response.model_name),
        "model_version": _encode(response.model_version),
    }
    if response.id:
        members[_ID] = _encode(response.id)
    return members


def event(text: bytes) -> bytes:
    """Return a JSON text as a server-sent event; it holds no line break, as JSON of ours never."""
    return b"data: %b\n\n" % text


def error_event(message: str) -> bytes:
    """Return an error inside a stream as an event."""
    return event(encode_error(message))
