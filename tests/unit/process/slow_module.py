# SPDX-License-Identifier: Apache-2.0
"""A module that is being imported for a minute, in C code that holds the interpreter lock."""

import ctypes
import os

if os.environ.get("ACTORSERVE_TEST_QUICK") is None:
    ctypes.PyDLL(None).usleep(60_000_000)
