"""Write words one by one, for many clients at the same time, as a language model would.

A decoupled model sends its responses through a sender, each when it is ready, and says when the
last has gone. `execute` may return before that, and runs for the next request meanwhile.
"""

import asyncio
import json
import random

import numpy as np
import triton_python_backend_utils as pb_utils

WORDS = ("a", "day", "gives", "us", "light", "and", "the", "night", "some", "rest", "that")


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.pause_s = float(parameters["PAUSE_MS"]["string_value"]) / 1000
        self.running = set()

    async def execute(self, requests):
        for request in requests:
            task = asyncio.create_task(self.write(request))
            self.running.add(task)  # a task that nobody holds may be collected before its end
            task.add_done_callback(self.running.discard)

    async def write(self, request):
        prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()[0].decode()
        count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]
        dice = random.Random(prompt)  # the same prompt gives the same words
        sender = request.get_response_sender()
        for number in range(count):
            if sender.is_cancelled():  # nobody reads on: stop early
                break
            await asyncio.sleep(self.pause_s)  # stands for the work of a model
            word = dice.choice(WORDS) + ("." if number % 7 == 6 else "")
            sender.send(
                pb_utils.InferenceResponse(
                    [pb_utils.Tensor("WORD", np.array([word], dtype=np.object_))]
                )
            )
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
