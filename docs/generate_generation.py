# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/generation.md from the tables in the code: `python <this file>`.

Each stands between `<!-- NAME -->` and `<!-- end NAME -->`; a test fails when one is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # it may be run, or loaded by its path

from page_tables import filled

from actorserve.triton.generation_parameters import PARAMETERS, GenerationParameters
from actorserve.triton.generation_tensors import INPUTS, OUTPUTS, GenerationTensor

NONE = "\N{EN DASH}"
PAGE = Path(__file__).with_name("generation.md")
_DEFAULTS = GenerationParameters(engine="")


def main() -> int:
    """Bring the page up to date."""
    PAGE.write_text(render(PAGE.read_text()))
    return 0


def render(page: str) -> str:
    """Return the page with its tables as they should be."""
    return filled(page, TABLES)


def _parameters() -> Iterator[str]:
    yield from ("| parameter | default | meaning |", "|---|---|---|")
    for rule in PARAMETERS:
        default = getattr(_DEFAULTS, rule.field, None)
        is_told = isinstance(default, (int, float))
        yield f"| `{rule.name}` | {f'`{default:g}`' if is_told else NONE} | {rule.help} |"


def _tensors(tensors: tuple[GenerationTensor, ...]) -> Iterator[str]:
    yield from ("| name | type | shape | meaning |", "|---|---|---|---|")
    for each in tensors:
        kind = each.data_type.name.removeprefix("TYPE_")
        yield f"| `{each.name}` | {kind} | {list(each.dims)} | {each.help} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "engine parameters": _parameters,
    "inputs": lambda: _tensors(INPUTS),
    "outputs": lambda: _tensors(OUTPUTS),
}

if __name__ == "__main__":
    sys.exit(main())
