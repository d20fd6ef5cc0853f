# SPDX-License-Identifier: Apache-2.0
"""A running `actorserve start` to be asked and hurt, and models to serve."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from actorserve.clock import monotonic_s
from actorserve.wire.tensors import BY_WIRE_NAME, decode_bytes, encode_bytes

START_TIMEOUT_S = 40.0
EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"

MODEL_HEAD = """\
import json, os, signal, sys, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils
"""

IDENTITY_CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""

IDENTITY = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", x)]))
        return answers
"""

TELL = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        texts = [self.tell(request).encode() for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([text], object))])
            for text in texts
        ]
"""
"""The head of a model that answers with one text, made by its method `tell`."""

TELL_CONFIG = """\
backend: "python"
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


def write_model(
    repository: Path,
    name: str,
    body: str = IDENTITY,
    config: str | None = IDENTITY_CONFIG,
    versions: Sequence[int | str] = (1,),
) -> Path:
    """Write a model with this source (after the usual imports); returns its folder."""
    folder = repository / name
    for version in versions:
        (folder / str(version)).mkdir(parents=True, exist_ok=True)
        (folder / str(version) / "model.py").write_text(MODEL_HEAD + body)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder


def parameter(name: str, value: object) -> str:
    """Return a parameter in config.pbtxt's words."""
    return f'parameters {{ key: "{name}" value: {{ string_value: "{value}" }} }}\n'


def binary_body(
    tensors: dict[str, tuple[str, Any]], *, binary_output: bool = True, **members: Any
) -> tuple[bytes, dict[str, str]]:
    """Return the body and headers of a request whose tensors are binary: {name: (type, array)}."""
    described, blocks = [], []
    for name, (datatype, array) in tensors.items():
        block = encode_bytes(array) if datatype == "BYTES" else array.tobytes()
        blocks.append(block)
        described.append(
            {
                "name": name,
                "datatype": datatype,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(block)},
            }
        )
    document = {"inputs": described, **members}
    if binary_output:
        document.setdefault("parameters", {})["binary_data_output"] = True
    head = json.dumps(document).encode()
    return head + b"".join(blocks), {"Inference-Header-Content-Length": str(len(head))}


def read_outputs(document: dict[str, Any], blocks: bytes) -> dict[str, Any]:
    """Return the outputs of a response by name: arrays of binary ones, lists of the others."""
    found: dict[str, Any] = {}
    for output in document["outputs"]:
        nbytes = output.get("parameters", {}).get("binary_data_size")
        if nbytes is None:
            found[output["name"]] = output["data"]
            continue
        block, blocks = blocks[:nbytes], blocks[nbytes:]
        if output["datatype"] == "BYTES":
            flat = decode_bytes(block)
        else:
            flat = np.frombuffer(block, BY_WIRE_NAME[output["datatype"]].body_dtype)
        found[output["name"]] = flat.reshape(output["shape"])
    assert blocks == b"", "bytes that belong to no output"
    return found


class Reply:
    """What came back: status, headers (lower-case names), body."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        """The body, or its document where binary blocks follow."""
        size = self.headers.get("inference-header-content-length")
        return json.loads(self.body if size is None else self.body[: int(size)])

    @property
    def error(self) -> str:
        """The text of an error."""
        document = json.loads(self.body)
        assert set(document) == {"error"}, document
        return str(document["error"])

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs by name; fails for an error."""
        assert self.status == 200, (self.status, self.body[:2000])
        size = self.headers.get("inference-header-content-length")
        return read_outputs(self.json, b"" if size is None else self.body[int(size) :])


