# SPDX-License-Identifier: Apache-2.0
"""Shared memory that is full, missing, small or meddled with: a clear error, for whom it concerns.

Two ways to have too little: a small /dev/shm in a mount namespace, and a limit on the size of
files (RLIMIT_FSIZE), which needs no privileges and works for memfd too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from actorserve.errors import ResourceExhausted, Unavailable
from actorserve.shm import segment
from actorserve.triton.inference import InferRequest, InferResponse, InferTensor
from tests.conftest import wait_until
from tests.faults.harness import Harness, stub_pids, write_model
from tests.faults.host import launched, with_mounts, with_shm

MIB = 1 << 20
INPUT = {"INPUT0": ("FP32", [2], [1.0, 2.0])}
ANSWER = (200, {"OUTPUT0": [1.0, 2.0]})

GROWS = """
class TritonPythonModel:
    def execute(self, requests):
        arrays = tensors(requests)
        return answers([np.zeros(int(-a[0]), np.float32) if a[0] < 0 else a for a in arrays])
"""
"""A model that answers with as many zeros as a negative first element says."""


@pytest.fixture(params=["shm", "memfd"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run with segments from /dev/shm and from memfd."""
    monkeypatch.setenv("ACTORSERVE_SHM", request.param)
    monkeypatch.setattr(segment, "_chosen", None)
    return str(request.param)


@contextlib.contextmanager
def files_up_to(limit_bytes: int) -> Iterator[None]:
    """Let this process make no larger file, and so no larger segment."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- row 52: no room at the start -----------------------------------------------------------------


def test_row_52_a_full_shm_at_the_start_is_named(repository, tmp_path):
    """The load fails with the sizes and what to do; no SIGBUS, exit code 1."""
    prefix = with_mounts(
        "mount -t tmpfs -o size=80m tmpfs /dev/shm\n"
        "dd if=/dev/zero of=/dev/shm/filler bs=1M count=79 status=none"
    )
    with launched(tmp_path, repository, prefix=prefix, wait=False) as server:
        assert server.wait(30) == 1
        log = server.log()
        assert "cannot reserve" in log
        assert f"of {80 * MIB} bytes free" in log
        assert "--shm-size" in log


def test_row_52_a_stub_starts_as_soon_as_there_is_room(repository, tmp_path):
    """A restart that finds /dev/shm full is tried again until it is not."""
    write_model(repository, "model")
    prefix = with_shm("size=80m")
    pause = ("--restart-backoff-s", "0.5:0.5")
    with launched(tmp_path, repository, *pause, prefix=prefix) as server:
        filler = Path(f"/proc/{server.process.pid}/root/dev/shm/filler")
        os.kill(server.stubs()["model_0_0"], 9)
        server.wait_log("it will be restarted")
        fd = os.open(filler, os.O_CREAT | os.O_WRONLY)
        with contextlib.suppress(OSError):  # to the last page
            while True:
                os.write(fd, bytes(MIB))
        os.close(fd)
        server.wait_log("/dev/shm is full")
        assert server.call("GET", "/v2/health/ready")[0] == 503
        assert server.infer("bystander", INPUT) == ANSWER
        filler.unlink()
        wait_until(lambda: server.call("GET", "/v2/health/ready")[0] == 200, 20)
        assert server.infer("model", INPUT) == ANSWER
        assert server.stop() == 0


# --- row 53: no room to grow ----------------------------------------------------------------------


def test_row_53_an_input_that_does_not_fit_fails_alone(serve, repository, backend):
    """RESOURCE_EXHAUSTED for the large request; the small ones around it are served."""
    write_model(repository, "model", GROWS)

    async def test(harness: Harness) -> None:
        small = [harness.submit("model", np.full(9000, n)) for n in range(8)]
        with files_up_to(8 * MIB):
            large = await harness.outcome("model", np.zeros(16 * MIB // 4))
            assert isinstance(large, ResourceExhausted), large
            assert "bytes of shared memory" in large.message
            more = await asyncio.gather(
                *[harness.outcome("model", np.full(9000, n)) for n in range(8)]
            )
        for n, got in enumerate([*await asyncio.gather(*small), *more]):
            assert got == [n % 8] * 9000
        assert len(await harness.outcome("model", np.zeros(16 * MIB // 4))) == 16 * MIB // 4

    serve(test)


def test_row_53_an_output_that_does_not_fit_fails_alone(serve, repository, backend):
    """The stub cannot grow its arena: that response is an error, and the stub serves on."""
    write_model(repository, "model", GROWS)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        stub = psutil.Process(pid)
        before = stub.rlimit(psutil.RLIMIT_FSIZE)
        stub.rlimit(psutil.RLIMIT_FSIZE, (8 * MIB, before[1]))
        error = await harness.outcome("model", [-16.0 * MIB / 4])
        assert isinstance(error, ResourceExhausted), error
        assert "bytes of shared memory" in error.message
        assert len(await harness.outcome("model", [-100_000.0])) == 100_000
        stub.rlimit(psutil.RLIMIT_FSIZE, before)
        assert len(await harness.outcome("model", [-16.0 * MIB / 4])) == 16 * MIB // 4
        assert harness.instance("model").pid == pid

    serve(test)


def test_row_53_a_request_whose_second_input_does_not_fit_gives_the_first_back(
    serve, repository, backend
):
    """Nothing of a refused request stays in the arena."""
    write_model(repository, "model")
    config = repository / "model" / "config.pbtxt"
    config.write_text(
        config.read_text()
        + 'input [ { name: "INPUT1" data_type: TYPE_FP32 dims: [ -1 ] optional: true } ]\n'
    )

    def nobody(_response: InferResponse) -> None:
        raise AssertionError("a refused request was answered")

    async def test(harness: Harness) -> None:
        for _ in range(3):
            slab = harness.server.allocate(64 << 10)
            while slab is None:
                await harness.server.grow(64 << 10)
                slab = harness.server.allocate(64 << 10)
            tensors = [
                InferTensor("INPUT0", "FP32", (16 << 10,), slab),
                InferTensor("INPUT1", "FP32", (4 * MIB,), bytes(16 * MIB)),
            ]
            with files_up_to(8 * MIB), pytest.raises(ResourceExhausted):
                harness.server.submit(InferRequest("model", tensors), nobody)

    serve(test)


def test_row_53_a_small_shm_under_load(embed, repository):
    """In 80 MiB, clients that ask for 40 MiB at a time fail or not; the small ones never do."""
    write_model(repository, "model", GROWS, count=2)
    host = embed(
        """
