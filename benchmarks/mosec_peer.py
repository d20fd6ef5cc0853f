# SPDX-License-Identifier: Apache-2.0
"""The identity model as a mosec server: bytes to an array of float32, and back to bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from mosec import Server, Worker


class Identity(Worker):
    """One worker process, as our model has one instance."""

    def deserialize(self, data: bytes) -> Any:
        """Make the array that the model sees."""
        return np.frombuffer(data, np.float32)

    def forward(self, data: Any) -> Any:
        """Give it back."""
        return data

    def serialize(self, data: Any) -> bytes:
        """Make bytes of the answer."""
        return bytes(data.tobytes())


if __name__ == "__main__":
    server: Any = Server()  # type: ignore[no-untyped-call]
    server.append_worker(Identity, num=1)
    server.run()
