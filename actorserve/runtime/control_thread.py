# SPDX-License-Identifier: Apache-2.0
"""The control thread of a child process: it beats, answers, and ends the process with its parent.

Whatever the main thread does, a child whose parent is gone has nobody to work for.
"""

from __future__ import annotations

import os
import threading
import traceback
from typing import Protocol

from actorserve.errors import ActorserveError
from actorserve.process.boot import PeerGone

CONTROL_THREAD = "actorserve-control"


class ControlledEnd(Protocol):
    """The child's end of its channel."""

    def serve_control(self) -> None:
        """Serve until the parent is gone. Raises PeerGone."""


def start_control_thread(end: ControlledEnd) -> None:
    """Start the thread, which lives as long as the process."""
    threading.Thread(target=_serve, args=(end,), name=CONTROL_THREAD, daemon=True).start()


def _serve(end: ControlledEnd) -> None:
    try:
        end.serve_control()
    except PeerGone:
        os._exit(0)
    except (ActorserveError, OSError, ValueError):
        traceback.print_exc()
        os._exit(1)
