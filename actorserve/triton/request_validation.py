# SPDX-License-Identifier: Apache-2.0
"""Check a request against a model's configuration, with the texts that clients match on.

The order of the checks is the real server's: requested outputs, number of inputs, batch
dimension, then each input's name, data type, shape and size. Pure: nothing is read or copied but
the lengths, and the prefixes of BYTES elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from actorserve.errors import InvalidArgument
from actorserve.triton.inference import InferRequest, InferTensor, Slab
from actorserve.wire.tensors import BytesError, DataType, check_bytes, element_count

MOST_FITTED = 1024
"""Shapes that are known to fit are remembered, with their sizes; most traffic has a few."""
UNKNOWN_ID = "<id_unknown>"

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


class InputRule(msgspec.Struct, frozen=True):
    """What the configuration says of one input. `reshape` is the model's own shape, if it differs.

    Shapes are without the batch dimension; -1 stands for any extent.
    """

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    allow_ragged_batch: bool = False


class CheckedInput(msgspec.Struct, frozen=True):
    """An input that fits: its type's number and the shape that the model sees (with the batch)."""

    datatype: int
    shape: tuple[int, ...]


class Checked(msgspec.Struct, frozen=True):
    """A request that fits; `rows` is its batch size (1 for a model without batching)."""

    rows: int
    inputs: list[CheckedInput]


