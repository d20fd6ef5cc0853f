# SPDX-License-Identifier: Apache-2.0
"""The C library's allocator, set for bodies of many megabytes that come and go.

By default glibc maps and unmaps memory for every large body, and the page faults cost more than
copying it: a third of the CPU of a 1 MiB request goes there. Only a program that owns its process
should call this, because freed bodies then stay resident.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
THRESHOLD_BYTES = 1 << 30
_MMAP_LIMITS = (THRESHOLD_BYTES, 32 << 20)


def tune_malloc() -> bool:
    """Keep freed memory for the next body; False where the C library has no such settings."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    mallopt.restype = ctypes.c_int
    # Before 2.35, glibc takes no mapping threshold above 32 MiB.
    is_mapped_late = any(mallopt(_M_MMAP_THRESHOLD, limit) for limit in _MMAP_LIMITS)
    return mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES) == 1 and is_mapped_late
