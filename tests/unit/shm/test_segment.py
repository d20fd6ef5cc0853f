# SPDX-License-Identifier: Apache-2.0
"""Tests of segments: nameless, reserved, tracked by nobody, alive as long as their views."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actorserve.errors import ConfigError, ProtocolError, ResourceExhausted
from actorserve.shm import segment as segment_module
from actorserve.shm.segment import PAGE_BYTES, Segment

REPOSITORY = Path(segment_module.__file__).parents[2]


def _mapped() -> int:
    """Count this process's mappings of segments."""
    maps = Path("/proc/self/maps").read_text()
    return sum("actorserve" in line and "deleted" in line for line in maps.splitlines())


def test_create_rounds_up_to_pages_and_zeroes(backend: str) -> None:
    """A segment has whole pages, all zero, writable as bytes."""
    segment = Segment.create(PAGE_BYTES + 1)
    assert segment.nbytes == 2 * PAGE_BYTES == len(segment.buffer)
    assert segment.buffer.format == "B"
    assert not segment.buffer.readonly
    assert not any(segment.buffer)
    segment.close()


def test_pages_are_reserved_at_once(backend: str) -> None:
    """Every page exists before anyone writes, so that a write can never be a SIGBUS."""
    segment = Segment.create(1 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    segment.close()


def test_descriptor_is_private_and_nameless(backend: str) -> None:
    """The descriptor is close-on-exec, readable by its owner alone, and no name leads to it."""
    segment = Segment.create(1)
    assert not os.get_inheritable(segment.fd)
    if backend == "shm":
        assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert "(deleted)" in str(Path(f"/proc/self/fd/{segment.fd}").readlink())
    assert not list(Path("/dev/shm").glob("actorserve-*"))
    segment.close()


@pytest.mark.parametrize("backend_name", ["shm", "memfd"])
def test_no_resource_tracker_starts(backend_name: str) -> None:
    """Segments, lanes, bells and fences start no process, in a fresh interpreter."""
    script = """
import os, psutil
from multiprocessing import resource_tracker
from actorserve.shm.doorbell import Doorbell
from actorserve.shm.lane import Consumer, Lane, Producer
from actorserve.shm.segment import Segment
lane, bell = Lane.create(), Doorbell.create()
Producer(lane, bell), Consumer(lane, bell)
other = Segment.attach(os.dup(lane.segment.fd), lane.segment.nbytes)
other.close(), lane.close(), bell.close()
assert resource_tracker._resource_tracker._fd is None
assert psutil.Process().children() == []
"""
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), ACTORSERVE_SHM=backend_name)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("nbytes", [0, -1])
def test_create_refuses_an_empty_segment(nbytes: int) -> None:
    """Sizes below 1 are the caller's mistake."""
    with pytest.raises(ValueError, match="at least 1 byte"):
        Segment.create(nbytes)


@pytest.mark.parametrize("nbytes", [1 << 61, 1 << 70])
def test_create_refuses_what_no_machine_has(nbytes: int, backend: str) -> None:
    """An absurd size is a clear error."""
    with pytest.raises(ResourceExhausted, match=str(nbytes)):
        Segment.create(nbytes)


def test_peer_sees_the_same_bytes(backend: str, fork) -> None:
    """Another process that maps the descriptor shares the memory."""
    segment = Segment.create(100)

    def peer() -> None:
        theirs = Segment.attach(os.dup(segment.fd), segment.nbytes)
        theirs.buffer[10] = 42
        theirs.close()

    assert fork(peer).wait() == 0
    assert segment.buffer[10] == 42
    segment.close()


def test_attach_takes_the_descriptor_over(backend: str) -> None:
    """A received descriptor becomes close-on-exec and is closed with the segment."""
    segment = Segment.create(1)
    fd = os.dup(segment.fd)
    os.set_inheritable(fd, True)
    attached = Segment.attach(fd)
    assert (attached.fd, attached.nbytes) == (fd, segment.nbytes)
    assert not os.get_inheritable(fd)
    attached.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    segment.close()


def test_attach_refuses_another_size_than_announced(backend: str) -> None:
    """A sender that lies about the size is refused, and its descriptor closed."""
    segment = Segment.create(1)
    for nbytes in (0, PAGE_BYTES - 1, 2 * PAGE_BYTES, -1, 1 << 70):
        fd = os.dup(segment.fd)
        with pytest.raises(ProtocolError, match=f"where its sender said {nbytes}"):
            Segment.attach(fd, nbytes)
        with pytest.raises(OSError):
            os.fstat(fd)
    segment.close()


