# SPDX-License-Identifier: Apache-2.0
"""Call `identity` N times at once, and answer with the sum of what it said."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """An asynchronous caller."""

    async def execute(self, requests: list[Any]) -> list[Any]:
        """Make the calls of all requests at once."""
        return await asyncio.gather(*[self._answer(request) for request in requests])

    async def _answer(self, request: Any) -> Any:
        calls = [
            pb_utils.InferenceRequest(
                model_name="identity",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", np.array([number], np.float32))],
            ).async_exec()
            for number in range(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
        ]
        total = np.zeros(1, np.float32)
        for response in await asyncio.gather(*calls):
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            total += pb_utils.get_output_tensor_by_name(response, "OUTPUT0").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", total)])
