# SPDX-License-Identifier: Apache-2.0
"""Models are unit-tested without processes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from actorserve.errors import InvalidArgument, Unavailable
from actorserve.testing import run_batch, run_model

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"


def test_a_model_runs_in_this_process():
    """Inputs and outputs are arrays; strings are BYTES."""
    x = np.arange(4, dtype=np.float32)
    assert run_model(EXAMPLES / "add_sub", {"INPUT0": x, "INPUT1": x})["OUTPUT0"].tolist() == [
        0,
        2,
        4,
        6,
    ]
    outputs = run_model(EXAMPLES / "tokenizer", {"TEXT": [["Hello, world"]]})
    assert outputs["TOKENS"].tolist() == [[b"hello", b",", b"world"]]


def test_a_batch_and_a_coroutine_run_too():
    """Several requests are one call; `async def execute` is awaited."""
    rows = [np.ones((n, 64), np.float32) for n in (1, 3)]
    outputs = run_batch(EXAMPLES / "matrix", [{"X": each} for each in rows])
    assert [each["Y"].shape for each in outputs] == [(1, 64), (3, 64)]
    doubled = run_model(EXAMPLES / "async_double", {"INPUT": np.array([4], np.int64)})
    assert doubled["OUTPUT"].tolist() == [8]


def test_a_request_is_checked_as_the_server_does():
    """What the server refuses is refused here, with the same text."""
    with pytest.raises(InvalidArgument, match="expected 2 inputs but got 1 inputs"):
        run_model(EXAMPLES / "add_sub", {"INPUT0": np.zeros(4, np.float32)})


def test_a_response_s_error_is_raised(tmp_path: Path):
    """An error keeps its code; an exception of the model comes as it is."""
    folder = tmp_path / "failing" / "1"
    folder.mkdir(parents=True)
    (folder.parent / "config.pbtxt").write_text(
        'backend: "python" input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } '
        'output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }'
    )
    (folder / "model.py").write_text(
        "import triton_python_backend_utils as pb\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        if pb.get_input_tensor_by_name(requests[0], 'X').as_numpy()[0] < 0:\n"
        "            raise ZeroDivisionError('below zero')\n"
        "        error = pb.TritonError('come back later', pb.TritonError.UNAVAILABLE)\n"
        "        return [pb.InferenceResponse(error=error)]\n"
    )
    before = set(sys.modules)
    with pytest.raises(Unavailable, match="come back later"):
        run_model(folder.parent, {"X": np.ones(1, np.float32)})
    with pytest.raises(ZeroDivisionError):
        run_model(folder.parent, {"X": -np.ones(1, np.float32)})
    assert not [name for name in set(sys.modules) - before if name.startswith("1.")]


WATCHFUL = """
import numpy as np
import triton_python_backend_utils as pb_utils
from actorserve.triton.flow import drained, on_cancel


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            with on_cancel(request, lambda: None):
                out = pb_utils.Tensor("OUT", np.array([1], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
                await drained(sender)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WATCHFUL_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: True }
"""


def test_a_model_may_wait_for_its_client(tmp_path: Path):
    """There is none here: it reads at once, and never gives up."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(WATCHFUL_CONFIG)
    (tmp_path / "m" / "1" / "model.py").write_text(WATCHFUL)
    assert run_model(tmp_path / "m", {"IN": np.array([1], np.int32)})["OUT"].tolist() == [1]