class Server:
    """A running `actorserve start`."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path, log: Path) -> None:
        self.process = process
        self.log_path = log
        self.ready_file = ready_file
        self.host = "127.0.0.1"
        self.port = 0
        self.metrics_port = 0

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait for the ready file; fail with the log where the server ends before."""
        deadline_s = monotonic_s() + timeout_s
        while not self.ready_file.exists():
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log()}")
            self._pause(deadline_s, f"the server is not ready after {timeout_s:g} s")
        document = json.loads(self.ready_file.read_text())
        where = document["http"]
        self.host, self.port = where["host"], where["port"]
        self.metrics_port = document.get("metrics", {"port": 0})["port"]

    def wait_log(self, text: str, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait until the log holds a text; returns the log."""
        deadline_s = monotonic_s() + timeout_s
        while text not in (log := self.log()):
            if self.process.poll() is not None and text not in (log := self.log()):
                pytest.fail(f"ended with {self.process.returncode} without {text!r}:\n{log}")
            self._pause(deadline_s, f"no {text!r} in the log after {timeout_s:g} s")
        return log

    def wait_listening(self) -> None:
        """Wait until HTTP is served, models loaded or not."""
        log = self.wait_log("HTTP on http://")
        self.port = int(log.partition("HTTP on http://")[2].partition('"')[0].rpartition(":")[2])

    def _pause(self, deadline_s: float, what: str) -> None:
        if monotonic_s() > deadline_s:
            pytest.fail(f"{what}:\n{self.log()}")
        try:
            self.process.wait(0.01)
        except subprocess.TimeoutExpired:
            pass

    @property
    def address(self) -> str:
        """host:port of the HTTP front end."""
        return f"{self.host}:{self.port}"

    def log(self) -> str:
        """Everything that the server wrote to stderr."""
        return self.log_path.read_text(errors="replace")

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 30.0,
        port: int | None = None,
    ) -> Reply:
        """Send one request on a connection of its own, to the HTTP port or to another one."""
        connection = http.client.HTTPConnection(self.host, port or self.port, timeout=timeout_s)
        try:
            data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, named, response.read())
        finally:
            connection.close()

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> tuple[int, Any]:
        """Send one request; returns the status and the body, parsed where it is JSON."""
        reply = self.request(method, path, body, headers, timeout_s)
        try:
            return reply.status, json.loads(reply.body)
        except ValueError:
            return reply.status, reply.body

    def infer(
        self, model: str, inputs: dict[str, tuple[str, list[int], list[Any]]], **members: Any
    ) -> Any:
        """Infer with JSON; returns (status, outputs by name or the error's text)."""
        tensors = [
            {"name": name, "datatype": datatype, "shape": shape, "data": data}
            for name, (datatype, shape, data) in inputs.items()
        ]
        document = {"inputs": tensors, **members}
        status, answer = self.call("POST", f"/v2/models/{model}/infer", document)
        if status != 200:
            return status, answer["error"]
        return status, {output["name"]: output["data"] for output in answer["outputs"]}

    def infer_binary(
        self, model: str, tensors: dict[str, tuple[str, Any]], **members: Any
    ) -> Reply:
        """Infer with binary tensors both ways: {name: (type, array)}."""
        body, headers = binary_body(tensors, **members)
        return self.request("POST", f"/v2/models/{model}/infer", body, headers)

    def tell(self, model: str) -> str:
        """Return the text of a TELL model."""
        status, outputs = self.infer(model, {"INPUT0": ("FP32", [1], [0])})
        assert status == 200, outputs
        return str(outputs["OUTPUT0"][0])

    def stubs(self) -> dict[str, int]:
        """Return the pids of the stubs by the name that ps shows."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                found[process.name()] = process.pid
            except psutil.Error:
                continue
        return {name: pid for name, pid in found.items() if name[-1:].isdigit()}

    def stop(self, timeout_s: float = 20.0) -> int:
        """Send SIGTERM and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Wait for the end; returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the server did not stop within {timeout_s:g} s:\n{self.log()}")


class Launcher:
    """Starts servers that keep their files in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: list[Server] = []

    def __call__(
        self,
        *repositories: Path | str,
        flags: Sequence[str] = (),
        wait: bool = True,
        env: dict[str, str] | None = None,
        own_group: bool = False,
    ) -> Server:
        """Start a server for these repositories; arguments that begin with a dash are flags too."""
        number = len(self._servers)
        ready_file = self._folder / f"ready-{number}.json"
        log = self._folder / f"server-{number}.log"
        command = [sys.executable, "-m", "actorserve", "start"]
        command += ["--http-port", "0", "--metrics-port", "0", "--ready-file", str(ready_file)]
        command += ["--crash-dir", str(self._folder / "crashes")]
        command += [*map(str, repositories), *flags]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stderr=stream,
                stdout=stream,
                env={**os.environ, **(env or {})},
                start_new_session=own_group,
            )
        server = Server(process, ready_file, log)
        self._servers.append(server)
        if wait:
            server.wait_ready()
        return server

    def stop_all(self) -> None:
        """Stop whatever still runs."""
        for server in self._servers:
            if server.process.poll() is None:
                server.stop()
