# SPDX-License-Identifier: Apache-2.0
"""A light HTTP client for load: raw sockets in one epoll loop, in a process of its own.

load_client.py PORT PATH BODYFILE HEADERS(JSON) CLIENTS SECONDS ─► one line of JSON
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from pathlib import Path

WARM_UP_SHARE = 0.2
_BUFFER_BYTES = 1 << 20


class Connection:
    """One connection with one request outstanding."""

    def __init__(self, port: int, request: bytes, buffer: memoryview) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._request = memoryview(request)
        self._buffer = buffer
        self._unsent = self._request[:0]
        self._head = b""
        self._left = -1  # of the body; negative while the head is incomplete
        self._sent_at_s = 0.0
        self.is_error = False

    def begin(self) -> bool:
        """Send the next request; False while the socket does not take all of it."""
        self._sent_at_s = time.monotonic()
        self._unsent = self._request
        self._head = b""
        self._left = -1
        return self.send()

    def send(self) -> bool:
        """Send on; True when the request is out."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> float | None:
        """Read what is there; return the request's time in seconds once it is answered."""
        try:
            while True:
                count = self.socket.recv_into(self._buffer)
                if not count:
                    raise ConnectionError("the server closed a connection")
                self._take(self._buffer[:count])
                if self._left == 0:
                    return time.monotonic() - self._sent_at_s
        except BlockingIOError:
            return None

    def _take(self, data: memoryview) -> None:
        if self._left >= 0:
            self._left -= len(data)
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self._head[:end].lower().split(b"\r\n")
        self.is_error = b" 200 " not in lines[0] + b" "
        length = next(line for line in lines if line.startswith(b"content-length:"))
        self._left = int(length[15:]) - (len(self._head) - end - 4)


class Load:
    """All connections, in one loop."""

    def __init__(self, port: int, request: bytes, clients: int) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        made = [Connection(port, request, buffer) for _ in range(clients)]
        self._connections = {each.socket.fileno(): each for each in made}
        self._epoll = select.epoll()
        self._times_s: list[float] = []
        self._errors = 0
        for fd in self._connections:
            self._epoll.register(fd, select.EPOLLIN)
            self._begin(fd)

    def run(self, seconds: float) -> dict[str, float]:
        """Keep the load up; return what came of it, without what the first moments did."""
        self._turn(seconds * WARM_UP_SHARE)
        self._times_s.clear()
        start_s = time.monotonic()
        self._turn(seconds)
        elapsed_s = time.monotonic() - start_s
        times_s = sorted(self._times_s)
        p99_us = times_s[len(times_s) * 99 // 100] * 1e6 if times_s else 0.0
        return {
            "requests": len(times_s),
            "seconds": elapsed_s,
            "errors": self._errors,
            "p99_us": p99_us,
        }

    def _turn(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            for fd, events in self._epoll.poll(1.0):
                self._on_event(fd, events)

    def _on_event(self, fd: int, events: int) -> None:
        connection = self._connections[fd]
        if events & select.EPOLLOUT and connection.send():
            self._epoll.modify(fd, select.EPOLLIN)
        if events & ~select.EPOLLOUT:
            took_s = connection.receive()
            if took_s is not None:
                self._times_s.append(took_s)
                self._errors += connection.is_error
                self._begin(fd)

    def _begin(self, fd: int) -> None:
        if not self._connections[fd].begin():
            self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT)


def main(arguments: list[str]) -> None:
    """Run the load of the arguments."""
    port, path, body_file, headers, clients, seconds = arguments
    body = Path(body_file).read_bytes()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}\r\n"
    head += "".join(f"{name}: {text}\r\n" for name, text in json.loads(headers).items())
    load = Load(int(port), head.encode() + b"\r\n" + body, int(clients))
    print(json.dumps(load.run(float(seconds))))


if __name__ == "__main__":
    main(sys.argv[1:])
