# SPDX-License-Identifier: Apache-2.0
"""A light client of streams: each connection asks for one after the other, and counts events.

sse_client.py PORT PATH BODY STREAMS SECONDS ─► one line of JSON
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

WARM_UP_SHARE = 0.2
_MARK = b"data: "
_END = b"\r\n0\r\n\r\n"
_READ_BYTES = 1 << 18


class Stream:
    """One connection with one stream on it."""

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = request
        self._tail = b""
        self._begin()

    def _begin(self) -> None:
        self._tail = b""
        self.socket.sendall(self._request)

    def take(self) -> int:
        """Read what is there; return how many events it brought. Raises ConnectionError."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the server closed a connection")
        if not self._tail and not data.startswith(b"HTTP/1.1 200 "):
            raise ConnectionError(data[:200].decode(errors="replace"))
        seen = self._tail + data
        # An event is counted when it has begun, in what was not looked at before.
        events = seen.count(_MARK, max(0, len(self._tail) - len(_MARK) + 1))
        self._tail = seen[-32:]
        if self._tail.endswith(_END):
            self._begin()
        return events


def run(port: int, request: bytes, streams: int, seconds: float) -> dict[str, float]:
    """Keep the streams going; return what came of it, without what the first moments did."""
    made = [Stream(port, request) for _ in range(streams)]
    by_fd = {each.socket.fileno(): each for each in made}
    with select.epoll() as epoll:
        for fd in by_fd:
            epoll.register(fd, select.EPOLLIN)
        events = 0
        start_s = time.monotonic()
        count_from_s = start_s + seconds * WARM_UP_SHARE
        end_s = count_from_s + seconds
        is_warm = False
        while (now_s := time.monotonic()) < end_s:
            if not is_warm and now_s >= count_from_s:
                is_warm, events, start_s = True, 0, now_s
            for fd, _ in epoll.poll(1.0):
                events += by_fd[fd].take()
    return {"events": events, "seconds": time.monotonic() - start_s}


def main(arguments: list[str]) -> None:
    """Run the streams of the arguments."""
    port, path, body, streams, seconds = arguments
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
    print(json.dumps(run(int(port), (head + body).encode(), int(streams), float(seconds))))


if __name__ == "__main__":
    main(sys.argv[1:])
