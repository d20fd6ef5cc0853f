# SPDX-License-Identifier: Apache-2.0
"""Where a model would like the outputs of a call to another model to lie."""

from __future__ import annotations

import enum


class MemoryType(enum.IntEnum):
    """A kind of memory; DEFAULT is wherever the producing model leaves a tensor."""

    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1
    DEFAULT = 2


class PreferredMemory:
    """A kind of memory and, for GPUs, which one."""

    __slots__ = ("__weakref__", "_device_id", "_memory_type")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        """Take the kind and the device. Raises TypeError for other types."""
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError(
                "preferred_memory_type must be TRITONSERVER_MEMORY_GPU or TRITONSERVER_MEMORY_CPU, "
                f"got {type(preferred_memory_type)}"
            )
        if not isinstance(preferred_device_id, int):
            raise TypeError(f"preferred_device_id must be an int, got {type(preferred_device_id)}")
        self._memory_type = preferred_memory_type
        self._device_id = preferred_device_id

    def __repr__(self) -> str:
        return f"PreferredMemory({self._memory_type.name}, {self._device_id})"
