# SPDX-License-Identifier: Apache-2.0
"""Ask a running server for its health: what `actorserve health` does. Standard library only."""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

from actorserve.errors import ConfigError


def probe(url: str, *, is_live_enough: bool, timeout_s: float) -> int:
    """Print one line; return 0 if the server at `url` is ready (or live), else 1.

    Raises ConfigError for a URL that names no server.
    """
    host, port = host_and_port(url)
    what = "live" if is_live_enough else "ready"
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", f"/v2/health/{what}")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"not {what}: {host}:{port}: {reason_of(error)}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if status == 200:
        print(what)
        return 0
    print(f"not {what}: HTTP status {status}; `actorserve status` says why", file=sys.stderr)
    return 1


def reason_of(error: Exception) -> str:
    """Return why nobody answered, without a number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port of a URL, port 80 if it names none. Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host = None
    if not host or parts.scheme != "http":
        raise ConfigError(f"--url {url!r}: expected something like http://127.0.0.1:8000")
    return host, port
