# SPDX-License-Identifier: Apache-2.0
"""The base of everything that travels on its own; messages.py and device.py have the messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A tagged, frozen, array-like Struct: a change of field order is a change of PROTOCOL."""
