# SPDX-License-Identifier: Apache-2.0
"""Who may use what administers the server: loading a model runs its code. Pure."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping, MutableMapping
from typing import Any


def may_administer(scope: MutableMapping[str, Any], token: str = "") -> bool:
    """Whether the peer of an ASGI scope counts as the server's operator.

    A bearer token decides where one is set and sent. Else the peer has to be on this machine: on
    a loopback address or a Unix socket, and neither a proxy that speaks for somebody else nor a
    browser: a web page that is open here, whoever wrote it, can send requests to loopback.
    """
    headers: dict[bytes, bytes] = dict(scope["headers"])
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if token and scheme.lower() == b"bearer":
        return hmac.compare_digest(credentials.strip(), token.encode())
    if b"forwarded" in headers or b"x-forwarded-for" in headers or _is_of_a_page(headers):
        return False
    client = scope.get("client")
    if client is None:
        server = scope.get("server")
        return server is not None and server[1] is None  # a Unix socket has no port
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback) and _names_this_machine(headers.get(b"host"))


def _is_of_a_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a web page's script or form sends this; browsers say so, and pages cannot unsay it.

    "none" is an address that somebody typed.
    """
    return b"origin" in headers or headers.get(b"sec-fetch-site", b"none") != b"none"


def _names_this_machine(host: bytes | None) -> bool:
    """Whether a Host header is an address, or a name that no stranger can point here.

    (Else a page could have its own name resolved to loopback, and be of the same origin.)
    """
    if host is None:
        return True
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
