# SPDX-License-Identifier: Apache-2.0
"""Models whose EXECUTION_ENV_PATH is an archive, which the server unpacks for them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from actorserve import Supervisor
from actorserve.actors.check import check
from actorserve.config import Settings
from actorserve.errors import ActorserveError, Unavailable
from tests.conftest import wait_until
from tests.server.archives import make_prefix, make_venv, pack
from tests.server.harness import TELL, TELL_CONFIG, parameter, write_model

pytestmark = pytest.mark.slow

FACTS = """
    def tell(self, request):
        import locale, stat
        top = os.path.dirname(sys.prefix)
        return json.dumps({
            "prefix": sys.prefix,
            "version": list(sys.version_info[:2]),
            "numpy": np.__file__,
            "mode": [stat.S_IMODE(os.stat(path).st_mode) for path in (sys.prefix, top)],
            "environment": {
                key: os.environ.get(key)
                for key in ("VIRTUAL_ENV", "CONDA_PREFIX", "PATH", "LD_LIBRARY_PATH", "PYTHONHOME")
            },
            "locale": locale.setlocale(locale.LC_CTYPE),
            "language": os.environ.get("LANG"),
            "maps": [line.split()[-1] for line in open("/proc/self/maps") if "libpython" in line],
        })
"""
WORD = """
    def tell(self, request):
        import special
        return f"{special.WORD} {os.getpid()} {sys.prefix}"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary folder of the test's servers, in another process or in this one."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small environment that runs from anywhere."""
    return make_venv(tmp_path_factory.mktemp("venv") / "env")


def unpacked(place: Path) -> list[Path]:
    """Return what is there of unpacked archives."""
    return sorted(place.glob("actorserve-env-*/*"))


def test_models_share_what_is_unpacked(start_server, repository, place, venv, tmp_path):
    """Once for all instances of all models, into a private folder, which goes with the server."""
    archive = pack(venv, tmp_path / "shared env.tar.gz")
    config = TELL_CONFIG + "instance_group [ { count: 2 } ]\n"
    write_model(repository, "a", TELL + FACTS, config + parameter("EXECUTION_ENV_PATH", archive))
    inside = write_model(
        repository,
        "b",
        TELL + FACTS,
        config + parameter("EXECUTION_ENV_PATH", "$$TRITON_MODEL_DIRECTORY/env.tgz"),
    )
    (inside / "env.tgz").symlink_to(archive)
    relative = os.path.relpath(archive)
    write_model(repository, "c", TELL + FACTS, config + parameter("EXECUTION_ENV_PATH", relative))
    server = start_server(
        repository,
        env={"PYTHONHOME": "", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "VIRTUAL_ENV": "/x"},
    )
    told = [json.loads(server.tell(name)) for name in "abc"]
    prefix = Path(told[0]["prefix"])
    assert {each["prefix"] for each in told} == {str(prefix)}
    assert unpacked(place) == [prefix]
    assert told[0]["mode"] == [0o700, 0o700]
    environment = told[0]["environment"]
    assert environment["VIRTUAL_ENV"] == str(prefix)
    assert environment["PATH"].split(":")[0] == str(prefix / "bin")
    assert environment["LD_LIBRARY_PATH"].split(":")[0] == str(prefix / "lib")
    assert environment["PYTHONHOME"] is None
    assert told[0]["locale"] == told[0]["language"] == "C.UTF-8"
    assert server.log().count("unpacking '") == 1
    assert server.stop() == 0
    assert list(place.glob("actorserve-*")) == []


@pytest.mark.parametrize(("suffix", "compression"), [("tar", ""), ("tar.xz", "xz")])
def test_other_compressions_serve(
    start_server, repository, place, venv, tmp_path, suffix, compression
):
    """Through the same door."""
    archive = pack(venv, tmp_path / f"env.{suffix}", compression)
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "model", TELL + WORD, config)
    server = start_server(repository)
    assert server.tell("model").startswith("one ")
    assert server.stop() == 0


@pytest.mark.parametrize("version", ["3.13"])
def test_another_python_serves_from_an_archive(start_server, repository, place, tmp_path, version):
    """A whole Python with numpy of its own, which nothing on the machine helps out."""
    prefix = make_prefix(version, tmp_path / "prefix")
    script = prefix / "bin" / "conda-unpack"
    script.write_text(
        "#!/usr/bin/env python\nimport sys\n"
        "open(sys.prefix + '/unpacked_by', 'w').write(str(sys.version_info[:2]))\n"
    )
    script.chmod(0o755)
    archive = pack(prefix, tmp_path / "env.tar.gz")
    prefix.rename(tmp_path / "elsewhere")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "other", TELL + FACTS, config)
    write_model(repository, "ours", TELL + FACTS, TELL_CONFIG)
    server = start_server(repository)
    told = json.loads(server.tell("other"))
    wanted = [int(part) for part in version.split(".")]
    assert told["version"] == wanted
    (path,) = unpacked(place)
    assert told["prefix"] == str(path)
    assert told["numpy"].startswith(str(path))
    assert all(name.startswith(str(path)) for name in told["maps"])
    assert told["environment"]["CONDA_PREFIX"] == str(path)
    assert (path / "unpacked_by").read_text() == str(tuple(wanted))
    assert json.loads(server.tell("ours"))["version"] == list(sys.version_info[:2])
    assert server.stop() == 0
    assert unpacked(place) == []


