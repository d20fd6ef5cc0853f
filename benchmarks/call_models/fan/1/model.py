# SPDX-License-Identifier: Apache-2.0
"""Open N streams of `count` at once, of two responses each; answer with how many came in all."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

LENGTH = 2


class TritonPythonModel:
    """Many concurrent `async_exec(decoupled=True)` for each request."""

    async def execute(self, requests: list[Any]) -> list[Any]:
        """Run all requests at once."""
        return await asyncio.gather(*[self._answer(request) for request in requests])

    async def _answer(self, request: Any) -> Any:
        calls = [
            pb_utils.InferenceRequest(
                model_name="count",
                requested_output_names=["OUT"],
                inputs=[pb_utils.Tensor("N", np.array([LENGTH], np.int32))],
            ).async_exec(decoupled=True)
            for _ in range(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
        ]
        seen = 0
        for iterator in await asyncio.gather(*calls):
            for response in iterator:
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
                seen += len(response.output_tensors())
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([seen], np.float32))])
