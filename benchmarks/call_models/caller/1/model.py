# SPDX-License-Identifier: Apache-2.0
"""Call `identity` N times, one call after the other, and answer with the sum of what it said."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """A synchronous caller."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Make the calls of one request after those of the other."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        total = np.zeros(1, np.float32)
        for number in range(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0]):
            call = pb_utils.InferenceRequest(
                model_name="identity",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", np.array([number], np.float32))],
            )
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            total += pb_utils.get_output_tensor_by_name(response, "OUTPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total)])
