# SPDX-License-Identifier: Apache-2.0
"""The parameters of requests and responses, as the JSON text that travels."""

from __future__ import annotations

import msgspec

from actorserve.errors import InvalidArgument, ProtocolError
from actorserve.triton.inference import InferRequest, Parameter

_decode_parameters = msgspec.json.Decoder(dict[str, bool | int | float | str]).decode
_encode_parameters = msgspec.json.Encoder().encode


def parameters_text(request: InferRequest) -> str:
    """Return a request's own parameters as JSON. Raises InvalidArgument for what cannot travel."""
    if not (request.id or request.correlation_id or request.parameters):
        return "{}"
    try:
        for text in (request.id, request.correlation_id):
            if isinstance(text, str) and not text.isascii():
                text.encode()
        if not request.parameters:
            return "{}"
        return _encode_parameters(request.parameters).decode()
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"the request's id or parameters cannot be sent: {error}") from None


def parameters_of(text: str) -> dict[str, Parameter]:
    """Read a response's parameters. Raises ProtocolError for what is no JSON object of them."""
    try:
        return _decode_parameters(text)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a response's parameters cannot be read: {error}") from None
