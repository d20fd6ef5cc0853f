# SPDX-License-Identifier: Apache-2.0
"""Where the answers of `actorserve chat` come from: a running server, or one of its own.

    RunningServer   POST /v1/chat/completions, by the standard library's HTTP
    OwnServer       the repository's model in stubs of this process, without a port

Both give an answer piece by piece; leaving the iteration early cancels what is still to come.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from actorserve.actors.repository import Repository
from actorserve.actors.sync_supervisor import SyncSupervisor
from actorserve.config import Settings
from actorserve.errors import ActorserveError, ConfigError, NotFound, Unavailable
from actorserve.frontend.probe import host_and_port, reason_of
from actorserve.triton.generation_tensors import GENERATION

_EVENT = b"data: "
_DONE = b"[DONE]"
_REASON_CHARS = 500
_STOP_S = 5.0


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: str
    content: str


class Manner(msgspec.Struct, frozen=True):
    """How answers are generated; None for as the model does it by itself."""

    max_tokens: int | None = None
    temperature: float | None = None


class Source(Protocol):
    """Whoever answers."""

    model: str

    def ask(self, messages: Sequence[Message], manner: Manner) -> Iterator[str]:
        """Yield the answer's text, piece by piece. Raises ActorserveError."""

    def close(self) -> None:
        """Let go of everything."""


# --- a running server ----------------------------------------------------------------------------


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


class RunningServer:
    """A server somewhere. `timeout_s` is how long it may say nothing.

    Raises ConfigError for a URL that names no server, NotFound where `model` is not there, or
    where none is named and the server has not exactly one.
    """

    def __init__(self, url: str, model: str, timeout_s: float) -> None:
        self._url = url
        self._address = host_and_port(url)
        self._timeout_s = timeout_s
        self.model = _choose(model, self._models(), f"the server at {url}")

    def ask(self, messages: Sequence[Message], manner: Manner) -> Iterator[str]:
        """Yield the answer's text, piece by piece."""
        document: dict[str, Any] = {"model": self.model, "messages": messages, "stream": True}
        document |= _given(manner)
        connection = self._connect()
        try:
            response = self._send(connection, "POST", "/v1/chat/completions", document)
            while True:
                line = self._line(response)
                if not line:
                    raise Unavailable(f"the server at {self._url} ended in the middle of an answer")
                if line.startswith(_EVENT):
                    data = line[len(_EVENT) :].strip()
                    if data == _DONE:
                        return
                    yield from self._texts(data)
        finally:
            connection.close()

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
        return Unavailable(f"{self._url}: {reason}")

    def _decoded(self, data: bytes, decode: Any) -> Any:
        try:
            return decode(data)
        except msgspec.MsgspecError:
            shown = data[:_REASON_CHARS].decode(errors="replace")
            raise Unavailable(f"{self._url} does not speak OpenAI's protocol: {shown}") from None

    def _silent(self, error: Exception) -> Unavailable:
        return Unavailable(f"no answer from {self._url}: {reason_of(error)}")


# --- a server of its own -------------------------------------------------------------------------


class OwnServer:
    """A model of a repository, loaded for this conversation and for nobody else.

    Raises ConfigError or NotFound where the repository has no such model, and Unavailable where
    it does not load.
    """

    def __init__(self, repositories: Sequence[str], model: str) -> None:
        repository = Repository(repositories)
        repository.check()
        where = " and ".join(str(path) for path in repositories)
        self.model = _choose(model, _generating(repository, model), where)
        settings = Settings(model_control_mode="explicit", load_model=(self.model,))
        self._server = SyncSupervisor([Path(path) for path in repositories], settings)
        self._server.start()
        try:
            for reason in self._server.failures.values():
                raise Unavailable(reason)
        except BaseException:
            self.close()
            raise

    def ask(self, messages: Sequence[Message], manner: Manner) -> Iterator[str]:
        """Yield the answer's text, piece by piece."""
        inputs: dict[str, Any] = {
            "messages": [msgspec.json.encode(messages)],
            "stream": np.array([True]),
        }
        if manner.max_tokens is not None:
            inputs["max_tokens"] = np.array([manner.max_tokens], np.int32)
        if manner.temperature is not None:
            inputs["temperature"] = np.array([manner.temperature], np.float32)
        for outputs in self._server.stream(self.model, inputs):
            text: bytes = outputs["text_output"][0]
            if text:
                yield text.decode(errors="replace")

    def close(self) -> None:
        """End the model and its processes."""
        self._server.stop(grace_s=_STOP_S)


def _generating(repository: Repository, wanted: str) -> list[str]:
    """Return the models that generate text. Raises ConfigError for a wanted one that is broken."""
    found = []
    for name, entry in repository.scan().items():
        try:
            is_one = repository.read(entry).config.backend == GENERATION
        except ConfigError:
            if name == wanted:
                raise
            continue
        if is_one:
            found.append(name)
    return found


def _choose(wanted: str, found: Sequence[str], where: str) -> str:
    """Return the model to talk to. Raises NotFound or ConfigError."""
    names = ", ".join(found) or "none"
    if wanted and wanted not in found:
        raise NotFound(f"{where} has no model '{wanted}' that generates text; it has: {names}")
    if wanted:
        return wanted
    if len(found) != 1:
        raise ConfigError(f"name a model with --model; {where} has: {names}")
    return found[0]


def _given(manner: Manner) -> dict[str, Any]:
    members = {"max_tokens": manner.max_tokens, "temperature": manner.temperature}
    return {name: value for name, value in members.items() if value is not None}
