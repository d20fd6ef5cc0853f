"""Split sentences into words: BYTES in and out, and a parameter read from the configuration."""

import json
import re

import numpy as np
import triton_python_backend_utils as pb_utils

WORD = re.compile(r"\w+|[^\w\s]")


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.lower_case = parameters.get("LOWER_CASE", {}).get("string_value") == "yes"

    def execute(self, requests):
        return [self.tokenize(request) for request in requests]

    def tokenize(self, request):
        """Return one row of words per sentence, filled up with empty ones."""
        sentences = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1)
        rows = []
        for sentence in sentences:
            text = sentence.decode("utf-8")
            rows.append(WORD.findall(text.lower() if self.lower_case else text))
        width = max(map(len, rows), default=0)
        tokens = np.full((len(rows), width), "", dtype=np.object_)
        for row, words in zip(tokens, rows):
            row[: len(words)] = words
        counts = np.array([[len(words)] for words in rows], dtype=np.int32)
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("TOKENS", tokens), pb_utils.Tensor("COUNTS", counts)]
        )
