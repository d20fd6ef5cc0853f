# SPDX-License-Identifier: Apache-2.0
"""Tell systemd how the service is: READY, STOPPING, and the watchdog's beat. See sd_notify(3).

Does nothing where NOTIFY_SOCKET is not set. The watchdog's beat comes from the loop, so that a
loop that stands still is noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket


class Notifier:
    """One service's messages to its manager."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Say that the service is up, and start the watchdog's beat if one is wanted."""
        self._send("READY=1")
        interval_us = os.environ.get("WATCHDOG_USEC", "")
        if self._address and interval_us.isdecimal() and int(interval_us) > 0:
            self._beat(int(interval_us) / 2e6)

    def stopping(self) -> None:
        """Say that the service is going down."""
        if self._timer is not None:
            self._timer.cancel()
        self._send("STOPPING=1")

    def _beat(self, every_s: float) -> None:
        self._send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(every_s, self._beat, every_s)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(text.encode(), address)
