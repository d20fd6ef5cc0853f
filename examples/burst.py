# SPDX-License-Identifier: Apache-2.0
"""Put bursts of concurrent streams on a server: `python examples/burst.py [--http HOST:PORT]`.

    64 clients ─► orchestrator ─► leaf, N streams at once for each request
                       └─► how many streams were complete and in order, how many were not

A round is one request of every client, all at the same time. Without --http the models of
examples/pipeline_repository are served by this program itself. The exit code is 1 if any stream
was not complete, or any request failed.
"""

import argparse
import asyncio
import http.client
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil

from actorserve import ActorserveError, Supervisor
from actorserve.config import Settings

REPOSITORY = Path(__file__).parent / "pipeline_repository"
MODELS = ("orchestrator", "leaf")
COLUMNS = [
    "streams",
    "rounds",
    "requests",
    "complete",
    "incomplete",
    "errors",
    "requests/s",
    "streams/s",
]
TIMEOUT_S = 300.0
MIB = 1 << 20


class Ends(msgspec.Struct):
    """How the streams of one or many requests have ended; a request that failed is one error."""

    complete: int = 0
    incomplete: int = 0
    errors: int = 0

    def add(self, other: "Ends") -> None:
        """Count another's, too."""
        self.complete += other.complete
        self.incomplete += other.incomplete
        self.errors += other.errors


class Embedded:
    """The server within this program."""

    def __init__(self, server: Supervisor) -> None:
        self._server = server

    async def ask(self, streams: int, length: int) -> Ends:
        """Send one request."""
        inputs = {"STREAMS": [streams], "LENGTH": [length]}
        try:
            outputs = await self._server.infer("orchestrator", inputs, timeout_s=TIMEOUT_S)
        except ActorserveError as error:
            print(f"a request failed: {error.message}", file=sys.stderr)
            return Ends(errors=1)
        return Ends(*[int(outputs[name][0]) for name in ("COMPLETE", "INCOMPLETE", "ERRORS")])

    async def stub_pids(self) -> list[int]:
        """Return the processes of the models."""
        return pids_of(json.loads(await self._server.status()))


class Remote:
    """A server that is reached over HTTP, one connection for each request in flight."""

    def __init__(self, address: str, clients: int) -> None:
        self._address = address
        self._threads = ThreadPoolExecutor(clients)

    async def ask(self, streams: int, length: int) -> Ends:
        """Send one request from a thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._ask, streams, length
        )

    def _ask(self, streams: int, length: int) -> Ends:
        inputs = [
            {"name": name, "datatype": "INT64", "shape": [1], "data": [value]}
            for name, value in (("STREAMS", streams), ("LENGTH", length))
        ]
        body = json.dumps({"inputs": inputs})
        try:
            answer = self._request("POST", "/v2/models/orchestrator/infer", body)
        except (OSError, http.client.HTTPException, ValueError) as error:
            print(f"a request failed: {error}", file=sys.stderr)
            return Ends(errors=1)
        found = {output["name"]: output["data"][0] for output in answer["outputs"]}
        return Ends(found["COMPLETE"], found["INCOMPLETE"], found["ERRORS"])

    def _request(self, method: str, path: str, body: str | None = None) -> dict:
        """Return what is answered. Raises ValueError where that is no success."""
        connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            text = response.read().decode()
            if response.status != 200:
                raise ValueError(f"{response.status} {text}")
            return json.loads(text)
        finally:
            connection.close()

    async def stub_pids(self) -> list[int]:
        """Return the processes of the models; none if the server does not tell."""
        try:
            return pids_of(await asyncio.to_thread(self._request, "GET", "/v2/actorserve/status"))
        except (OSError, ValueError):
            return []

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


def pids_of(status: dict) -> list[int]:
    """Return the processes of the two models that a server's status names."""
    return [
        instance["pid"]
        for model in status["models"]
        for version in model["versions"]
        for instance in version["instances"]
        if model["name"] in MODELS
    ]


@asynccontextmanager
async def target(address: str | None, clients: int) -> AsyncIterator[Embedded | Remote]:
    """Serve the models, or reach the server that does."""
    if address is not None:
        remote = Remote(address, clients)
        try:
            yield remote
        finally:
            remote.close()
        return
    settings = Settings(model_control_mode="explicit", load_model=MODELS)
    async with Supervisor(REPOSITORY, settings) as server:
        if server.failures:
            raise SystemExit(f"a model did not load: {server.failures}")
        yield Embedded(server)


async def rss_mib(server: Embedded | Remote) -> str:
    """Return the memory of the stubs in MiB, '-' where they run on another machine."""
    total = 0
    for pid in await server.stub_pids():
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            return "-"
    return f"{total / MIB:.1f}" if total else "-"


async def burst(
    server: Embedded | Remote, streams: int, rounds: int, clients: int, length: int
) -> tuple[Ends, str]:
    """Run the rounds of one number of streams; returns the ends, and a line of the table."""
    ends = Ends()
    await server.ask(streams, length)  # what is made once is made before the clock runs
    before = await rss_mib(server)
    start_s = time.monotonic()
    for _ in range(rounds):
        for each in await asyncio.gather(*[server.ask(streams, length) for _ in range(clients)]):
            ends.add(each)
    took_s = time.monotonic() - start_s
    requests = rounds * clients
    counts = [streams, rounds, requests, ends.complete, ends.incomplete, ends.errors]
    rates = [f"{requests / took_s:.1f}", f"{requests * streams / took_s:.0f}"]
    return ends, row([*map(str, counts), *rates], f"{before} → {await rss_mib(server)} MiB")


def row(cells: Sequence[str], memory: str) -> str:
    """Return a line of the table."""
    shown = [cell.rjust(len(head)) for cell, head in zip(cells, COLUMNS)]
    return "  ".join([*shown, memory])


async def run(arguments: argparse.Namespace) -> int:
    """Run all bursts; returns the exit code."""
    is_good = True
    async with target(arguments.http, arguments.clients) as server:
        print(row(COLUMNS, "RSS of stubs"))
        for streams, rounds in zip(arguments.streams, arguments.rounds, strict=True):
            ends, line = await burst(server, streams, rounds, arguments.clients, arguments.length)
            print(line)
            expected = streams * rounds * arguments.clients
            is_good &= ends == Ends(complete=expected)
    return 0 if is_good else 1


def main(arguments: list[str]) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--http", metavar="HOST:PORT", help="burst that server over HTTP")
    parser.add_argument("--clients", type=int, default=64, help="clients at once (64)")
    parser.add_argument("--length", type=int, default=3, help="responses of a stream (3)")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[8, 64, 512], help="streams of a request"
    )
    parser.add_argument(
        "--rounds", type=int, nargs="+", default=[20, 5, 1], help="rounds, for each of --streams"
    )
    chosen = parser.parse_args(arguments)
    if len(chosen.streams) != len(chosen.rounds):
        parser.error("--streams and --rounds must have as many numbers")
    return asyncio.run(run(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
