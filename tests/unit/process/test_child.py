# SPDX-License-Identifier: Apache-2.0
"""What a child is like, from the inside: streams, names, seeds, signals, ends."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from actorserve.errors import BootError
from actorserve.process.boot import PeerGone
from actorserve.process.child import refusal, short_name
from actorserve.process.spawn import SpawnSpec
from actorserve.wire.codec import encode
from actorserve.wire.messages import BootFailed


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("add_sub_0_0", "add_sub_0_0"),
        ("a_long_model_name_0_0", "a_long_mode_0_0"),
        ("a_long_model_name_12_345", "a_long_m_12_345"),
        ("a_long_model_name", "a_long_model_na"),
        ("_1234567890_1234567890", "_1234567890_123"),
        ("mödel_mödel_mö_0_0", "mödel_möd_0_0"),
        ("abcdefghijö_0_0", "abcdefghij_0_0"),
        ("two\nlines\0_0_0", "two?lines?_0_0"),
    ],
)
def test_short_name_keeps_the_instance(name, shown):
    """15 bytes, whole characters, and the suffix stays."""
    assert short_name(name).decode() == shown
    assert len(short_name(name)) <= 15


@pytest.mark.parametrize("text", ["", "reason", "ü" * 20_000, "a" * 20_000 + "end", "\udcff"])
def test_refusal_without_msgspec_is_the_same_message(text):
    """The hand-made bytes are those of the encoder, cut at the front when they are long."""
    from actorserve.wire.boot import decode_from_boot_socket

    message = decode_from_boot_socket(refusal(text, text))
    assert isinstance(message, BootFailed)
    assert len(refusal(text, text)) < 33_000
    if len(text) < 100:
        safe = text.encode("utf-8", "backslashreplace").decode()
        assert message == BootFailed(safe, safe)
        assert encode(message)
    else:
        assert text.endswith(message.reason)
        assert message.reason


def test_child_is_what_was_ordered(kit, warm, tmp_path, monkeypatch):
    """Environment, folder, import path, name, group, streams and descriptors are its own."""
    monkeypatch.setenv("FLAVOUR", "host")
    folder = os.fsdecode(b"f\xff")
    (tmp_path / folder).mkdir()

    async def main(bench) -> None:
        monkeypatch.setenv("BIG", "set after the zygote started")
        watched = await bench.spawn(
            "describe",
            "a_long_model_name_0_1",
            env={"FLAVOUR": "own"},
            cwd=str(tmp_path / folder),
            sys_path=[kit.HERE, "/nowhere/at/all"],
        )
        facts = json.loads(await watched.line("facts "))
        assert (await watched.end()).code == 0
        assert facts["argv"] == [facts["boot_name"]] == ["a_long_model_name_0_1"]
        assert facts["comm"] == "a_long_mode_0_1"
        assert os.fsencode(facts["cwd"]).endswith(b"f\xff")
        assert facts["env"]["FLAVOUR"] == "own"
        assert facts["env"]["BIG"] == "set after the zygote started"
        assert facts["path"][:2] == [kit.HERE, "/nowhere/at/all"]
        assert next(entry for entry in sys.path if entry.startswith(os.sep)) in facts["path"]
        assert facts["leads_group"]
        assert facts["mask"] == []
        assert not facts["sigint_ignored"]
        assert facts["main"] is None
        assert facts["fd_targets"][0] == "/dev/null"
        assert all("pipe" in target for target in facts["fd_targets"][1:])
        # 0 1 2, two guards, boot socket, supervisor's pidfd, and the listing itself
        assert len(facts["fds"]) == 8

    warm(main)


def test_children_draw_different_random_numbers(warm):
    """Neither `random` nor numpy repeats in a sibling, or in the next life of an instance."""

    async def main(bench) -> None:
        drawn = set()
        for _ in range(3):
            watched = await bench.spawn("describe")
            facts = json.loads(await watched.line("facts "))
            drawn |= {facts["random"], facts["numpy_random"]}
            await watched.end()
        assert len(drawn) == 6

    warm(main)


def test_end_runs_what_a_program_runs_at_its_end(kit, run_plain, monkeypatch):
    """Threads are joined, exit functions and finalizers run once, and nothing of the zygote's."""
    monkeypatch.syspath_prepend(kit.HERE)

    async def main() -> None:
        preload = ("logging", "multiprocessing.util", "exit_functions")
        async with kit.Bench(preload) as bench:
            watched = await bench.spawn("tidy_end")
            assert (await watched.end()).code == 0
            assert watched.text.splitlines() == ["unfinished", "thread", "finalizer", "atexit"]
            assert bench.log == []

    run_plain(main)


