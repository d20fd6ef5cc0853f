# SPDX-License-Identifier: Apache-2.0
"""Crash files: the last words of a stub, at most fifty of them, never a fault of their own."""

from __future__ import annotations

import os

from actorserve.actors.crash import KEEP, CrashStore


def test_the_last_words_are_kept(tmp_path):
    """Who, which process, how it ended, and what it said; the folder is made."""
    store = CrashStore(str(tmp_path / "a" / "b"))
    path = store.write("add_sub_0_0", 77, "killed by SIGKILL", ["one", "zwei ü", "\ud800"])
    assert path is not None
    assert path.parent == tmp_path / "a" / "b"
    assert path.name.endswith("-add_sub_0_0-77.txt")
    assert path.read_text() == (
        "instance: add_sub_0_0\npid: 77\nend: killed by SIGKILL\n\none\nzwei ü\n?\n"
    )


def test_an_instance_s_name_never_leads_out(tmp_path):
    """What is no file name is replaced, and the length is bounded."""
    store = CrashStore(str(tmp_path / "in"))
    for name in ("../../evil", "a/b", "x" * 500, "line\nbreak", "模型_0"):
        path = store.write(name, 1, "end", [])
        assert path is not None
        assert path.parent == tmp_path / "in"
        assert path.exists()


def test_only_the_newest_are_kept(tmp_path):
    """The oldest go first; other files there are not touched."""
    others = ["notes.md", *[f"note-{number}.txt" for number in range(KEEP)]]
    for name in others:
        (tmp_path / name).write_text("mine")
        os.utime(tmp_path / name, (0, 0))
    store = CrashStore(str(tmp_path))
    for number in range(KEEP + 7):
        path = store.write(f"i_{number}", number, "end", ["x"])
        assert path is not None
        os.utime(path, (number, number))
    store.write("last", 0, "end", ["x"])
    kept = {path.name.rsplit("-", 2)[1] for path in tmp_path.glob("????????T*.txt")}
    assert len(kept) == KEEP
    assert "last" in kept
    assert "i_0" not in kept
    assert all((tmp_path / name).exists() for name in others)


def test_a_place_that_takes_nothing_is_only_logged(tmp_path, caplog):
    """A file where the folder should be."""
    (tmp_path / "file").write_text("")
    store = CrashStore(str(tmp_path / "file"))
    assert store.write("i", 1, "end", []) is None
    assert "cannot keep a crash file in" in caplog.text


def test_the_default_place_is_the_user_s_state(monkeypatch, tmp_path):
    """Under XDG_STATE_HOME."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert CrashStore().directory == tmp_path / "actorserve" / "crashes"
