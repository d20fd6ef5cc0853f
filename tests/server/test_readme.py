# SPDX-License-Identifier: Apache-2.0
"""The README says what is true: its Python blocks run, its request gets its answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number: int):
    """Each by itself, from the root of the repository."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[number]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_request_gets_its_answer(start_server):
    """The curl command's body, sent as it stands."""
    found = re.search(r"add_sub/infer -d '(\{.*?\})'\n(\{.*?\})\n```", README, re.DOTALL)
    assert found is not None
    server = start_server(ROOT / "examples" / "repository")
    status, answer = server.call("POST", "/v2/models/add_sub/infer", json.loads(found[1]))
    assert status == 200
    assert answer == json.loads(found[2])
