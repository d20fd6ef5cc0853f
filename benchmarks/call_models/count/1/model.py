# SPDX-License-Identifier: Apache-2.0
"""Answer N with a stream of N numbers and the end: all of a stream before `execute` returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The smallest decoupled model."""

    def execute(self, requests: list[Any]) -> None:
        """Send 0, 1, … N - 1 to each request."""
        for request in requests:
            sender = request.get_response_sender()
            for number in range(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0]):
                tensor = pb_utils.Tensor("OUT", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
