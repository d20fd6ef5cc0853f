"""Fan out: open many streams of `leaf` at the same time, read all, and say how they ended.

This is the pattern that examples/burst.py puts under load.
"""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*[self.fan_out(request) for request in requests])

    async def fan_out(self, request):
        streams = pb_utils.get_input_tensor_by_name(request, "STREAMS").as_numpy()[0]
        length = pb_utils.get_input_tensor_by_name(request, "LENGTH").as_numpy()[0]
        opened = await asyncio.gather(*[self.open(length) for _ in range(streams)])
        ends = [self.read(stream, length) for stream in opened]
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor(name, np.array([ends.count(end)], dtype=np.int64))
                for name, end in (("COMPLETE", True), ("INCOMPLETE", False), ("ERRORS", None))
            ]
        )

    def open(self, length):
        request = pb_utils.InferenceRequest(
            model_name="leaf",
            requested_output_names=["NUMBER"],
            inputs=[pb_utils.Tensor("LENGTH", np.array([length], dtype=np.int64))],
        )
        return request.async_exec(decoupled=True)

    def read(self, stream, length):
        """Return whether all numbers came in order, None for an error."""
        numbers = []
        for response in stream:
            if response.has_error():
                return None
            numbers += [int(tensor.as_numpy()[0]) for tensor in response.output_tensors()]
        return numbers == list(range(length))
