# SPDX-License-Identifier: Apache-2.0
"""Ask a running server for its health: what `actorserve health` does. Standard library only."""

from __future__ import annotations

import http.client
import sys
from urllib.parse import urlsplit

from actorserve.errors import ConfigError


def probe(url: str, *, is_live_enough: bool, timeout_s: float) -> int:
    """Print one line; return 0 if the server at `url` is ready (or live), else 1."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "http" or not parts.hostname:
        raise ConfigError(f"--url {url!r}: expected something like http://127.0.0.1:8000")
    what = "live" if is_live_enough else "ready"
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    try:
        connection.request("GET", f"/v2/health/{what}")
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        print(f"not {what}: {error or type(error).__name__}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    if status == 200:
        print(what)
        return 0
    print(f"not {what}: HTTP status {status}", file=sys.stderr)
    return 1
