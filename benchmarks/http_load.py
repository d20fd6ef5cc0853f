# SPDX-License-Identifier: Apache-2.0
"""Put load on an HTTP server, by wrk where it is installed, else by load_client.py.

Both keep one request outstanding per connection and run in a process of their own. wrk is used
for small bodies only: for large ones the client's own cost does not matter, and one client for
all machines is worth more.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.sampling import CannotRun

SMALL_BYTES = 64 << 10

_SCRIPT = """
local file = io.open("%s", "rb")
wrk.method = "POST"
wrk.body = file:read("*all")
file:close()
%s
done = function(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('\\n{"requests": %%d, "seconds": %%f, "errors": %%d, "p99_us": %%f}\\n',
    summary.requests, summary.duration / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(99)))
end
"""


class Post(msgspec.Struct, frozen=True):
    """One request, sent again and again."""

    path: str
    headers: dict[str, str]
    body: bytes


class Outcome(msgspec.Struct, frozen=True):
    """What a load came to."""

    requests: int
    seconds: float
    errors: int
    p99_us: float

    @property
    def per_s(self) -> float:
        """Return requests per second."""
        return self.requests / self.seconds


def identity_v2(nbytes: int) -> Post:
    """Return a v2 request with a binary tensor, as Triton's own client sends it."""
    output = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    tensor = {
        "name": "INPUT0",
        "datatype": "FP32",
        "shape": [nbytes // 4],
        "parameters": {"binary_data_size": nbytes},
    }
    document = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(document)),
    }
    return Post("/v2/models/identity/infer", headers, document + bytes(nbytes))


def identity_raw(nbytes: int) -> Post:
    """Return a request whose body is the tensor and nothing else."""
    return Post("/inference", {"Content-Type": "application/octet-stream"}, bytes(nbytes))


def load(port: int, post: Post, clients: int, seconds: float) -> Outcome:
    """Run the load. Raises CannotRun if any request was not answered with success."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        body = Path(folder) / "body"
        body.write_bytes(post.body)
        wrk = shutil.which("wrk") if len(post.body) <= SMALL_BYTES else None
        if wrk is not None:
            command = _wrk_command(wrk, Path(folder), body, port, post, clients, seconds)
        else:
            command = _client_command(body, port, post, clients, seconds)
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=seconds + 60
        )
    if done.returncode:
        raise CannotRun(f"{Path(command[0]).name}: {(done.stderr or done.stdout)[-200:]}")
    outcome = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=Outcome)
    if outcome.errors or not outcome.requests:
        raise CannotRun(f"{outcome.errors} of {outcome.requests} requests failed")
    return outcome


def _wrk_command(
    wrk: str, folder: Path, body: Path, port: int, post: Post, clients: int, seconds: float
) -> list[str]:
    headers = "\n".join(f'wrk.headers["{name}"] = "{text}"' for name, text in post.headers.items())
    script = folder / "post.lua"
    script.write_text(_SCRIPT % (body, headers))
    # wrk takes whole seconds only.
    length = ["-t1", f"-c{clients}", f"-d{max(1, round(seconds))}s", "-s", str(script)]
    return [wrk, *length, f"http://127.0.0.1:{port}{post.path}"]


def _client_command(body: Path, port: int, post: Post, clients: int, seconds: float) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.load_client", str(port), post.path, str(body)]
    return [*command, json.dumps(post.headers), str(clients), str(seconds)]