from actorserve.errors import ActorserveError, ResourceExhausted

async def main():
    server = new_server()
    await server.start()
    assert not server.failures, server.failures
    counts = {"small": 0, "large": 0, "full": 0}
    is_over = False

    async def small(n):
        x = np.full(2500 * (n + 1), n, np.float32)
        while not is_over:
            got = await server.infer("model", {"INPUT0": x}, timeout_s=20)
            assert np.array_equal(got["OUTPUT0"], x)
            counts["small"] += 1

    async def large(n):
        for _ in range(6):
            x = np.full(10 << 20, n, np.float32)
            try:
                got = await server.infer("model", {"INPUT0": x}, timeout_s=20)
                assert np.array_equal(got["OUTPUT0"], x)
                del got
                counts["large"] += 1
            except ResourceExhausted:
                counts["full"] += 1

    clients = [asyncio.ensure_future(small(n)) for n in range(4)]
    await asyncio.gather(*[large(n) for n in range(3)])
    is_over = True
    await asyncio.gather(*clients)
    gc.collect()
    for _ in range(500):
        stats = server.stats().exchange
        if not stats.held_blocks:
            break
        await pause(0.01)
    restarts = [e.restarts for m in server.stats().models for v in m.versions for e in v.instances]
    await server.stop()
    say(used=stats.arena.used_bytes, held=stats.held_blocks, restarts=sum(restarts), **counts)

asyncio.run(main())
""",
        with_shm("size=80m"),
    )
    facts = host.hear()
    assert host.wait() == 0
    assert facts["used"] == facts["held"] == facts["restarts"] == 0
    assert facts["large"] + facts["full"] == 18
    assert facts["full"] > 0
    assert facts["small"] > 20


# --- row 54: what /dev/shm may be -----------------------------------------------------------------

NO_SHM = """
new=$(mktemp -d)
mount -t tmpfs tmpfs "$new"
for name in null zero full random urandom tty; do
    touch "$new/$name"
    mount --bind "/dev/$name" "$new/$name"
