"""Step 2 of the pipeline: how often each letter occurs, as a vector of unit length."""

import numpy as np
import triton_python_backend_utils as pb_utils

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class TritonPythonModel:
    def execute(self, requests):
        return [self.embed(request) for request in requests]

    def embed(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        counts = np.array([text.count(letter) for letter in LETTERS], dtype=np.float32)
        length = np.linalg.norm(counts)
        if length == 0:
            # An error as a response: this request fails, its neighbours in the batch do not.
            error = pb_utils.TritonError(
                "the text has no letters", pb_utils.TritonError.INVALID_ARG
            )
            return pb_utils.InferenceResponse(error=error)
        return pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", counts / length)])
