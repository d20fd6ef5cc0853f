"""Call other models, one after the other: `exec` waits for the answer.

A tensor of an answer goes into the next call, or into our own response, as it is: large ones stay
where they are in shared memory.
"""

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.run(request) for request in requests]

    def run(self, request):
        cleaned = self.call("clean", "TEXT", request.inputs())
        if cleaned.has_error():  # whatever fails there comes back as a response
            return pb_utils.InferenceResponse(error=cleaned.error())
        embedded = self.call("embed", "VECTOR", cleaned.output_tensors())
        if embedded.has_error():
            return pb_utils.InferenceResponse(error=embedded.error())
        return pb_utils.InferenceResponse(embedded.output_tensors())

    def call(self, model, output, inputs):
        request = pb_utils.InferenceRequest(
            model_name=model, requested_output_names=[output], inputs=inputs
        )
        return request.exec()
