# SPDX-License-Identifier: Apache-2.0
"""What an operator may set on the HTTP front end: limits against bad peers, and JSON strictness."""

from __future__ import annotations

import msgspec

from actorserve.actors.server_log import ServerLog


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the HTTP front end, and the server's name. Sizes are in bytes, times in seconds.

    `max_input_bytes` bounds a request's body (decoded, where it is compressed) and each tensor
    that its JSON describes. A peer that needs longer than `head_timeout_s` for a head is answered
    with 408, and so is one whose body is slower than `min_body_bytes_per_s` once
    `body_grace_s` have passed; the time that the server itself makes a body wait does not count.
    `write_timeout_s` is how long a peer may take nothing of its reply. Timeouts are looked at in
    sweeps and strike up to a quarter of the shortest one later. `admin_token` lets peers beyond
    loopback administer the server; empty means that none may. `has_metrics` serves /metrics, and
    `only_metrics` nothing else. `log` is what /v2/logging shows and changes; without one it shows
    nothing.
    """

    max_head_bytes: int = 64 * 1024
    max_input_bytes: int = 64 * 1024 * 1024
    max_connections: int = 8192
    head_timeout_s: float = 30.0
    keep_alive_timeout_s: float = 75.0
    body_grace_s: float = 30.0
    min_body_bytes_per_s: float = 240.0
    write_timeout_s: float = 60.0
    linger_s: float = 2.0
    strict_json: bool = False
    admin_token: str = ""
    codec_threads: int = 2
    server_name: str = "actorserve"
    has_metrics: bool = True
    only_metrics: bool = False
    log: ServerLog | None = None

    @property
    def sweep_interval_s(self) -> float:
        """How often connections are looked at."""
        shortest = min(
            self.head_timeout_s,
            self.keep_alive_timeout_s,
            self.body_grace_s,
            self.write_timeout_s,
        )
        return max(0.02, shortest / 4)
