# SPDX-License-Identifier: Apache-2.0
"""Entries of the backend "generation" for tests of the doors: an engine that counts letters on.

The prompt "abc" is answered with "defghi…", a chat with '!"#$%&…'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.server.harness import parameter

CHAT_ANSWER = "!\"#$%&'()*+,-./0123456789"
"""How the answer to every chat begins."""


def write_engine(
    repository: Path, name: str, more: str = "", engine: str = "scripted", **options: Any
) -> None:
    """Write an entry; `more` is added to its configuration, `options` are the engine's."""
    (repository / name / "1").mkdir(parents=True)
    if engine == "scripted":
        options.setdefault("text", True)
    told = json.dumps(options).replace('"', '\\"')
    config = 'backend: "generation"\n' + parameter("ENGINE", engine)
    config += parameter("ENGINE_OPTIONS", told) if options else ""
    (repository / name / "config.pbtxt").write_text(config + more)
