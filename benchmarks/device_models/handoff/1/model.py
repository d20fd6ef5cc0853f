# SPDX-License-Identifier: Apache-2.0
"""Hand a tensor to `receiver` N times, on a device or on the host, and tell how long it took."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The tensor is made anew for each request, and not in shared memory."""

    def execute(self, requests: list[Any]) -> list[Any]:
        """Make the calls of each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        count, nbytes, on_device = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]
            for name in ("N", "NBYTES", "ON_DEVICE")
        )
        array = np.arange(nbytes // 4, dtype=np.float32)
        if on_device:
            tensor = pb_utils.empty_device(array.shape, array.dtype, "INPUT0").copy_from(array)
        else:
            tensor = pb_utils.Tensor("INPUT0", array)
        begin_s = time.perf_counter()
        for _ in range(count):
            call = pb_utils.InferenceRequest(
                model_name="receiver", requested_output_names=["SIZE"], inputs=[tensor]
            )
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            size = pb_utils.get_output_tensor_by_name(response, "SIZE").as_numpy()[0]
            if size != array.size:
                raise ValueError(f"{size} elements came, not {array.size}")
        taken_s = np.array([time.perf_counter() - begin_s])
        return pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS", taken_s)])
