# SPDX-License-Identifier: Apache-2.0
"""An InferResponse, or an error, to the body of an HTTP response.

Pure: no I/O. Binary outputs are never copied: a body is a list of pieces, the JSON document first,
and the pieces of binary outputs are the views that the response came with.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from actorserve.errors import ActorserveError, InternalError, Unavailable
from actorserve.frontend.v2_request import OutputChoice
from actorserve.frontend.v2_values import View, json_of_body
from actorserve.triton.inference import InferResponse, InferTensor
from actorserve.wire.tensors import BY_WIRE_NAME

_encode = msgspec.json.Encoder().encode


class _Output(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int] | None = None
    data: msgspec.Raw | None = None


class _Document(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[_Output]
    id: str = ""
    parameters: dict[str, Any] = {}


class EncodedBody(msgspec.Struct):
    """The body of a response. `json_bytes` is the document's size, None without binary blocks."""

    pieces: list[View]
    nbytes: int
    json_bytes: int | None = None
    encoding: str = ""


def json_output_bytes(response: InferResponse, choice: OutputChoice) -> int:
    """Return how many bytes of tensors have to be turned into JSON text."""
    nbytes = 0
    for output in response.outputs:
        if not choice.is_binary(output.name):
            nbytes += len(body_bytes(output))
    return nbytes


def encode_response(
    response: InferResponse, choice: OutputChoice, strict_json: bool
) -> EncodedBody:
    """Return the body of a response without an error.

    Raises InvalidArgument for an output that only binary data can carry and InternalError for one
    whose bytes cannot be what it says.
    """
    outputs: list[_Output] = []
    pieces: list[View] = [b""]
    has_blocks = False
    for tensor in response.outputs:
        output = _Output(tensor.name, tensor.datatype, tensor.shape)
        body = body_bytes(tensor)
        if choice.is_binary(tensor.name):
            output.parameters = {"binary_data_size": len(body)}
            pieces.append(body)
            has_blocks = True
        else:
            datatype = BY_WIRE_NAME.get(tensor.datatype)
            if datatype is None:
                raise InternalError(f"output '{tensor.name}' has no datatype: {tensor.datatype!r}")
            output.data = json_of_body(tensor.name, datatype, body, strict_json)
        outputs.append(output)
    document = _encode(
        _Document(
            response.model_name,
            response.model_version,
            outputs,
            response.id,
            response.parameters,
        )
    )
    pieces[0] = document
    return EncodedBody(pieces, sum(map(len, pieces)), len(document) if has_blocks else None)


def body_bytes(tensor: InferTensor) -> View:
    """Return the bytes of a tensor as something whose len() counts bytes."""
    body = tensor.data
    if isinstance(body, (bytes, bytearray)):
        return body
    view = body if isinstance(body, memoryview) else body.buffer
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


# --- errors --------------------------------------------------------------------------------------


def encode_error(message: str) -> bytes:
    """Return the body of an error response; what UTF-8 cannot express is replaced."""
    return _encode({"error": message.encode("utf-8", "replace").decode()})


def retry_after_s(error: ActorserveError) -> int | None:
    """Return the whole seconds for a Retry-After header, where the error knows them."""
    if isinstance(error, Unavailable) and error.retry_after_s is not None:
        return max(1, math.ceil(error.retry_after_s))
    return None
