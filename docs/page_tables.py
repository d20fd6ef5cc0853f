# SPDX-License-Identifier: Apache-2.0
"""Tables of a page that are made from the code: between `<!-- NAME -->` and `<!-- end NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

Tables = Mapping[str, Callable[[], Iterable[str]]]


def filled(page: str, tables: Tables) -> str:
    """Return the page with its tables as they should be. Raises ValueError where one has no place.

    A marker that was lost would leave a table out for ever.
    """
    for name, make in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        table = "\n".join(make())
        page, count = pattern.subn(lambda found: f"{found[1]}\n{table}\n\n{found[2]}", page)  # noqa: B023
        if count != 1:
            raise ValueError(f"expected one place for the table '{name}', got {count}")
    return page
