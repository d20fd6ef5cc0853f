# SPDX-License-Identifier: Apache-2.0
"""How a stub's model controls models: by questions to the supervisor (questions.py)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from actorserve.actors.questions import Questions
from actorserve.runtime.stub_end import StubEnd
from actorserve.wire.messages import (
    INLINE_BYTES,
    CheckModelReady,
    Handle,
    LoadModel,
    UnloadModel,
)

INLINE_TOTAL_BYTES = 64 << 10


class StubModelControl:
    """See triton.model_control.Controller. Any thread."""

    def __init__(self, end: StubEnd, questions: Questions) -> None:
        self._end = end
        self._questions = questions

    def load(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        """Load a model; large files go through this stub's arena."""
        handles: list[Handle] = []
        contents: dict[str, bytes | Handle] = {}
        inline_bytes = 0
        try:
            for key, content in files.items():
                inline_bytes += len(content)
                if len(content) <= INLINE_BYTES and inline_bytes <= INLINE_TOTAL_BYTES:
                    contents[key] = content
                    continue
                handle = self._end.place(np.frombuffer(content, np.uint8)) if content else b""
                contents[key] = handle
                if isinstance(handle, Handle):
                    handles.append(handle)
        except BaseException:
            self._end.unplace(handles)
            raise
        self._questions.ask(LoadModel(name, config, contents), handles)

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Unload a model."""
        self._questions.ask(UnloadModel(name, unload_dependents))

    def is_ready(self, name: str, version: str) -> bool:
        """Whether a version is ready."""
        return self._questions.ask(CheckModelReady(name, version)) is True
