# SPDX-License-Identifier: Apache-2.0
"""The README says what is true: its request gets its answer. (Its programs: test_docs.py.)"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_request_gets_its_answer(start_server):
    """The curl command's body, sent as it stands."""
    found = re.search(r"add_sub/infer -d '(\{.*?\})'\n(\{.*?\})\n```", README, re.DOTALL)
    assert found is not None
    server = start_server(ROOT / "examples" / "repository")
    status, answer = server.call("POST", "/v2/models/add_sub/infer", json.loads(found[1]))
    assert status == 200
    assert answer == json.loads(found[2])
