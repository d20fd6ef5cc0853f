# SPDX-License-Identifier: Apache-2.0
"""Engines as entries of a repository: slow readers, deaths, loads that fail, and embedded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from actorserve import Supervisor, SyncSupervisor
from actorserve.actors.check import check
from actorserve.actors.in_flight import WINDOW
from actorserve.config import Settings
from actorserve.errors import ActorserveError, InvalidArgument, Unavailable
from tests.conftest import wait_until
from tests.server.archives import make_venv
from tests.server.harness import parameter
from tests.server.test_generation import json_parameter, write_engine

SETTINGS = Settings(restart_backoff_s=(0.0, 0.1))


def ask(text: str, **more: Any) -> dict[str, Any]:
    """Return the inputs of a request."""
    types = {int: np.int32, bool: np.bool_, str: np.object_}
    return {
        "text_input": [text],
        **{name: np.array([value], types[type(value)]) for name, value in more.items()},
    }


@contextlib.contextmanager
def running(repository: Path) -> Iterator[SyncSupervisor]:
    """Run a server whose models have all loaded."""
    with SyncSupervisor(repository, SETTINGS) as server:
        assert server.failures == {}
        yield server


def text_of(responses: list[dict[str, Any]]) -> str:
    """Return the text of a stream."""
    return b"".join(each["text_output"][0] for each in responses).decode()


# --- streams -------------------------------------------------------------------------------------


def test_a_slow_reader_gets_larger_pieces(repository: Path) -> None:
    """It loses nothing, holds nobody up, and the server does not pile up what it did not read."""
    write_engine(repository, "echo", pace_s=0.001)
    count = 6 * WINDOW

    async def main() -> tuple[int, str]:
        async with Supervisor(repository, SETTINGS) as server:
            asked = ask("abc", max_tokens=count, stream=True)
            slow = server.stream("echo", asked)
            first = await slow.__anext__()
            quick = [each async for each in server.stream("echo", asked)]
            assert text_of(quick) == "abc" * (count // 3)
            rest = [first] + [each async for each in slow]
            return len(quick), len(rest), text_of(rest)

    quick, slow, text = asyncio.run(main())
    assert text == "abc" * (count // 3)
    assert slow < count / 2 < quick


def test_leaving_an_embedded_stream_frees_the_engine(repository: Path, tmp_path: Path) -> None:
    """At once, before the next token is read by anybody."""
    notes = tmp_path / "notes"
    write_engine(repository, "echo", notes=str(notes), pace_s=0.01)

    async def main() -> None:
        async with Supervisor(repository, SETTINGS) as server:
            asked = ask("abc", max_tokens=100_000, stream=True)
            async with contextlib.aclosing(server.stream("echo", asked)) as responses:
                async for _ in responses:
                    break
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(
                None, wait_until, lambda: "abort:abc" in notes.read_text().split()
            )

    asyncio.run(main())
    assert notes.read_text().split() == ["add:abc", "abort:abc", "close"]


def test_many_streams_at_once_are_told_apart(repository: Path) -> None:
    """More than the engine has slots, and more than it may have in flight."""
    write_engine(repository, "echo", parameter("MAX_IN_FLIGHT", 20), slots=8)

    async def main() -> None:
        async with Supervisor(repository, SETTINGS) as server:

            async def one(number: int) -> None:
                asked = ask(f"{number},", max_tokens=12, stream=number % 2 == 0)
                got = [each async for each in server.stream("echo", asked)]
                assert text_of(got) == (f"{number}," * 12)[:12]

            await asyncio.gather(*map(one, range(100)))

    asyncio.run(main())


# --- deaths --------------------------------------------------------------------------------------


def test_the_death_of_an_engine_is_told_and_mended(repository: Path) -> None:
    """Every request hears what it died of; the next ones have a new engine."""
    write_engine(repository, "echo", slots=8, pace_s=0.005)

    async def main(server: Supervisor) -> list[BaseException | None]:
        async def one(text: str) -> BaseException | None:
            try:
                async for _ in server.stream("echo", ask(text, max_tokens=100_000, stream=True)):
                    begun.set()
            except ActorserveError as error:
                return error
            return None

        begun = asyncio.Event()
        others = [asyncio.ensure_future(one(f"other{number}")) for number in range(3)]
        await begun.wait()
        errors = [await one("die"), *await asyncio.gather(*others)]
        while True:
            with contextlib.suppress(Unavailable):  # the last one is just dying
                stream = server.stream("echo", ask("abc", max_tokens=3))
                assert [each["text_output"][0] async for each in stream] == [b"abc"]
                return errors

    async def served() -> list[BaseException | None]:
        async with Supervisor(repository, SETTINGS) as server:
            return await main(server)

    for error in asyncio.run(served()):
        assert isinstance(error, Unavailable)
        assert "RuntimeError: told to die" in error.message


def test_a_killed_stub_takes_its_engine_along(repository: Path) -> None:
    """Its requests fail, and it starts again, as every stub does."""
    write_engine(repository, "echo", pace_s=0.005)
    with running(repository) as server:
        responses = server.stream("echo", ask("abc", max_tokens=100_000, stream=True))
        next(responses)
        os.kill(stub_of("echo_0").pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="stub 'echo_0' died"):
            list(responses)
        assert text_of(list(server.stream("echo", ask("ab", max_tokens=4)))) == "abab"


def stub_of(name: str) -> psutil.Process:
    """Return a stub of this process's servers, by its name."""
    (stub,) = stubs_of(name)
    return stub


