"""Long work that looks now and then whether its client is still there.

`is_cancelled` is a look at shared memory: cheap enough for every step. A request is cancelled when
its client closes the connection, an embedding app cancels its task, or the model that has called
this one was cancelled itself.
"""

import time

import numpy as np
import triton_python_backend_utils as pb_utils

STEP_S = 0.01


class TritonPythonModel:
    def execute(self, requests):
        return [self.work(request) for request in requests]

    def work(self, request):
        steps = pb_utils.get_input_tensor_by_name(request, "STEPS").as_numpy()[0]
        for step in range(steps):
            if request.is_cancelled():
                print(f"cancelled after {step} of {steps} steps", flush=True)
                error = pb_utils.TritonError(
                    f"cancelled after {step} steps", pb_utils.TritonError.CANCELLED
                )
                return pb_utils.InferenceResponse(error=error)
            time.sleep(STEP_S)  # stands for a step of the work
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("DONE", np.array([steps], dtype=np.int64))]
        )
