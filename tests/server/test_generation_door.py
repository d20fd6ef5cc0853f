# SPDX-License-Identifier: Apache-2.0
"""What the server's operators see of engines: metrics, processes, status and logs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve import Supervisor, SyncSupervisor
from actorserve.config import Settings
from actorserve.errors import InvalidArgument
from tests.conftest import wait_until
from tests.server.generation_models import CHAT_ANSWER, write_engine
from tests.server.harness import Launcher, parameter
from tests.server.scrape import of_model, read
from tests.server.test_generation_faults import ranks_of


def test_a_clients_mistake_is_no_failure_of_the_backend(repository: Path) -> None:
    """What a generation model refuses is counted as what the server itself refuses is: OTHER."""
    write_engine(repository, "quick")

    def failures(server: Supervisor) -> dict[str, float]:
        reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
        name = "nv_inference_request_failure"
        return {each: of_model(read(server), "quick", name, reason=each) for each in reasons}

    async def ask(server: Supervisor, **more: Any) -> None:
        inputs = {"text_input": [b"abc"], "max_tokens": np.array([2], np.int32), **more}
        async for _ in server.stream("quick", inputs):
            pass

    async def main() -> None:
        async with Supervisor(repository) as server:
            await ask(server)
            assert set(failures(server).values()) == {0}
            wrong: list[dict[str, Any]] = [
                {"temperature": np.array([-1.0], np.float32)},
                {"max_tokens": np.array([0], np.int32)},
                {"lora_name": [b"nobody"]},
                {"nothing_like_it": np.array([1], np.int32)},  # the server refuses this itself
            ]
            for each in wrong:
                with pytest.raises(InvalidArgument):
                    await ask(server, **each)
            assert failures(server) == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 4}

    asyncio.run(main())


def write_ranks(repository: Path) -> None:
    """Write an entry whose engine has two ranks."""
    write_engine(repository, "two", parameter("RANKS", 2))


def test_status_says_which_rank_died_and_of_what(repository: Path) -> None:
    """The process that ends with it says so, and its supervisor repeats that."""
    write_ranks(repository)
    with SyncSupervisor(repository, Settings(restart_backoff_s=(0.0, 0.1))) as server:
        ranks = ranks_of("two_0")
        assert sorted(each.name() for each in ranks) == ["scripted rank 0", "scripted rank 1"]
        second = next(each for each in ranks if each.name().endswith("1"))
        os.kill(second.pid, signal.SIGKILL)
        instance = wait_restarted(server)
        assert instance.last_exit.startswith(
            f"exited with code 1: the engine's rank 1 (process {second.pid}) is dead: "
            "killed by SIGKILL"
        )
        assert instance.restarts == 1


def wait_restarted(server: SyncSupervisor) -> Any:
    """Wait until the one instance runs again; return how it stands."""

    def instance() -> Any:
        return server.stats().models[0].versions[0].instances[0]

    wait_until(lambda: instance().last_exit and instance().state == "RUNNING", 30)
    return instance()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_that_cannot_be_imported_is_in_the_log_once(
    repository: Path, start_server: Launcher, ranks: int
) -> None:
    """With where it failed; the table has the reason alone."""
    write_engine(repository, "broken", parameter("RANKS", ranks), engine="trouble:Engine")
    (repository / "broken" / "1" / "trouble.py").write_text("raise RuntimeError('import trouble')")
    server = start_server(repository, "--exit-on-error=false")
    server.stop()
    log = server.log()
    assert log.count("trouble.py") == 1, log
    assert "failed to load 'broken': RuntimeError: import trouble" in log
    assert "broken: RuntimeError: import trouble\n    the log says where" in log
    assert "Traceback" not in log


def test_the_pages_example_of_plain_json_runs(
    repository: Path, start_server: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversation as a text that holds JSON, and a single token as a bare number."""
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    _, _, section = page.partition("In JSON, as `generate` has it")
    document = re.search(r"/generate -d '(.*?)'\n```", section, re.DOTALL)
    code = re.search(r"```py\n(.*?)```", section, re.DOTALL)
    assert document and code
    write_engine(repository, "smollm2")
    server = start_server(repository)
    status, answer = server.call("POST", "/v2/models/smollm2/generate", json.loads(document[1]))
    assert (status, answer["output_ids"]) == (200, ord(CHAT_ANSWER[0]))
    exec(code[1].replace("localhost:8000", server.address), {})
    assert capsys.readouterr().out == f"[{ord(CHAT_ANSWER[0])}]\n"