def stubs_of(name: str) -> list[psutil.Process]:
    """Return all stubs of that name: mostly one."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends just now
            if each.name() == name:
                found.append(each)
    return found


def wait_restarted(server: SyncSupervisor, name: str, old: int) -> None:
    """Wait until a stub has another process and serves."""
    wait_until(lambda: [each.pid for each in stubs_of(name)] not in ([], [old]), 20)
    wait_until(server.is_ready, 20)


def ranks_of(name: str) -> list[psutil.Process]:
    """Return the ranks of a stub's engine, in their order."""
    found = stub_of(name).children(recursive=True)
    return sorted((each for each in found if " rank " in each.name()), key=lambda each: each.name())


def write_ranks(repository: Path, load_s: float = 0.0) -> None:
    """Write an engine with two ranks."""
    folder = repository / "two"
    (folder / "1").mkdir(parents=True)
    options = {"text": True, "delay_s": 0.002, "load_s": load_s}
    (folder / "config.pbtxt").write_text(
        'backend: "generation"\n'
        + parameter("ENGINE", "scripted")
        + parameter("RANKS", 2)
        + json_parameter("ENGINE_OPTIONS", options)
    )


def test_the_death_of_a_rank_is_that_of_its_engine(repository: Path) -> None:
    """Whoever waits hears which one it was; if nobody does, all start again as well."""
    write_ranks(repository)
    with running(repository) as server:
        responses = server.stream("two", ask("abc", max_tokens=100_000, stream=True))
        next(responses)
        stub, ranks = stub_of("two_0").pid, ranks_of("two_0")
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match=f"rank 1 .*{ranks[1].pid}.* is dead: .*SIGKILL"):
            list(responses)
        assert text_of(list(server.stream("two", ask("abc", max_tokens=2)))) == "de"
        wait_until(lambda: not any(each.is_running() for each in ranks), 5)

        second = stub_of("two_0").pid
        assert second != stub
        os.kill(ranks_of("two_0")[0].pid, signal.SIGKILL)
        wait_restarted(server, "two_0", second)
        assert text_of(list(server.stream("two", ask("abc", max_tokens=2)))) == "de"


def test_a_rank_that_is_killed_while_it_loads_again_is_started_once_more(
    repository: Path,
) -> None:
    """As a stub that dies while it initializes: the model does not stay away for good."""
    write_ranks(repository, load_s=0.5)
    with running(repository) as server:
        first = ranks_of("two_0")
        os.kill(first[1].pid, signal.SIGKILL)

        def loading() -> list[psutil.Process]:
            ranks = [each for stub in stubs_of("two_0") for each in stub.children(recursive=True)]
            return [each for each in ranks if " rank " in each.name() and each not in first]

        found: list[psutil.Process] = []

        def are_both_there() -> bool:
            with contextlib.suppress(psutil.Error):  # the first ones end just now
                found[:] = loading()
            return len(found) == 2

        wait_until(are_both_there, 20)
        os.kill(found[0].pid, signal.SIGKILL)
        wait_until(server.is_ready, 30)
        assert text_of(list(server.stream("two", ask("abc", max_tokens=2)))) == "de"