@pytest.mark.parametrize(
    ("entry", "flavour", "words", "text"),
    [
        ("fail", "", "exited with code 1", "RuntimeError: the entry failed on purpose"),
        ("leave", "3", "exited with code 3", ""),
        ("leave", "0", "exited with code 0", ""),
        ("leave", "256", "exited with code 0", ""),
        ("leave_with_words", "", "exited with code 1", "words for the end"),
        ("leave_at_once", "", "exited with code 0", ""),
        ("crash", "", "killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("hungry", "", "exited with code 1", "MemoryError"),
    ],
)
def test_every_end_has_its_status_and_text(warm, entry, flavour, words, text):
    """Rows 14, 15, 16, 19: status and last words of each kind of end arrive, in that order."""

    async def main(bench) -> None:
        watched = await bench.spawn(entry, env={"FLAVOUR": flavour})
        assert (await watched.end()).describe() == words
        assert text in watched.text
        assert len(watched.exits) == 1
        if entry == "fail":
            assert "child.py" in watched.text.splitlines()[1]
            assert "zygote" not in watched.text

    warm(main)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("no_such_module:run", "no module 'no_such_module'"),
        ("child_entries:no_such_function", "has no function of that name"),
        ("broken_entry:run", "ZeroDivisionError"),
        ("missing_import:run", "No module named 'not_installed_anywhere'"),
    ],
)
def test_entry_that_cannot_be_loaded_is_a_boot_error(kit, warm, tmp_path, entry, reason):
    """Row 30: the reason comes over the boot socket and stands on stderr."""
    (tmp_path / "broken_entry.py").write_text("1 / 0\n")
    (tmp_path / "missing_import.py").write_text("import not_installed_anywhere\n")

    async def main(bench) -> None:
        caught: list[BaseException] = []
        probe = kit.Watched()

        def on_exit(exit_) -> None:
            try:
                while probe.child.boot.recv_nowait() is not None:
                    pass
            except (BootError, PeerGone) as error:
                caught.append(error)
            probe.on_exit(exit_)

        spec = SpawnSpec(entry, "probe_0_0", sys_path=[kit.HERE, str(tmp_path)])
        probe.child = await bench.spawner.spawn(spec, on_exit, probe.on_output)
        assert (await probe.end()).code == 1
        assert reason in str(caught[0])
        assert isinstance(caught[0], BootError)
        assert reason in probe.text

    warm(main)


def test_missing_folder_is_a_boot_error(warm):
    """A working directory that is not there is named, without a stack."""

    async def main(bench) -> None:
        watched = await bench.spawn(cwd="/nowhere/at/all")
        assert (await watched.end()).code == 1
        assert watched.text == (
            "probe_0_0 cannot start: working directory '/nowhere/at/all': No such file or directory"
        )

    warm(main)


def test_output_arrives_line_by_line_before_the_exit(kit, run_plain):
    """Row 57: odd bytes, long lines and last words all come, the exit after them."""

    async def main() -> None:
        async with kit.Bench() as bench:
            watched = await bench.spawn("talk")
            await watched.end()
            lines = [text for stream, text in watched.lines if stream == "stdout"]
            assert lines[:2] == ["first", "raw \\xff"]
            assert "".join(lines[2:]) == "x" * 40_000
            assert [text for stream, text in watched.lines if stream == "stderr"] == [
                "second \\udcff",
                "last words",
            ]
            flooded = await bench.spawn("flood")
            await flooded.end()
            texts = [text for _, text in flooded.lines]
            numbers = [int(text.split()[1]) for text in texts if text.startswith("line ")]
            left_out = [int(text[1:].split()[0]) for text in texts if text.startswith("(")]
            assert numbers == sorted(set(numbers))
            assert numbers[-1] == 19_999
            assert len(numbers) + sum(left_out) == 20_000

    run_plain(main)


@pytest.mark.parametrize("signo", [signal.SIGINT, signal.SIGTERM])
def test_stop_signals_of_outsiders_change_nothing(warm, signo):
    """Rows 20, 21: stub and zygote survive SIGINT and SIGTERM to all of them."""

    async def main(bench) -> None:
        watched = await bench.spawn()
        await watched.line("ready")
        for _ in range(3):
            os.killpg(watched.child.pid, signo)
            os.killpg(bench.zygote, signo)
            assert await watched.ask() == 7
        assert await (await bench.spawn()).ask(8) == 8
        assert watched.text == "ready"
        assert not watched.exits

    warm(main)


def test_forks_of_a_child_get_the_usual_signals(kit, warm):
    """Row 40a: a fork has default SIGINT and SIGTERM and no boot socket, and may be terminated."""

    async def main(bench) -> None:
        watched = await bench.spawn("fork_and_report")
        pid = int(await watched.line("forked "))
        assert await watched.line("fork ") == "True True"
        os.kill(pid, signal.SIGTERM)
        kit.wait_gone(pid)
        assert await watched.ask() == 7

    warm(main)


def test_a_fork_that_is_terminated_at_once_dies(warm):
    """A signal that comes before a fork has its own handlers is not lost."""

    async def main(bench) -> None:
        watched = await bench.spawn("fork_and_terminate")
        assert await watched.line("survivors ") == "0, masked 0"

    warm(main)


def test_abort_dumps_all_stacks(warm):
    """Row 22: SIGABRT ends a hung child with the stacks of its threads in the log."""

    async def main(bench) -> None:
        watched = await bench.spawn("hold_gil")
        await watched.line("holding")
        watched.child.signal(signal.SIGABRT)
        assert (await watched.end()).describe() == "killed by SIGABRT"
        assert "Fatal Python error: Aborted" in watched.text
        assert "in hold_gil" in watched.text

    warm(main)


def test_stubborn_child_is_still_stoppable(warm):
    """Row 40: ignoring signals, asking for a session and changing folder do not help it."""

    async def main(bench) -> None:
        watched = await bench.spawn("stubborn")
        await watched.line("ready")
        assert "no session of its own" in watched.text
        watched.child.signal(signal.SIGKILL)
        assert (await watched.end()).signal == signal.SIGKILL

    warm(main)


@pytest.mark.parametrize("point", ["spawn.forked", "spawn.entering"])
@pytest.mark.parametrize("action", ["kill", "exit0", "segv"])
def test_death_at_each_point_of_the_birth_is_reported(warm, point, action):
    """Row 2: wherever a child dies on its way, its exit arrives once, with its status."""

    async def main(bench) -> None:
        watched = await bench.spawn(env={"ACTORSERVE_FAULT": f"{point}:{action}"})
        exit_ = await watched.end()
        expected = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "exit0": None}[action]
        assert exit_.signal == expected
        assert exit_.status is not None
        assert await (await bench.spawn()).ask() == 7

    warm(main)