def test_attach_refuses_what_is_no_memory(tmp_path: Path) -> None:
    """Pipes, empty files, read-only files and closed descriptors are refused."""
    reader, writer = os.pipe()
    empty = os.open(tmp_path / "empty", os.O_CREAT | os.O_RDWR)
    (tmp_path / "readonly").write_bytes(b"x" * PAGE_BYTES)
    readonly = os.open(tmp_path / "readonly", os.O_RDONLY)
    closed = os.dup(writer)
    os.close(closed)
    for fd in (closed, reader, empty, readonly):
        with pytest.raises(ProtocolError, match="descriptor"):
            Segment.attach(fd)
    os.close(writer)


def test_mapping_outlives_the_descriptor(backend: str) -> None:
    """Without its descriptor a segment still works; giving it up twice is harmless."""
    segment = Segment.create(1)
    segment.close_fd()
    segment.close_fd()
    assert segment.fd == -1
    segment.buffer[0] = 1
    segment.close()


def test_views_outlive_close(backend: str, fork) -> None:
    """Memoryviews and both kinds of numpy views stay good after close, and then it is unmapped."""

    def child() -> None:  # a child, because the failure would be a SIGSEGV
        segment = Segment.create(1 << 20)
        segment.buffer[100] = 7
        piece = segment.buffer[100:200]
        words = segment.buffer.cast("Q")
        array = np.ndarray((50,), np.uint8, segment.buffer, 100)
        other = np.frombuffer(segment.buffer, np.uint8, 50, 100)
        segment.close()
        segment.close()
        gc.collect()
        assert piece[0] == array[0] == other[0] == 7
        assert words[0] == 0
        piece[0] = 8
        assert array[0] == 8
        del piece, words
        gc.collect()
        assert array[0] == other[0] == 8
        assert array.sum() == 8

    assert fork(child).wait() == 0


def test_memory_goes_with_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping is there as long as a view is, and gone with it."""
    monkeypatch.setattr(segment_module, "_chosen", "shm")
    segment = Segment.create(1)
    array = np.ndarray((4,), np.uint8, segment.buffer)
    segment.close()
    assert _mapped() == 1
    del array
    assert _mapped() == 0


def test_forgotten_segment_closes_its_descriptor(backend: str) -> None:
    """A segment that is dropped without close leaks nothing."""
    segment = Segment.create(1)
    fd = segment.fd
    del segment
    with pytest.raises(OSError):
        os.fstat(fd)


def test_address_is_where_the_bytes_lie(backend: str) -> None:
    """The address is the one that numpy sees."""
    segment = Segment.create(1)
    array = np.ndarray((4,), np.uint8, segment.buffer, 8)
    assert array.ctypes.data == segment.address + 8
    segment.close()


def test_punch_gives_whole_pages_back_and_refill_reserves_them(backend: str) -> None:
    """Pages inside the range lose their memory and read as zero; partial ones keep theirs."""
    segment = Segment.create(16 * PAGE_BYTES)
    segment.buffer[:] = b"x" * segment.nbytes
    blocks = os.fstat(segment.fd).st_blocks
    start, nbytes = 2 * PAGE_BYTES - 1, 8 * PAGE_BYTES
    segment.punch(start, nbytes)
    assert os.fstat(segment.fd).st_blocks == blocks - 7 * PAGE_BYTES // 512
    assert segment.buffer[2 * PAGE_BYTES - 1] == ord("x")
    assert not any(segment.buffer[2 * PAGE_BYTES : 9 * PAGE_BYTES])
    assert segment.buffer[9 * PAGE_BYTES] == ord("x")
    segment.refill(start, nbytes)
    assert os.fstat(segment.fd).st_blocks == blocks
    segment.punch(5, 10)
    segment.refill(0, 0)
    assert os.fstat(segment.fd).st_blocks == blocks
    segment.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, PAGE_BYTES + 1), (4096, 1)])
def test_ranges_outside_are_refused(offset: int, nbytes: int) -> None:
    """Neither punch nor refill goes beyond the segment."""
    segment = Segment.create(PAGE_BYTES)
    for method in (segment.punch, segment.refill):
        with pytest.raises(ValueError, match="outside"):
            method(offset, nbytes)
    segment.close()


def test_memfd_cannot_be_cut_by_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is sealed, so that no peer can turn our next write into a SIGBUS."""
    monkeypatch.setattr(segment_module, "_chosen", "memfd")
    segment = Segment.create(1)
    for nbytes in (0, 2 * PAGE_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, nbytes)
    segment.close()


