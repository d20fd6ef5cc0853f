# SPDX-License-Identifier: Apache-2.0
"""The sources of models that look at what arrives: tensors, shapes, the request itself."""

from __future__ import annotations

KIND = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            assert x.flags.writeable and x.flags.c_contiguous, x.flags
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x.copy())]))
        return answers
"""
HAND_ON = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            answers.append(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor.from_dlpack("OUTPUT0", x.to_dlpack())]
                )
            )
        return answers
"""
OPTIONAL = """
    def tell(self, request):
        extra = pb_utils.get_input_tensor_by_name(request, "EXTRA")
        return "none" if extra is None else str(extra.as_numpy().tolist())
"""
SHAPES = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            shape = json.dumps(list(x.shape)).encode()
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUTPUT0", x),
                pb_utils.Tensor("SHAPE", np.array([[shape]] if x.shape else [shape], object)),
            ]))
        return answers
"""
REQUEST = """
    def tell(self, request):
        return json.dumps({
            "id": request.request_id(),
            "parameters": json.loads(request.parameters()),
            "correlation_id": request.correlation_id(),
            "flags": request.flags(),
            "timeout": request.timeout(),
            "outputs": sorted(request.requested_output_names()),
        })
"""
PARAMETERS = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            wanted = [
                {"n": 2 ** 70}, {"n": -(2 ** 63) - 1}, {"n": chr(0xD800)}, {"n": 1.5},
                {"n": "text", "b": True, "i": -3},
            ][int(x[0])]
            outputs = [pb_utils.Tensor("OUTPUT0", x)]
            answers.append(pb_utils.InferenceResponse(outputs, parameters=wanted))
        return answers
"""
