"""Double integers after a short wait, all requests of a batch at the same time."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*[self.answer(request) for request in requests])

    async def answer(self, request):
        await asyncio.sleep(0.01)  # stands for a call to another service
        doubled = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() * 2
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", doubled)])
