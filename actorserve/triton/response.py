# SPDX-License-Identifier: Apache-2.0
"""`pb_utils.InferenceResponse`: outputs or an error, as `execute` answers.

The stub reads `_outputs`, `_error` and `_parameters` when it sends one.
"""

from __future__ import annotations

from typing import Any

from actorserve.triton.error import TritonError, TritonModelException
from actorserve.triton.parameters import parameters_json
from actorserve.triton.tensor import Tensor


class InferenceResponse:
    """A response. With an error it has neither outputs nor parameters."""

    __slots__ = ("__weakref__", "_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: list[Tensor] = [],  # noqa: B006 (never written to, and quicker than None)
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        """Make a response.

        Raises TypeError for a wrong type, TritonModelException for an empty tensor or parameters
        of other types than bool, int and str.
        """
        if not isinstance(output_tensors, (list, tuple)):
            raise TypeError(f"output_tensors must be a list of Tensor, got {type(output_tensors)}")
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise _no_tensor(tensor)
        self._outputs = list(output_tensors)
        self._error = error
        self._parameters = "" if parameters is None else parameters_json(parameters)
        if error is not None:
            self._become_error(error)

    def _become_error(self, error: object) -> None:
        if not isinstance(error, TritonError):
            raise TypeError(f"error must be a TritonError or None, got {type(error)}")
        self._outputs = []
        self._parameters = ""

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors."""
        return self._outputs[:]

    def has_error(self) -> bool:
        """Tell whether this is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as the text of a JSON object, or "" where there are none."""
        return self._parameters

    def __repr__(self) -> str:
        if self._error is not None:
            return f"InferenceResponse(error={self._error!r})"
        return f"InferenceResponse({self._outputs!r})"


def _no_tensor(value: object) -> Exception:
    if value is None:
        return TritonModelException("Output tensor for inference response should not be empty.")
    return TypeError(f"each of output_tensors must be a Tensor, got {type(value)}")
