# SPDX-License-Identifier: Apache-2.0
"""`c_python_backend_utils.shared_memory`: how much tensor memory is free, for tests of leaks."""

from __future__ import annotations

from collections.abc import Callable

_free_bytes: Callable[[], int] | None = None


def set_free_bytes(source: Callable[[], int] | None) -> None:
    """Say who counts the free bytes of this process's tensor memory; the stub does it."""
    global _free_bytes
    _free_bytes = source


class SharedMemory:
    """The tensor memory of this process."""

    __slots__ = ()

    def free_memory(self) -> int:
        """Return the bytes that are free, 0 where nobody counts."""
        return 0 if _free_bytes is None else _free_bytes()


shared_memory = SharedMemory()