def test_ranks_do_not_outlive_their_stub(repository: Path) -> None:
    """However it ends."""
    write_ranks(repository)
    with running(repository) as server:
        ranks, stub = ranks_of("two_0"), stub_of("two_0").pid
        os.kill(stub, signal.SIGKILL)
        psutil.wait_procs(ranks, 20)
        assert not any(each.is_running() for each in ranks)
        wait_restarted(server, "two_0", stub)
        ranks = ranks_of("two_0")
        assert len(ranks) == 2
    assert not any(each.is_running() for each in ranks)


# --- loads ---------------------------------------------------------------------------------------


def write_problems(repository: Path) -> dict[str, str]:
    """Write an entry for each problem that can be seen without running anything."""
    head = 'backend: "generation"\n'
    tiny = parameter("ENGINE", "tinygpt")
    entries = {
        "nameless": (head, "names no engine: expected a parameter ENGINE"),
        "unknown": (head + parameter("ENGINE", "gpt9"), "there is no engine 'gpt9', expected one"),
        "typo": (head + tiny + parameter("SLOT", 1), "unknown parameter 'SLOT': perhaps SLOTS?"),
        "weightless": (head + tiny + parameter("WEIGHTS", "w.npz"), "there is nothing at"),
        "batched": (head + tiny + "max_batch_size: 2", "max_batch_size is 2, expected 0"),
        "other": (head + tiny + "input { name: 'X' }", "there is no input 'X'"),
        "overlap": (head + tiny + parameter("CONCURRENT_EXECUTES", 3), "use MAX_IN_FLIGHT"),
    }
    for name, (config, _) in entries.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    (repository / "versionless").mkdir()
    (repository / "versionless" / "config.pbtxt").write_text(head + tiny)
    return {name: text for name, (_, text) in entries.items()} | {
        "versionless": "at least one version must be available"
    }


def test_wrong_entries_are_named_by_check_and_by_a_load(repository: Path) -> None:
    """With the same words."""
    expected = write_problems(repository)
    write_engine(repository, "good")
    found = {
        each.model: each.problem for each in check(Settings(model_repository=(str(repository),)))
    }
    assert found.pop("good") == ""
    assert found.keys() == expected.keys()
    with SyncSupervisor(repository, SETTINGS) as server:
        for name, text in expected.items():
            assert text in found[name]
            assert found[name] in server.failures[name]
        assert text_of(list(server.stream("good", ask("ab", max_tokens=2)))) == "ab"


def test_an_engine_that_cannot_load_says_why(repository: Path) -> None:
    """Its own error is the load's, and so are wrong options and missing modules."""
    write_engine(repository, "broken", fails="no such weights")
    write_engine(repository, "odd", colour="red")
    gone = write_engine(repository, "gone")
    (gone / "1" / "echo_engine.py").unlink()
    with SyncSupervisor(repository, SETTINGS) as server:
        assert "OSError: no such weights" in server.failures["broken"]
        assert "engine 'echo_engine:Echo'" in server.failures["odd"]
        assert "colour" in server.failures["odd"]
        assert "there is no module 'echo_engine'" in server.failures["gone"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_may_have_an_environment_of_its_own(
    repository: Path, tmp_path: Path, ranks: int
) -> None:
    """Its packages may be ones that the server has not; ranks have them, too."""
    venv = make_venv(tmp_path / "env")
    (site,) = venv.glob("lib/python3*/site-packages")
    own = parameter("EXECUTION_ENV_PATH", venv) + parameter("RANKS", ranks)
    folder = write_engine(repository, "echo", own)
    shutil.move(folder / "1" / "echo_engine.py", site)
    with running(repository) as server:
        assert text_of(list(server.stream("echo", ask("ab", max_tokens=4)))) == "abab"


def test_a_configuration_may_come_with_the_load(repository: Path) -> None:
    """As JSON, and the inputs are filled in there, too."""
    write_engine(repository, "echo", json_parameter("ENGINE_OPTIONS", {"slots": 2}))
    with SyncSupervisor(repository, Settings(model_control_mode="explicit")) as server:
        config = {
            "backend": "generation",
            "parameters": {
                "ENGINE": {"string_value": "echo_engine:Echo"},
                "DEFAULT_MAX_TOKENS": {"string_value": "2"},
            },
        }
        server.load("echo", config=json.dumps(config))
        assert text_of(list(server.stream("echo", {"text_input": ["abc"]}))) == "ab"
        with pytest.raises(InvalidArgument, match="exactly one of"):
            list(server.stream("echo", {}))
