# SPDX-License-Identifier: Apache-2.0
"""Send as many responses as the input says, each stream from a thread of its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """The smallest decoupled model whose streams run side by side."""

    def execute(self, requests: list[Any]) -> None:
        """Begin a stream for every request."""
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])
            sender = request.get_response_sender()
            threading.Thread(target=self._send, args=(sender, count), daemon=True).start()

    def _send(self, sender: Any, count: int) -> None:
        for number in range(count):
            if sender.is_cancelled():
                break
            output = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse([output]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
