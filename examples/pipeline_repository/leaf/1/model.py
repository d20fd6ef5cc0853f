"""A short stream: 0, 1, … LENGTH - 1, and the end."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            length = pb_utils.get_input_tensor_by_name(request, "LENGTH").as_numpy()[0]
            sender = request.get_response_sender()
            for number in range(length):
                sender.send(
                    pb_utils.InferenceResponse(
                        [pb_utils.Tensor("NUMBER", np.array([number], dtype=np.int64))]
                    )
                )
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
