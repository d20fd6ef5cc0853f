# SPDX-License-Identifier: Apache-2.0
"""Engines by name."""

from __future__ import annotations

import pytest

from actorserve.actors.generation.engines.registry import BUILT_IN, engine_class, engine_names
from actorserve.actors.generation.engines.scripted import Scripted
from actorserve.actors.generation.spec import (
    EngineSpec,
    ExecutorConfig,
    checked_engine,
    spec_of,
    tokenizer_of,
)
from actorserve.errors import InvalidArgument


def test_built_in_engines_have_names():
    """And are found by them, or by module and class."""
    assert engine_class("scripted") is Scripted
    assert engine_class(BUILT_IN["scripted"]) is Scripted
    assert set(BUILT_IN) <= set(engine_names())


@pytest.mark.parametrize(
    "name", ["", "nothing", "no.such.module:Engine", f"{Scripted.__module__}:Nothing", ":x", "x:"]
)
def test_an_unknown_engine_is_said(name: str):
    """The text names what there is, or what is missing."""
    with pytest.raises(InvalidArgument, match="there is no|has no class"):
        engine_class(name)


def test_a_missing_package_of_an_engine_is_not_a_wrong_name(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """What its module needs and does not find is said as it is."""
    (tmp_path / "needy_engine.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        engine_class("needy_engine:Engine")


def test_a_spec_makes_an_engine():
    """With its options; wrong ones are said."""
    assert isinstance(EngineSpec("scripted", {"slots": 3}).make(), Scripted)
    with pytest.raises(InvalidArgument, match="colour"):
        EngineSpec("scripted", {"colour": 3}).make()
    assert spec_of("scripted") == EngineSpec("scripted")


def test_a_tokenizer_needs_no_engine():
    """It comes from the class; an engine that has none has None."""
    assert EngineSpec("scripted").tokenizer() is None
    tokenizer = EngineSpec("scripted", {"text": True}).tokenizer()
    assert tokenizer is not None and tokenizer.encode("a") == [97]
    assert tokenizer_of(object, {}) is None


def test_what_is_no_engine_is_refused():
    """A class is none either."""
    for wrong in (object(), Scripted, None):
        with pytest.raises(InvalidArgument, match="no engine"):
            checked_engine(wrong)


def test_odd_configs_are_refused():
    """Each with the name of its field."""
    for name, value in {
        "max_in_flight": 0,
        "max_beam_width": 0,
        "worker": "fibre",
        "hang_timeout_s": -1.0,
    }.items():
        with pytest.raises(InvalidArgument, match=name):
            ExecutorConfig(**{name: value})  # type: ignore[arg-type]
    assert ExecutorConfig(1).max_beam_width == 1
