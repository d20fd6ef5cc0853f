# SPDX-License-Identifier: Apache-2.0
"""The body of POST …/infer to an InferRequest.

Pure: no I/O, no memory of the server's. A body is the JSON document and, after it, the binary
blocks of those inputs that have a `binary_data_size`, in their order. The document alone makes a
Draft: a request whose binary inputs still lack their bytes, and the list of blocks that are to
come, so that a caller can lead each block to its place as it arrives.

Members that nobody knows are ignored, `null` stands for an absent optional member, and of a key
that is given twice the last one counts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actorserve.errors import InvalidArgument, Unsupported
from actorserve.frontend.v2_values import body_of_json
from actorserve.triton.inference import InferRequest, InferTensor, ModelInfo, Parameter
from actorserve.wire.tensors import BY_WIRE_NAME, LENGTH_BYTES, DataType, element_count

UNKNOWN_ID = "<id_unknown>"
MAX_INT64 = (1 << 63) - 1
MAX_UINT64 = (1 << 64) - 1

_NO_DATA = msgspec.Raw(b"")


class OutputChoice(msgspec.Struct):
    """Which outputs a client wants as binary blocks: `binary` by name, `default` for the others."""

    default: bool = False
    binary: dict[str, bool] = {}

    def is_binary(self, name: str) -> bool:
        """Whether this output goes into a block of its own."""
        return self.binary.get(name, self.default)


class Block(msgspec.Struct, frozen=True):
    """A binary block that follows the document: the body of the input with this index.

    `prefix` stands in front of the block in the input's body (raw requests to BYTES inputs).
    """

    index: int
    nbytes: int
    prefix: bytes = b""


class Draft(msgspec.Struct):
    """A request whose `blocks` have not been put into its inputs yet."""

    request: InferRequest
    blocks: list[Block]
    choice: OutputChoice

    @property
    def block_bytes(self) -> int:
        """How many bytes have to follow the document."""
        return sum(block.nbytes for block in self.blocks)

    def check_blocks(self, available: int) -> None:
        """Raise InvalidArgument unless exactly `available` bytes are asked for."""
        model = self.request.model_name
        for block in self.blocks:
            if block.nbytes > available:
                raise InvalidArgument(
                    f"unexpected size for input '{self.request.inputs[block.index].name}', "
                    f"expecting {block.nbytes - available} additional bytes for model '{model}'"
                )
            available -= block.nbytes
        if available:
            raise InvalidArgument(f"unexpected additional input data for model '{model}'")


# --- the document --------------------------------------------------------------------------------


class _InputParameters(msgspec.Struct):
    binary_data_size: int | None = None
    shared_memory_region: Any = None


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: msgspec.Raw = _NO_DATA
    parameters: _InputParameters | None = None


class _OutputParameters(msgspec.Struct):
    binary_data: bool | None = None
    classification: Any = None
    shared_memory_region: Any = None


class _Output(msgspec.Struct):
    name: str
    parameters: _OutputParameters | None = None


class _Document(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Document).decode


def parse_request(
    document: bytes | bytearray | memoryview, model: str, version: str, max_input_bytes: int
) -> Draft:
    """Read the JSON document of a request to a model's version ("" for the policy's choice).

    Raises InvalidArgument for anything a client got wrong, with the protocol's own text where
    there is one, and Unsupported for classification and client shared memory.
    """
    body = _decode_document(document)
    request = InferRequest(model, [], version, body.id or "")
    choice = OutputChoice()
    if body.parameters:
        request.parameters = {}
        take_parameters(request, choice, body.parameters)
    if body.outputs:
        request.outputs = [_read_output(output, choice) for output in body.outputs]
    blocks: list[Block] = []
    for source in body.inputs:
        request.inputs.append(_read_input(source, request, blocks, max_input_bytes))
    if len(request.inputs) > 1:
        _refuse_duplicates(request)
    return Draft(request, blocks, choice)


def _decode_document(document: bytes | bytearray | memoryview) -> _Document:
    try:
        return _decode(document)
    except msgspec.ValidationError as error:
        text = f"Unable to parse the request JSON: {error}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        text = f"failed to parse the request JSON buffer of {len(document)} bytes: {error}"
        if any(word in bytes(document) for word in (b"NaN", b"Infinity")):
            text += " (NaN and Infinity are not JSON: send them in the binary data format)"
    except RecursionError:
        text = "failed to parse the request JSON buffer: it is nested too deeply"
    raise InvalidArgument(text)


def _refuse_duplicates(request: InferRequest) -> None:
    seen: set[str] = set()
    for tensor in request.inputs:
        if tensor.name in seen:
            raise InvalidArgument(
                f"[request id: {request.id or UNKNOWN_ID}] input '{tensor.name}' "
                "already exists in request"
            )
        seen.add(tensor.name)


# --- inputs and outputs --------------------------------------------------------------------------


def _read_input(
    source: _Input, request: InferRequest, blocks: list[Block], max_input_bytes: int
) -> InferTensor:
    datatype = BY_WIRE_NAME.get(source.datatype)
    if datatype is None:
        raise InvalidArgument(f"invalid datatype for input {source.name}")
    try:
        count = element_count(source.shape)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"Unable to parse 'shape' of input '{source.name}': {error.message}"
        ) from None
    tensor = InferTensor(source.name, source.datatype, tuple(source.shape), b"")
    nbytes = source.parameters.binary_data_size if source.parameters is not None else None
    if nbytes is None or source.data is not _NO_DATA or source.parameters is None:
        _check_source(source)
        _check_size(source.name, count * datatype.element_bytes, max_input_bytes)
        tensor.data = body_of_json(source.name, datatype, count, source.data)
        return tensor
    if source.parameters.shared_memory_region is not None:
        _check_source(source)
    if nbytes < 0:
        raise InvalidArgument(
            f"Unable to parse 'binary_data_size' of input '{source.name}': "
            f"expected 0 or more, got {nbytes}"
        )
    _check_size(source.name, nbytes, max_input_bytes)
    blocks.append(Block(len(request.inputs), nbytes))
    return tensor


def _check_source(source: _Input) -> None:
    """Refuse an input that has not exactly one source of data, or one that is not `data`."""
    found = ["'data'"] if source.data is not _NO_DATA else []
    region = None
    if source.parameters is not None:
        region = source.parameters.shared_memory_region
        if source.parameters.binary_data_size is not None:
            found.append("'binary_data_size' in 'parameters'")
        if region is not None:
            found.append("'shared_memory_region' in 'parameters'")
    if len(found) != 1:
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in "
            "'parameters', 'shared_memory_region' in 'parameters'. But, set "
            f"{', '.join(found) or 'none of them'} for input '{source.name}'"
        )
    if region is not None:
        raise Unsupported(
            f"input '{source.name}' asks for 'shared_memory_region': "
            "client shared memory is not supported, send the data in the request"
        )


def _check_size(name: str, nbytes: int, max_input_bytes: int) -> None:
    if nbytes > max_input_bytes:
        raise InvalidArgument(
            f"input '{name}' has {nbytes} bytes, which exceeds the maximum allowed input size of "
            f"{max_input_bytes} bytes. Use --http-max-input-size to increase the limit."
        )


def _read_output(source: _Output, choice: OutputChoice) -> str:
    wanted = source.parameters
    if wanted is not None:
        if wanted.classification is not None:
            raise Unsupported(
                f"output '{source.name}' asks for 'classification', which is not supported"
            )
        if wanted.shared_memory_region is not None:
            raise Unsupported(
                f"output '{source.name}' asks for 'shared_memory_region': "
                "client shared memory is not supported, read the data from the response"
            )
        if wanted.binary_data is not None:
            if not choice.binary:
                choice.binary = {}
            choice.binary[source.name] = wanted.binary_data
    return source.name


# --- parameters ----------------------------------------------------------------------------------


def take_parameters(
    request: InferRequest, choice: OutputChoice, parameters: dict[str, Any]
) -> None:
    """Put the reserved parameters where they belong, and the client's own ones into the request.

    Raises InvalidArgument for a value that a reserved one cannot have, or that cannot travel.
    """
    for key, value in parameters.items():
        if key == "sequence_id":
            request.correlation_id = _sequence_id(value)
        elif key == "sequence_start":
            request.sequence_start = _flag(key, value)
        elif key == "sequence_end":
            request.sequence_end = _flag(key, value)
        elif key == "priority":
            request.priority = _unsigned(key, value)
        elif key == "timeout":
            request.timeout_us = _unsigned(key, value)
        elif key == "binary_data_output":
            choice.default = _flag(key, value)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage "
                "and should not be specified."
            )
        else:
            request.parameters[key] = _own_parameter(key, value)


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, "a boolean", value)
    return value


def _unsigned(key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INT64:
        raise _wrong(key, f"an integer from 0 to {MAX_INT64}", value)
    return value


def _sequence_id(value: Any) -> int | str:
    if isinstance(value, str):
        return value
    if type(value) is not int or not 0 <= value <= MAX_UINT64:
        raise _wrong("sequence_id", f"a string or an integer from 0 to {MAX_UINT64}", value)
    return value


def _own_parameter(key: str, value: Any) -> Parameter:
    if isinstance(value, (bool, str, float)):
        return value
    if type(value) is not int:
        raise InvalidArgument(
            f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
        )
    if not -MAX_INT64 - 1 <= value <= MAX_INT64:
        raise _wrong(key, "an integer that 64 bits can hold", value)
    return value


def _wrong(key: str, expected: str, value: Any) -> InvalidArgument:
    shown = repr(value)
    if len(shown) > 40:
        shown = f"{shown[:40]}…"
    return InvalidArgument(
        f"Unable to parse '{key}' in 'parameters': expected {expected}, got {shown}"
    )


# --- raw requests --------------------------------------------------------------------------------


def raw_request(info: ModelInfo, version: str, nbytes: int) -> Draft:
    """Make the draft of a request whose whole body, `nbytes` long, is the model's one input.

    The batch is 1 and one free dimension is worked out from the size; a BYTES input gets the
    whole body as its one element. Outputs come back as binary blocks. Raises InvalidArgument
    where that does not give one shape.
    """
    if len(info.inputs) != 1:
        raise InvalidArgument(
            f"a raw binary request needs a model with exactly 1 input, "
            f"but model '{info.name}' has {len(info.inputs)}"
        )
    spec = info.inputs[0]
    datatype = BY_WIRE_NAME.get(spec.datatype, DataType.INVALID)
    shape = list(spec.shape)
    if info.max_batch_size > 0 and shape:
        shape[0] = 1
    elements = 1 if datatype is DataType.BYTES else nbytes // max(1, datatype.element_bytes)
    if shape.count(-1) == 1:
        known = 1
        for extent in shape:
            known *= extent if extent != -1 else 1
        shape[shape.index(-1)] = elements // max(1, known)
    if -1 in shape or (datatype is DataType.BYTES and element_count(shape) != 1):
        raise InvalidArgument(
            f"the shape of input '{spec.name}' of model '{info.name}' cannot be worked out for a "
            f"raw binary request of {nbytes} bytes: the model says {list(spec.shape)}"
        )
    prefix = nbytes.to_bytes(LENGTH_BYTES, "little") if datatype is DataType.BYTES else b""
    tensor = InferTensor(spec.name, spec.datatype, tuple(shape), b"")
    request = InferRequest(info.name, [tensor], version)
    return Draft(request, [Block(0, nbytes, prefix)], OutputChoice(default=True))
