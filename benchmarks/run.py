#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure actorserve beside the machine's floor and its peers, and print one table.

    run.py [--only NAME[,NAME]] [--quick] [--alone] [--json FILE] [--markdown [--into FILE]]
    run.py --from FILE [--markdown [--into FILE]]     show an earlier result
    run.py --list                                     the names of the rows

The result is also written as JSON, to bench-results/<date>.json unless --json names a file. The
exit code is 0 whatever the figures are; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import time
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # the folder of a script is searched first, and is no package's parent
    sys.path[0] = str(ROOT)

from benchmarks import (  # noqa: E402
    actor_rows,
    call_rows,
    device_rows,
    generation_rows,
    machine,
    rows,
    section,
)
from benchmarks.report import Result, result_of  # noqa: E402
from benchmarks.rows import Row, Section  # noqa: E402
from benchmarks.sampling import Effort  # noqa: E402
from benchmarks.table import markdown_table, text_table  # noqa: E402

SECTIONS = (
    rows.SECTIONS
    + call_rows.SECTIONS
    + device_rows.SECTIONS
    + actor_rows.SECTIONS
    + generation_rows.SECTIONS
)
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for row in _all_rows():
            print(f"{row.name:22}{row.title}")
        return 0
    if chosen.earlier:
        result = msgspec.json.decode(Path(chosen.earlier).read_bytes(), type=Result)
    else:
        known = _all_rows()
        unknown = [name for name in chosen.only if not any(_is_of(row, [name]) for row in known)]
        if unknown:
            parser.error(f"no such row: {', '.join(unknown)} (see --list)")
        result = _measure(chosen.only, Effort(chosen.quick, chosen.alone))
        _write_json(result, chosen.json)
    _show(result, is_markdown=chosen.markdown, into=chosen.into)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME[,NAME]",
        help="only these rows, or those whose names begin so (actors, http, …); what is measured "
        "together with them runs, but is not shown",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter: for a look only")
    parser.add_argument("--alone", action="store_true", help="ours only, nobody beside it")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    parser.add_argument(
        "--into", metavar="FILE", help="put the Markdown table into a file, between its marks"
    )
    parser.add_argument(
        "--from", dest="earlier", metavar="FILE", help="show this result, measure nothing"
    )
    parser.add_argument("--list", action="store_true", help="list the rows' names")
    return parser


def _all_rows() -> list[Row]:
    return [row for each in SECTIONS for row in each.rows]


def _is_of(row: Row, only: list[str]) -> bool:
    """Whether one of the names is the row's, or that of its group."""
    return any(row.name == name or row.name.startswith(f"{name}-") for name in only)


def _measure(only: list[str], effort: Effort) -> Result:
    """Run the sections that have wanted rows, one after the other."""
    wanted = [each for each in SECTIONS if not only or any(_is_of(r, only) for r in each.rows)]
    load_before = machine.load_average()
    start_s = time.monotonic()
    results = []
    for number, each in enumerate(wanted, 1):
        _tell(f"[{number}/{len(wanted)}] {_name(each)} …")
        findings = section.run(each, effort)
        shown = [row for row in each.rows if not only or _is_of(row, only)]
        results += [result_of(row, findings) for row in shown]
    return Result(
        date=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        is_quick=effort.is_quick,
        machine=machine.describe(),
        load_before=load_before,
        load_after=machine.load_average(),
        seconds=time.monotonic() - start_s,
        rows=results,
    )


def _name(each: Section) -> str:
    return each.entry.removeprefix("benchmarks.").replace(":", ", ").replace("_", " ")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write_json(result: Result, file: str | None) -> None:
    stamp = result.date[:19].replace(":", "")
    path = Path(file) if file else ROOT / "bench-results" / f"{stamp}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    _tell(f"written to {path}")


def _show(result: Result, *, is_markdown: bool, into: str | None) -> None:
    if into is None:
        print(markdown_table(result) if is_markdown else text_table(result))
        return
    path = Path(into)
    head, begin, rest = path.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} has no marks {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n{markdown_table(result)}\n{END}{tail}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the section that runs
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        _tell("interrupted: nothing is written")
        sys.exit(130)
