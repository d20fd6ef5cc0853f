# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/generation.md from the tables in the code: `python <this file>`.

Each stands between `<!-- NAME -->` and `<!-- end NAME -->`; a test fails when one is stale.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        table = "\n".join(make())
        page, count = pattern.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page)  # noqa: B023
        if count != 1:
            raise ValueError(f"{PAGE}: expected one place for the table '{name}', got {count}")
    return page


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
