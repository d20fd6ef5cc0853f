"""Step 1 of the pipeline: lower case, single spaces. A plain model that knows of no other."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.clean(request) for request in requests]

    def clean(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        tidy = " ".join(text.lower().split())
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TEXT", np.array([tidy], dtype=np.object_))]
        )
