# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md has all there is: its tables are the code's, no variable is missing."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from actorserve.config import OPTIONS, unknown_variables
from actorserve.triton.model_parameters import PARAMETERS, ModelParameters

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"
READ = re.compile(
    r"""environ(?:ment)?(?:\.get\(|\.pop\(|\[)\s*["']([A-Z][A-Z_]+)["']|["'](ACTORSERVE_[A-Z_]+)["']"""
)
INTERNAL = {
    *("ACTORSERVE_", "ACTORSERVE_PORT", "ACTORSERVE_SERVICE_", "ACTORSERVE_ZYGOTE_PATH"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH"),
}
"""What is only passed from one of our processes to the next, or set for a stub."""


@pytest.fixture
def generator() -> ModuleType:
    """Return the script that writes the page's tables."""
    spec = importlib.util.spec_from_file_location(
        "generate_configuration", ROOT / "docs" / "generate_configuration.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_code(generator):
    """Else: `make docs`, and look at what has changed."""
    page = PAGE.read_text()
    assert generator.render(page) == page, "stale: run python docs/generate_configuration.py"


def test_a_page_without_a_table_is_refused(generator):
    """A marker that was lost would leave a table out for ever."""
    with pytest.raises(ValueError, match="one place for the table 'options', got 0"):
        generator.render(PAGE.read_text().replace("<!-- options -->", ""))


def test_every_field_of_a_configuration_has_a_row(generator):
    """And nothing has one that is no field."""
    paths = {
        prefix + name
        for prefix, message in generator.MESSAGES.items()
        for name in generator.schema_of(message).fields
    }
    assert paths == {*generator.FIELDS, *generator.PROBES}
    assert set(generator.FIELDS) >= generator.NO_EFFECT
    assert set(generator.HONOURED) <= set(generator.PROBES)


def test_every_variable_that_is_read_is_on_the_page():
    """Looked for in the source, so that a new one cannot be forgotten."""
    page = PAGE.read_text()
    found = set()
    for folder in (ROOT / "actorserve", ROOT / "actors"):
        for path in folder.rglob("*.py"):
            found |= {name for pair in READ.findall(path.read_text()) for name in pair if name}
    assert {"ACTORSERVE_SHM", "NOTIFY_SOCKET", "XDG_STATE_HOME"} <= found
    found |= {option.variable for option in OPTIONS}
    missing = {name for name in found - INTERNAL if f"`{name}`" not in page}
    assert not missing
    assert unknown_variables(dict.fromkeys(found - INTERNAL, "")) == []  # no warning for ours


def test_every_model_parameter_is_in_the_table():
    """Each sets a field of its own, and each field is set by one."""
    fields = [rule.field for rule in PARAMETERS]
    assert sorted(fields) == sorted(each.name for each in msgspec.structs.fields(ModelParameters))
