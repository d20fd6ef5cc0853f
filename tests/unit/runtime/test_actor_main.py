# SPDX-License-Identifier: Apache-2.0
"""Actors that are defined in the script that is run, and the ways in which that goes wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actorserve.clock import monotonic_s

HEAD = """
import asyncio, os, sys, threading
from actorserve import Actor, ActorSystem, Message, Process, Thread

class Add(Message[int]):
    a: int
    b: int

class Adder(Actor):
    def receive(self, message: Add) -> int:
        return message.a + message.b
"""
MAIN = """
async def main():
    async with ActorSystem() as system:
        adder = await system.spawn(Adder, where=Process())
        print(await adder.ask(Add(1, 2), timeout_s=20))
"""
GUARDED = HEAD + MAIN + 'if __name__ == "__main__":\n    asyncio.run(main())\n'


def run(*arguments: str, text: str | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """Run Python, and return its exit code and what it wrote."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        input=text,
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_an_actor_of_the_script_itself(tmp_path: Path):
    """Found by the script's path, which is not run a second time."""
    script = tmp_path / "script.py"
    script.write_text(GUARDED + "print('loaded', __name__)\n")
    code, out, error = run(str(script))
    assert (code, error) == (0, "")
    assert sorted(out.splitlines()) == ["3", "loaded __actorserve_main__", "loaded __main__"]
    assert not (tmp_path / "__pycache__").exists()


def test_a_script_by_a_relative_path_that_changes_its_folder(tmp_path: Path):
    """The path is taken at the start of the process, the folder later."""
    (tmp_path / "inner").mkdir()
    script = tmp_path / "script.py"
    script.write_text(GUARDED)
    code, out, error = run("script.py", cwd=tmp_path)
    assert (code, out, error) == (0, "3\n", "")


def test_a_module_that_is_run_by_its_name(tmp_path: Path):
    """`python -m package.tool`: its actors have that name in other processes."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tool.py").write_text(GUARDED)
    code, out, error = run("-m", "package.tool", cwd=tmp_path)
    assert (code, out, error) == (0, "3\n", "")


def test_a_script_without_a_guard_gets_one_line(tmp_path: Path):
    """Its process loads it, and finds it starting a system: the last line says what to write."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + MAIN + "asyncio.run(main())\n")
    code, _out, error = run(str(script))
    assert code == 1
    last = error.strip().splitlines()[-1]
    assert "did not start" in last
    assert f"loads {script} and finds it starting an ActorSystem" in last
    assert 'put what the script runs under `if __name__ == "__main__":`' in last


@pytest.mark.parametrize("way", ["command", "stdin", "interactive"])
def test_an_interactive_session_gets_one_line(way: str):
    """A class without a file cannot be loaded elsewhere; in threads it works."""
    text = HEAD + (
        "\nwith ActorSystem.start() as system:\n"
        "    adder = system.spawn(Adder, where=Thread()).result()\n"
        "    print(adder.ask(Add(1, 2)).result())\n"
        "    system.spawn(Adder, where=Process()).result()\n\n"
    )
    if way == "command":
        _code, out, error = run("-c", text)
    else:
        options = ["-i", "-q"] if way == "interactive" else ["-"]
        _code, out, error = run(*options, text=text)
    assert "3" in out
    lines = [line for line in error.splitlines() if "errors.InvalidArgument" in line]
    assert len(lines) == 1
    assert "Adder is defined in an interactive session" in lines[0]
    assert "put it into a file and import it, or use Loop() or Thread()" in lines[0]


def test_a_message_of_the_script_comes_back_from_its_process(tmp_path: Path):
    """Structs of the script as answers, and a class that another process names to this one."""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + """
from actorserve import ActorRef, Loop

class Point(Message[None]):
    x: int

class Make(Message[list[Point]]):
    to: ActorRef

class Maker(Actor):
    def receive(self, message: Make) -> list[Point]:
        message.to.tell(Point(5)).result()
        child = self.context.spawn(Adder, where=Loop()).result()
        return [Point(child.ask(Add(1, 2)).result())]

class Sink(Actor):
    def receive(self, message: Point) -> None:
        print(type(message).__module__, message)

async def main():
    async with ActorSystem() as system:
        sink = await system.spawn(Sink)
        maker = await system.spawn(Maker, where=Process())
        print(await maker.ask(Make(sink), timeout_s=20))

if __name__ == "__main__":
    asyncio.run(main())
"""
    )
    code, out, error = run(str(script))
    assert (code, error) == (0, "")
    assert sorted(out.splitlines()) == ["[Point(x=3)]", "__main__ Point(x=5)"]


def test_an_error_while_the_module_is_loaded_is_the_reason(tmp_path: Path):
    """The traceback is on stderr, the reason in the exception."""
    script = tmp_path / "script.py"
    guard = 'if __name__ == "__main__":\n    asyncio.run(main())\nelse:\n    1 / 0\n'
    script.write_text(HEAD + MAIN + guard)
    code, _out, error = run(str(script))
    assert code == 1
    assert "ZeroDivisionError: division by zero" in error.strip().splitlines()[-1]
    assert "1 / 0" in error


def test_a_session_that_ends_without_stopping_its_system_ends(tmp_path: Path):
    """The processes go with it, and nothing hangs or complains."""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + """
if __name__ == "__main__":
    system = ActorSystem.start()
    adder = system.spawn(Adder, where=Process()).result()
    thread = system.spawn(Adder, where=Thread()).result()
    assert adder.ask(Add(1, 2)).result() == thread.ask(Add(1, 2)).result()
    print(system.stats().actors[0].pid)
"""
    )
    code, out, error = run(str(script))
    assert (code, error) == (0, "")
    deadline_s = monotonic_s() + 20
    while Path(f"/proc/{int(out)}").exists():
        assert monotonic_s() < deadline_s


def test_ctrl_c_ends_everything(tmp_path: Path):
    """Processes of actors leave it to the host, which stops them on its way out."""
    import os
    import signal

    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + """
async def main():
    async with ActorSystem() as system:
        await system.spawn(Adder, where=Process())
        print("up", flush=True)
        await asyncio.get_running_loop().create_future()

if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted")
"""
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        os.killpg(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=40)
    assert (process.returncode, out, error) == (0, "interrupted\n", "")
