# SPDX-License-Identifier: Apache-2.0
"""Give each request's input back, as a model with one line of numpy would."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The smallest model that answers."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request with its own input."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        array = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])