def test_exhausted_descriptors_are_a_clear_error(backend: str, fork) -> None:
    """Without descriptors the error says so and how to get more; later it works again."""

    def child() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
        taken = []
        with pytest.raises(OSError):
            while True:
                taken.append(os.dup(0))
        refused = 0
        while True:  # each refusal frees what it took, so that a few more descriptors are enough
            try:
                Segment.create(1).close()
                break
            except ResourceExhausted as error:
                assert "ulimit -n" in str(error)
                refused += 1
                os.close(taken.pop())
        assert 1 <= refused <= 4
        for fd in taken:
            os.close(fd)

    assert fork(child).wait() == 0


def test_override_wins_and_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """ACTORSERVE_SHM chooses; a word that it does not know is an error that names both."""
    monkeypatch.setattr(segment_module, "_chosen", None)
    monkeypatch.setenv("ACTORSERVE_SHM", "disk")
    with pytest.raises(ConfigError, match="'disk'; expected 'shm' or 'memfd'"):
        segment_module.backend()
    monkeypatch.setenv("ACTORSERVE_SHM", "memfd")
    assert segment_module.backend() == "memfd"
    monkeypatch.setenv("ACTORSERVE_SHM", "shm")
    assert segment_module.backend() == "memfd", "chosen once"


def _run_with_shm(mount: str, script: str, **environment: str) -> str:
    """Run a script where /dev/shm is what `mount` makes of it; return its output."""
    probe = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"may not mount in a namespace of its own: {probe.stderr.decode().strip()}")
    variables = {k: v for k, v in os.environ.items() if k != "ACTORSERVE_SHM"}
    variables.update(environment, PYTHONPATH=str(REPOSITORY))
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'{mount} && exec "$0" -c "$1"', sys.executable, script],
        env=variables,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BACKEND_SCRIPT = """
from actorserve.shm.segment import Segment, backend
Segment.create(1 << 20).close()
print(backend())
"""


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        ("mount -t tmpfs -o size=64m tmpfs /dev/shm", "shm"),
        ("mount -t tmpfs -o size=64m,noexec,nosuid,nodev tmpfs /dev/shm", "shm"),
        ("mount -t tmpfs -o size=63m tmpfs /dev/shm", "memfd"),
        ("mount -t tmpfs -o size=128m,ro tmpfs /dev/shm", "memfd"),
        ("mount -t tmpfs tmpfs /dev && test ! -e /dev/shm", "memfd"),
    ],
    ids=["docker-default", "noexec", "small", "read-only", "missing"],
)
def test_backend_follows_what_dev_shm_is(mount: str, expected: str) -> None:
    """Row 54: /dev/shm is used if it is there, writable and 64 MiB large, else memfd."""
    assert _run_with_shm(mount, BACKEND_SCRIPT).strip() == expected


def test_full_dev_shm_names_size_and_remedy() -> None:
    """Rows 52 and 53: a full /dev/shm is an error at creation and refill, and nothing is lost."""
    script = """
from actorserve.errors import ResourceExhausted
from actorserve.shm.segment import Segment, backend
first = Segment.create(40 << 20)
for _ in range(3):
    try:
        Segment.create(30 << 20)
    except ResourceExhausted as error:
        print(error)
second = Segment.create(20 << 20)
second.punch(0, second.nbytes)
third = Segment.create(20 << 20)
try:
    second.refill(0, second.nbytes)
except ResourceExhausted as error:
    print(error)
third.close()
second.refill(0, second.nbytes)
second.buffer[:] = b"x" * second.nbytes
print(backend())
"""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    *errors, used = _run_with_shm(mount, script).splitlines()
    assert used == "shm"
    assert len(errors) == 4
    assert all(f"cannot reserve {30 << 20} bytes" in error for error in errors[:3])
    assert all(f"{24 << 20} of {64 << 20} bytes free" in error for error in errors[:3])
    assert f"cannot reserve {20 << 20} bytes" in errors[3]
    assert all("--shm-size" in error for error in errors)


def test_forced_shm_without_a_folder_says_what_to_do() -> None:
    """Row 54: who insists on a /dev/shm that is not there is told so."""
    script = """
from actorserve.errors import ConfigError
from actorserve.shm.segment import Segment
try:
    Segment.create(1)
except ConfigError as error:
    print(error)
"""
    mount = "mount -t tmpfs -o ro tmpfs /dev/shm"
    output = _run_with_shm(mount, script, ACTORSERVE_SHM="shm")
    assert "Read-only file system" in output
    assert "ACTORSERVE_SHM=memfd" in output