class RequestRules:
    """The rules of one model version."""

    def __init__(
        self,
        model: str,
        max_batch_size: int,
        inputs: Sequence[InputRule],
        outputs: Iterable[str],
    ) -> None:
        self._model = model
        self._max_batch_size = max_batch_size
        self._inputs = {rule.name: rule for rule in inputs}
        self._outputs = frozenset(outputs)
        self._fitted: dict[tuple[str, str, tuple[int, ...]], tuple[int, CheckedInput]] = {}
        self._required = sum(not rule.optional for rule in inputs)

    def check(self, request: InferRequest) -> Checked:
        """Return what the model will see. Raises InvalidArgument with the protocol's text."""
        for name in request.outputs:
            if name not in self._outputs:
                raise InvalidArgument(
                    f"unexpected inference output '{name}' for model '{self._model}'"
                )
        count = len(request.inputs)
        if not self._required <= count <= len(self._inputs) or (
            # The real server only counts, and lets an optional input stand for a required one.
            self._required < len(self._inputs) and self._missing(request.inputs)
        ):
            raise self._error(request, self._count_text(request.inputs))
        batched = self._max_batch_size > 0
        rows = self._batch_size(request) if batched else 1
        checked = [self._check_input(request, tensor, batched) for tensor in request.inputs]
        if batched and rows > self._max_batch_size:
            raise self._error(
                request,
                f"inference request batch-size must be <= {self._max_batch_size} "
                f"for '{self._model}'",
            )
        return Checked(max(rows, 1), checked)

    def _error(self, request: InferRequest, text: str) -> InvalidArgument:
        return InvalidArgument(f"[request id: {request.id or UNKNOWN_ID}] {text}")

    def _count_text(self, tensors: Sequence[InferTensor]) -> str:
        given = [tensor.name for tensor in tensors]
        missing = self._missing(tensors)
        if self._required == len(self._inputs):
            expected = f"expected {self._required} inputs"
        else:
            expected = f"expected number of inputs between {self._required} and {len(self._inputs)}"
        # Existing clients match this text, so it keeps the newest-first order of the names and the
        # lone bracket of an empty list of missing ones.
        got = "[" + ",".join(f"'{name}'" for name in reversed(given)) + "]"
        lacks = "[" + ",".join(f"'{name}'" for name in missing) + "]" if missing else "]"
        return (
            f"{expected} but got {len(given)} inputs for model '{self._model}'. "
            f"Got input(s) {got}, but missing required input(s) {lacks}. "
            "Please provide all required input(s)."
        )

    def _missing(self, tensors: Sequence[InferTensor]) -> list[str]:
        """Return the required inputs that a request lacks."""
        given = {tensor.name for tensor in tensors}
        return [n for n, rule in self._inputs.items() if not rule.optional and n not in given]

    def _batch_size(self, request: InferRequest) -> int:
        rows = -1
        for tensor in request.inputs:
            if tensor.name not in self._inputs:
                raise self._unexpected_input(tensor.name)
            if not tensor.shape:
                raise self._error(
                    request,
                    f"input '{tensor.name}' has no shape but model requires batch dimension "
                    f"for '{self._model}'",
                )
            if rows < 0:
                rows = tensor.shape[0]
            elif rows != tensor.shape[0]:
                raise self._error(
                    request,
                    f"input '{tensor.name}' batch size does not match other inputs "
                    f"for '{self._model}'",
                )
        return max(rows, 0)

    def _unexpected_input(self, name: str) -> InvalidArgument:
        return InvalidArgument(f"unexpected inference input '{name}' for model '{self._model}'")

    def _check_input(
        self, request: InferRequest, tensor: InferTensor, batched: bool
    ) -> CheckedInput:
        shape = tuple(tensor.shape)
        key = (tensor.name, tensor.datatype, shape)
        known = self._fitted.get(key)
        body = tensor.data
        if known is not None and known[0] == (len(body) if type(body) is bytes else _nbytes(body)):
            return known[1]
        checked = self._check_anew(request, tensor, shape, batched)
        if checked.datatype != DataType.BYTES and len(self._fitted) < MOST_FITTED:
            self._fitted[key] = (_nbytes(tensor.data), checked)
        return checked

    def _check_anew(
        self, request: InferRequest, tensor: InferTensor, shape: tuple[int, ...], batched: bool
    ) -> CheckedInput:
        rule = self._inputs.get(tensor.name)
        if rule is None:
            raise self._unexpected_input(tensor.name)
        if tensor.datatype != rule.datatype.wire_name:
            raise self._error(
                request,
                f"inference input '{tensor.name}' data-type is '{tensor.datatype}', but model "
                f"'{self._model}' expects '{rule.datatype.wire_name}'",
            )
        own = shape[1:] if batched else shape
        if own != rule.dims and not _fits(rule.dims, own):
            raise self._error(request, self._shape_text(rule, shape, batched))
        # A batch of 0 counts as none: the size then is that of one row.
        counted = shape if not batched or shape[0] else own
        self._check_size(request, tensor, rule, counted)
        if rule.reshape is not None:
            own = _reshaped(rule, own)
            shape = (shape[0], *own) if batched else own
        return CheckedInput(int(rule.datatype), shape)

    def _shape_text(self, rule: InputRule, shape: tuple[int, ...], batched: bool) -> str:
        expected = (-1, *rule.dims) if batched else rule.dims
        return (
            f"unexpected shape for input '{rule.name}' for model '{self._model}'. Expected "
            f"{_shape_text(expected)}, got {_shape_text(shape)}. {_BATCH_NOTE if batched else ''}"
        )

    def _check_size(
        self,
        request: InferRequest,
        tensor: InferTensor,
        rule: InputRule,
        shape: tuple[int, ...],
    ) -> None:
        nbytes = _nbytes(tensor.data)
        count = element_count(shape)
        if rule.datatype is DataType.BYTES:
            body = tensor.data
            try:
                check_bytes(
                    body if isinstance(body, (bytes, bytearray, memoryview)) else body.buffer, count
                )
            except BytesError as error:
                raise self._error(request, self._bytes_text(tensor.name, count, error)) from None
        elif nbytes != count * rule.datatype.element_bytes:
            raise self._error(
                request,
                f"input byte size mismatch for input '{tensor.name}' for model '{self._model}'. "
                f"Expected {count * rule.datatype.element_bytes}, got {nbytes}",
            )

    def _bytes_text(self, name: str, count: int, error: BytesError) -> str:
        where = f"for inference input '{name}' for model '{self._model}'"
        if error.kind == "too_few":
            return f"expected {count} string elements {where}, got {error.index}"
        if error.kind == "too_many":
            return f"unexpected number of string elements {error.index} {where}, expecting {count}"
        if error.kind == "length_truncated":
            return (
                f"incomplete string length indicator {where}, expecting 4 bytes but only "
                f"{error.available} bytes available. Please make sure the string length indicator "
                "is in one buffer."
            )
        return (
            f"incomplete string data {where}, expecting string of length {error.declared} at "
            f"element {error.index} but only {error.available} bytes available"
        )


def _nbytes(body: bytes | bytearray | memoryview | Slab) -> int:
    if isinstance(body, (bytes, bytearray)):
        return len(body)
    return body.nbytes


def _fits(dims: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(dims) != len(shape):
        return False
    return all(want in (-1, got) for want, got in zip(dims, shape))


def _shape_text(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _reshaped(rule: InputRule, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Map a client's shape to the model's: free extents are taken over in their order."""
    assert rule.reshape is not None
    free = iter([got for want, got in zip(rule.dims, shape) if want == -1])
    return tuple(next(free, 1) if extent == -1 else extent for extent in rule.reshape)
