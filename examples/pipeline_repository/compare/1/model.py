"""Call a model many times at once: `async_exec` returns at once what `gather` waits for.

`execute` is a coroutine; while it waits, nothing here is blocked.
"""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*[self.compare(request) for request in requests])

    async def compare(self, request):
        texts = pb_utils.get_input_tensor_by_name(request, "TEXTS").as_numpy()
        answers = await asyncio.gather(*[self.vector_of(text) for text in texts])
        for answer in answers:
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
        vectors = np.array([a.output_tensors()[0].as_numpy() for a in answers], dtype=np.float64)
        alike = np.round(vectors @ vectors.T, 2)
        return pb_utils.InferenceResponse([pb_utils.Tensor("ALIKE", alike)])

    def vector_of(self, text):
        request = pb_utils.InferenceRequest(
            model_name="pipeline",
            requested_output_names=["VECTOR"],
            inputs=[pb_utils.Tensor("TEXT", np.array([text], dtype=np.object_))],
        )
        return request.async_exec()
