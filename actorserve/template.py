# SPDX-License-Identifier: Apache-2.0
"""A new model that works: what `actorserve new` writes."""

from __future__ import annotations

import re
from pathlib import Path

from actorserve.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")

CONFIG = """\
# What clients send and get. The model's name is its folder's.
backend: "python"

# Clients send and get [rows, …]: up to 8 rows a request. The dims below are those of one row.
# 0 means no batches: the dims are then the whole shape.
max_batch_size: 8

# -1 is any length. Types: TYPE_BOOL, TYPE_UINT8 … TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64,
# TYPE_BF16, TYPE_STRING.
input [ { name: "INPUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT" data_type: TYPE_FP32 dims: [ -1 ] } ]

# Requests that come within a millisecond of each other are executed together.
dynamic_batching { max_queue_delay_microseconds: 1000 }

# How many processes run the model side by side.
instance_group [ { count: 1 kind: KIND_CPU } ]

# A dry run (actorserve check --dry-run) sends such samples; serving does not.
# model_warmup [ {
#   name: "two rows" batch_size: 2
#   inputs { key: "INPUT" value: { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } }
# } ]

# A model that hangs is replaced after this time; without it a long execute is never ended.
# parameters { key: "EXECUTE_TIMEOUT_S" value: { string_value: "30" } }
"""

MODEL = '''\
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Lives in a process of its own; another starts at once where it dies."""

    def initialize(self, args):
        """Load what takes long, once: weights, tokenizers, connections."""
        config = json.loads(args["model_config"])  # config.pbtxt, completed
        self.factor = np.float32(2)
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: {config['max_batch_size']} rows")

    def execute(self, requests):
        """Answer a list of requests, in their order, with one response each.

        `async def execute` is possible, too. An exception fails all of the list.
        """
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if not np.isfinite(x).all():
                # This fails one request; its client gets the text.
                error = pb_utils.TritonError("INPUT must be finite")
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            output = pb_utils.Tensor("OUTPUT", x * self.factor)
            responses.append(pb_utils.InferenceResponse([output]))
        return responses

    def finalize(self):
        """Clean up, when the model is unloaded or the server stops."""
'''


def write_model(folder: Path) -> list[Path]:
    """Write a model into a new folder; returns its files.

    Raises ConfigError for a name that is none, or a folder that is there.
    """
    if NAME.fullmatch(folder.name) is None:
        raise ConfigError(
            f"'{folder.name}' is no name for a model: expected letters, digits, '_', '-' and '.', "
            "the first no '-' or '.', at most 200"
        )
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