def test_archive_without_the_packages_says_what_is_missing(
    start_server, repository, place, tmp_path
):
    """As a directory does."""
    venv = make_venv(tmp_path / "env")
    (pth,) = venv.rglob("ours.pth")
    pth.unlink()
    archive = pack(venv, tmp_path / "bare.tar.gz")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "model", TELL + WORD, config)
    server = start_server(repository, wait=False)
    assert server.wait() == 1
    reason = server.log().partition("\nmodel: ")[2].partition("\n\n")[0]
    assert "cannot import numpy and msgspec: install numpy and msgspec" in reason
    assert "-bare/bin/python" in reason
    assert unpacked(place) == []


def _escape(name: str, kind: bytes, target: str = "") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w:gz") as tar:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)

    return write


def _whole_but(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with tarfile.open(path, "w:gz") as tar:
            for each in {"bin/activate", "bin/python"} - {name}:
                tar.addfile(tarfile.TarInfo(each))

    return write


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "up": (_escape("../evil", tarfile.REGTYPE), "'../evil' leads out of the archive"),
    "absolute": (_escape("/tmp/evil", tarfile.REGTYPE), "'/tmp/evil' has an absolute name"),
    "link": (_escape("lib", tarfile.SYMTYPE, "../.."), "'lib' is a link to '../..', which leads"),
    "hard": (_escape("h", tarfile.LNKTYPE, "/etc/passwd"), "'h' is a hard link to '/etc/passwd'"),
    "device": (_escape("dev", tarfile.CHRTYPE), "'dev' is neither a file nor"),
    "activate": (_whole_but("bin/activate"), "should contain an 'activate' script"),
    "python": (_whole_but("bin/python"), "there is no bin/python"),
    "text": (lambda path: path.write_text("x") and None, "neither a directory nor a tar archive"),
    "missing": (lambda path: None, "does not exist: expected the directory"),
}


def test_broken_archives_fail_their_model_alone(start_server, repository, place, venv, tmp_path):
    """Each with its path and what is wrong with it; nothing of it is left, and others serve."""
    for name, (write, _) in BROKEN.items():
        write(tmp_path / f"{name}.tar.gz")
        path = tmp_path / f"{name}.tar.gz"
        write_model(
            repository, name, TELL + WORD, TELL_CONFIG + parameter("EXECUTION_ENV_PATH", path)
        )
    archive = pack(venv, tmp_path / "good.tar.gz")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "good", TELL + WORD, config)
    server = start_server(repository, flags=["--exit-on-error=false"])
    log = server.log()
    for name, (_, expected) in BROKEN.items():
        path = tmp_path / f"{name}.tar.gz"
        (line,) = [each for each in log.splitlines() if f"failed to load '{name}': " in each]
        assert f"EXECUTION_ENV_PATH '{path}'" in line
        assert expected in line
    assert server.tell("good").startswith("one ")
    wait_until(lambda: len(unpacked(place)) == 1)
    assert not (place / "evil").exists()
    assert server.stop() == 0


def test_check_looks_without_unpacking(repository, place, tmp_path):
    """What is no archive is found at once, and nothing is unpacked for it."""
    _whole_but("")(tmp_path / "env.tar.gz")
    (tmp_path / "text.tar.gz").write_text("text")
    for name in ("env", "text"):
        config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", tmp_path / f"{name}.tar.gz")
        write_model(repository, name, TELL + WORD, config)
    problems = {
        each.model: each.problem for each in check(Settings(model_repository=(str(repository),)))
    }
    assert "text.tar.gz': it is neither a directory nor a tar archive" in problems["text"]
    assert problems["env"] == ""
    assert unpacked(place) == []


