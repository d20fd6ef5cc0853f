# SPDX-License-Identifier: Apache-2.0
"""A running server that `actorserve chat` asks, by OpenAI's API and the standard library's HTTP."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from actorserve.errors import ActorserveError, InvalidArgument, Unavailable
from actorserve.frontend.chat_source import Cancel, Manner, Message, Tell, choose_model
from actorserve.frontend.probe import host_and_port, reason_of

_EVENT = b"data: "
_DONE = b"[DONE]"
_REASON_CHARS = 500
_LEAVE_S = 1.0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    """What is read of an event, or of an error's document."""

    choices: list[_Choice] = []
    error: _Error | None = None


class _Listed(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Listed]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_decode_list = msgspec.json.Decoder(_List).decode


class _Link:
    """A connection that can be cut from another thread."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self._socket: socket.socket | None = None
        self._is_cut = False

    def open(self) -> None:
        """Connect. Raises OSError, also where it was cut already."""
        self.connection.connect()
        self._socket = self.connection.sock
        if self._is_cut:
            raise ConnectionAbortedError("cut")

    def cut(self) -> None:
        """End whatever waits for the peer."""
        self._is_cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it may be closed already
                self._socket.shutdown(socket.SHUT_RDWR)


class RunningServer:
    """A server somewhere. `timeout_s` is how long it may say nothing.

    Raises ConfigError for a URL that names no server, NotFound where `model` is not there, or
    where none is named and the server has not exactly one.
    """

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._url = url
        self._address = host_and_port(url)
        self._timeout_s = timeout_s
        self.model = choose_model(model, self._models(), f"the server at {url}")

    def ask(self, messages: Sequence[Message], manner: Manner, tell: Tell) -> Cancel:
        """Begin an answer; `tell` hears it."""
        document = {"model": self.model, "messages": list(messages), "stream": True}
        document |= _given(manner)
        link = _Link(self._connect())
        thread = threading.Thread(
            target=self._tell, args=(link, document, tell), name="chat answer", daemon=True
        )

        def cancel() -> None:
            link.cut()
            thread.join(_LEAVE_S)

        thread.start()
        return cancel

    def _tell(self, link: _Link, document: dict[str, Any], tell: Tell) -> None:
        try:
            for text in self._read(link, document):
                tell(text)
        except ActorserveError as error:
            tell(error)
        else:
            tell(None)
        finally:
            link.connection.close()

    def _read(self, link: _Link, document: dict[str, Any]) -> Iterator[str]:
        """Yield the answer's text, piece by piece."""
        try:
            link.open()
        except OSError as error:
            raise self._silent(error) from None
        response = self._send(link.connection, "POST", "/v1/chat/completions", document)
        while line := self._line(response):
            if line.startswith(_EVENT):
                data = line[len(_EVENT) :].strip()
                if data == _DONE:
                    return
                yield from self._texts(data)
        raise Unavailable(f"the server at {self._url} ended in the middle of an answer")

    def close(self) -> None:
        """Do nothing: connections end with their answers."""

    def _texts(self, data: bytes) -> Iterator[str]:
        chunk = self._decoded(data, _decode_chunk)
        if chunk.error is not None:
            raise Unavailable(chunk.error.message)
        for choice in chunk.choices:
            if choice.delta.content:
                yield choice.delta.content

    def _models(self) -> list[str]:
        connection = self._connect()
        try:
            body = self._send(connection, "GET", "/v1/models", None).read()
            return [each.id for each in self._decoded(body, _decode_list).data]
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self._address, timeout=self._timeout_s)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, document: Any
    ) -> http.client.HTTPResponse:
        """Send a request; return the response, whose status is 200."""
        body = None if document is None else msgspec.json.encode(document)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            if response.status == 200:
                return response
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None
        raise self._refused(response.status, text)

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise self._silent(error) from None

    def _refused(self, status: int, text: bytes) -> ActorserveError:
        try:
            error = _decode_chunk(text).error
        except msgspec.MsgspecError:
            error = None
        reason = error.message if error is not None else f"HTTP status {status}"
        kind = InvalidArgument if status == 400 else Unavailable
        return kind(f"{self._url}: {reason}")

    def _decoded(self, data: bytes, decode: Any) -> Any:
        try:
            return decode(data)
        except msgspec.MsgspecError:
            shown = data[:_REASON_CHARS].decode(errors="replace")
            raise Unavailable(f"{self._url} does not speak OpenAI's protocol: {shown}") from None

    def _silent(self, error: Exception) -> Unavailable:
        return Unavailable(f"no answer from {self._url}: {reason_of(error)}")


def _given(manner: Manner) -> dict[str, Any]:
    members = {"max_tokens": manner.max_tokens, "temperature": manner.temperature}
    return {name: value for name, value in members.items() if value is not None}
