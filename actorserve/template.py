# SPDX-License-Identifier: Apache-2.0
"""A new model that works: what `actorserve new` writes."""

from __future__ import annotations

from pathlib import Path

from actorserve.errors import ConfigError

CONFIG = """\
# What clients send and get. Every field: see "model configuration" of the v2 protocol.
backend: "python"
max_batch_size: 8
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
dynamic_batching { max_queue_delay_microseconds: 1000 }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""

MODEL = '''import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Runs in a process of its own; `execute` gets a list of requests and answers each."""

    def initialize(self, args):
        """Load what takes long, once. args["model_config"] is the configuration as JSON."""

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            output = pb_utils.Tensor("OUTPUT", x * 2)
            responses.append(pb_utils.InferenceResponse([output]))
        return responses

    def finalize(self):
        """Clean up, when the model is unloaded."""
'''


def write_model(folder: Path) -> list[Path]:
    """Write a model into a new folder; returns its files. Raises ConfigError if it is there."""
    files = {folder / "config.pbtxt": CONFIG, folder / "1" / "model.py": MODEL}
    try:
        folder.mkdir(parents=True)
        (folder / "1").mkdir()
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"'{folder}' is there already: name a new folder") from None
    except OSError as error:
        raise ConfigError(f"cannot write '{folder}': {error.strerror}") from None
    return list(files)
