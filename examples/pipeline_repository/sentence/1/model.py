"""Read another model's stream: `exec(decoupled=True)` returns an iterator over its responses."""

import numpy as np
import triton_python_backend_utils as pb_utils

MANY = 10_000


class TritonPythonModel:
    def execute(self, requests):
        return [self.first_sentence(request) for request in requests]

    def first_sentence(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT")
        stream = pb_utils.InferenceRequest(
            model_name="words",
            requested_output_names=["WORD"],
            inputs=[prompt, pb_utils.Tensor("COUNT", np.array([MANY], dtype=np.int64))],
        ).exec(decoupled=True)
        words = []
        for response in stream:
            if response.has_error():
                return pb_utils.InferenceResponse(error=response.error())
            if not response.output_tensors():
                break  # the end of a stream has no tensors
            words.append(response.output_tensors()[0].as_numpy()[0].decode())
            if words[-1].endswith("."):
                stream.cancel()  # `words` sees it, and writes no more; so would letting go of it
                break
        text = np.array([" ".join(words)], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text)])
