"""Measure something of one's own: a counter, a gauge and a histogram.

A family is a name; its metrics are told apart by their labels. Instances that use the same names
and labels count into the same metric. Keep the family as long as its metrics.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        labels = {"model": args["model_name"]}
        kind = pb_utils.MetricFamily
        self.families = [
            kind(name="texts_total", description="Texts so far, by script", kind=kind.COUNTER),
            kind(name="longest_text", description="Most characters so far", kind=kind.GAUGE),
            kind(name="text_length", description="Characters of texts", kind=kind.HISTOGRAM),
        ]
        texts, longest, lengths = self.families
        self.texts = {
            script: texts.Metric(labels={**labels, "script": script})
            for script in ("ascii", "other")
        }
        self.longest = longest.Metric(labels=labels)
        self.lengths = lengths.Metric(labels=labels, buckets=[10, 100, 1000])

    def execute(self, requests):
        return [self.measure(request) for request in requests]

    def measure(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode()
        self.texts["ascii" if text.isascii() else "other"].increment(1)
        self.longest.set(max(self.longest.value(), len(text)))
        self.lengths.observe(len(text))
        length = np.array([len(text)], dtype=np.int64)
        return pb_utils.InferenceResponse([pb_utils.Tensor("LENGTH", length)])