@pytest.mark.parametrize("moment", ["while it serves", "while it unpacks"])
def test_killed_server_is_cleaned_up_after(start_server, repository, place, venv, tmp_path, moment):
    """The next one removes what it left, and leaves a living one's alone."""
    archive = pack(venv, tmp_path / "env.tar.gz")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "model", TELL + WORD, config)
    other = tmp_path / "other"
    other.mkdir()
    living = start_server(repository)
    (used,) = unpacked(place)
    if moment == "while it serves":
        victim = start_server(repository)
    else:
        fault = {"ACTORSERVE_FAULT": "unpacker.unpacked:hang"}
        victim = start_server(repository, wait=False, env=fault)
        wait_until(lambda: len(list(place.glob("actorserve-env-*/*/bin/python"))) == 2)
    (left,) = [path for path in unpacked(place) if path != used]
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    assert left.exists()
    next_one = start_server(other)  # which has no archive of its own
    wait_until(lambda: unpacked(place) == [used])
    assert f"removed {left.parent}, which a dead process had left" in next_one.log()
    assert living.tell("model").startswith("one ")
    assert next_one.stop() == living.stop() == 0
    assert unpacked(place) == []


# --- embedded: loads and reloads -----------------------------------------------------------------

Test = Callable[[Supervisor], Awaitable[None]]


@pytest.fixture
def serve(repository: Path, tmp_path: Path) -> Callable[[Test], None]:
    """Return `serve(test)`: run it against an embedded server that loads on demand."""

    def run(test: Test) -> None:
        settings = Settings(
            model_control_mode="explicit",
            crash_dir=str(tmp_path / "crashes"),
            restart_backoff_s=(0.0, 0.0),
        )

        async def main() -> None:
            async with Supervisor(repository, settings) as server:
                await test(server)

        asyncio.run(main())

    return run


async def tell(server: Supervisor) -> list[str]:
    """Return what the model tells, in words."""
    outputs = await server.infer("model", {"INPUT0": np.zeros(1, np.float32)})
    return outputs["OUTPUT0"][0].decode().split()


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool]) -> None:
    """Wait in the loop until the condition holds; 20 s at most."""
    for _ in range(2000):
        found = condition()
        if (await found) if isinstance(found, Awaitable) else found:
            return
        await asyncio.wait([asyncio.get_running_loop().create_future()], timeout=0.01)
    pytest.fail("not within 20 s")


def test_reload_takes_a_changed_archive(repository, place, venv, tmp_path, serve):
    """Until then, restarted stubs find the old one; it goes when nobody needs it any more."""
    archive = pack(venv, tmp_path / "env.tar.gz")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "model", TELL + WORD, config)

    async def test(server: Supervisor) -> None:
        await server.load("model")
        word, pid, prefix = await tell(server)
        assert word == "one"
        await server.load("model")
        assert [(await tell(server))[index] for index in (0, 2)] == ["one", prefix]
        (special,) = venv.rglob("special.py")
        special.write_text("WORD = 'another'\n")
        try:
            pack(venv, archive)
        finally:
            special.write_text("WORD = 'one'\n")
        _, pid, _ = await tell(server)
        os.kill(int(pid), signal.SIGKILL)

        async def is_back() -> bool:
            try:
                return (await tell(server))[1] != pid
            except Unavailable:
                return False

        await until(is_back)
        assert [(await tell(server))[index] for index in (0, 2)] == ["one", prefix]
        await server.load("model")
        word, _, new_prefix = await tell(server)
        assert word == "another"
        assert new_prefix != prefix

        def is_old_gone() -> bool:
            gc.collect()
            return unpacked(place) == [Path(new_prefix)]

        await until(is_old_gone)

    serve(test)
    assert unpacked(place) == []


def test_archive_that_was_broken_can_be_put_right(repository, place, venv, tmp_path, serve):
    """A failed load keeps nothing of it, and what served before serves on."""
    archive = pack(venv, tmp_path / "env.tar.gz")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "model", TELL + WORD, config)

    async def test(server: Supervisor) -> None:
        await server.load("model")
        whole = archive.read_bytes()
        archive.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ActorserveError, match=r"EXECUTION_ENV_PATH '.*': it is damaged"):
            await server.load("model")
        assert (await tell(server))[0] == "one"
        archive.write_bytes(whole)
        await server.load("model")
        assert (await tell(server))[0] == "one"

    serve(test)


def test_cancelled_load_ends_the_unpacking(repository, place, venv, tmp_path, serve, monkeypatch):
    """Its process is gone, and what it had unpacked, too; the next load begins anew."""
    archive = pack(venv, tmp_path / "env.tar.gz")
    config = TELL_CONFIG + parameter("EXECUTION_ENV_PATH", archive)
    write_model(repository, "model", TELL + WORD, config)

    async def test(server: Supervisor) -> None:
        monkeypatch.setenv("ACTORSERVE_FAULT", "unpacker.unpacked:hang")
        load = asyncio.ensure_future(server.load("model"))
        await until(lambda: bool(list(place.glob("actorserve-env-*/*/bin/python"))))
        load.cancel()
        await asyncio.wait([load])
        assert load.cancelled()
        await until(lambda: unpacked(place) == [])
        monkeypatch.delenv("ACTORSERVE_FAULT")
        await server.load("model")
        assert (await tell(server))[0] == "one"

    serve(test)