done
ln -s /proc/self/fd "$new/fd"
mount --bind "$new" /dev
"""

SHMS: dict[str, tuple[Callable[[], list[str]], str]] = {
    "missing": (lambda: with_mounts(NO_SHM), "memfd:"),
    "read-only": (lambda: with_shm("ro,size=1g"), "memfd:"),
    "noexec": (lambda: with_shm("noexec,nosuid,nodev,size=1g"), "/dev/shm/"),
    "too small": (lambda: with_shm("size=32m"), "memfd:"),
    "docker's 64 MiB": (lambda: with_shm("size=64m"), "/dev/shm/"),
}


@pytest.mark.parametrize("kind", SHMS)
def test_row_54_whatever_dev_shm_is_the_server_serves(repository, tmp_path, kind):
    """/dev/shm where it can be used, memfd where it cannot; megabytes pass either way."""
    prefix, where = SHMS[kind][0](), SHMS[kind][1]
    with launched(tmp_path, repository, prefix=prefix) as server:
        x = np.arange(MIB // 4, dtype=np.float32)
        for _ in range(2):
            reply = server.infer_binary("bystander", {"INPUT0": ("FP32", x)})
            assert np.array_equal(reply.outputs["OUTPUT0"], x)
        fds = Path(f"/proc/{server.process.pid}/fd").iterdir()
        names = [target for target in map(link, fds) if "actorserve" in target]
        assert names
        assert all(where in name or "actorserve-health" in name for name in names), names
        assert server.stop() == 0


def link(path: Path) -> str:
    """Return where a link leads, nothing where it has gone."""
    try:
        return os.readlink(path)  # noqa: PTH115 (the text as it is)
    except OSError:
        return ""


@pytest.mark.parametrize("kind", ["missing", "read-only"])
def test_row_54_an_unusable_shm_that_is_insisted_on_is_named(
    repository, tmp_path, monkeypatch, kind
):
    """ACTORSERVE_SHM=shm forbids the way out: the error says what is wrong and what would help."""
    monkeypatch.setenv("ACTORSERVE_SHM", "shm")
    with launched(tmp_path, repository, prefix=SHMS[kind][0](), wait=False) as server:
        assert server.wait(30) == 1
        assert "cannot create shared memory in /dev/shm" in server.log()
        assert "ACTORSERVE_SHM=memfd" in server.log()


# --- row 55: somebody deletes our files -----------------------------------------------------------


def test_row_55_nothing_of_ours_has_a_name_to_be_deleted(repository, tmp_path):
    """`rm -rf /dev/shm/*` finds nothing while requests run, and changes nothing."""
    write_model(repository, "model", count=2)
    with launched(tmp_path, repository, prefix=with_shm("size=1g")) as server:
        shm = Path(f"/proc/{server.process.pid}/root/dev/shm")
        x = np.arange(MIB, dtype=np.float32)
        before = stub_pids()
        for _ in range(5):
            reply = server.infer_binary("model", {"INPUT0": ("FP32", x)})
            assert np.array_equal(reply.outputs["OUTPUT0"], x)
            assert list(shm.iterdir()) == []
        assert stub_pids() == before
        assert server.stop() == 0


# --- row 56: a stub without descriptors -----------------------------------------------------------


def test_row_56_a_stub_that_has_no_descriptor_for_an_input_is_replaced(serve, repository):
    """A segment that it could not take would be missing for ever: it ends, and its heir works."""
    body = """
class TritonPythonModel:
    def execute(self, requests):
        if len(tensors(requests)[0]) == 1:
            import resource
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, 20_000))
        return answers(tensors(requests))
"""
    write_model(repository, "model", body)

    async def test(harness: Harness) -> None:
        pid = harness.instance("model").pid
        assert await harness.outcome("model", [1.0]) == [1.0]
        error = await asyncio.wait_for(harness.outcome("model", [2.0] * 5000), 5)
        assert isinstance(error, Unavailable), error
        await harness.until_restarted("model", pid)
        assert await harness.outcome("model", [3.0] * 5000) == [3.0] * 5000

    serve(test)


def test_row_56_a_stub_that_has_no_descriptor_for_an_output_says_so(serve, repository):
    """RESOURCE_EXHAUSTED for the response; small ones still pass, and all when there are some."""
    write_model(repository, "model", GROWS)

    async def test(harness: Harness) -> None:
        stub = psutil.Process(harness.instance("model").pid)
        before = stub.rlimit(psutil.RLIMIT_NOFILE)
        stub.rlimit(psutil.RLIMIT_NOFILE, (3, before[1]))
        error = await harness.outcome("model", [-5000.0])
        assert isinstance(error, ResourceExhausted), error
        assert "ulimit -n" in error.message
        assert await harness.outcome("model", [1.0]) == [1.0]
        stub.rlimit(psutil.RLIMIT_NOFILE, before)
        assert await harness.outcome("model", [-5000.0]) == [0.0] * 5000
        assert harness.instance("model").restarts == 0

    serve(test)
