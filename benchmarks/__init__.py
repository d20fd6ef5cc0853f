# SPDX-License-Identifier: Apache-2.0
"""How fast actorserve is, beside the floor of the machine and beside its peers.

    run.py ─► rows.py, actor_rows.py (what is shown, the targets)
       └────► section.py ─► one process per section ─► lanes, infer, http_serving, actors, …
                                                          └─► sampling.py: turns, repetitions
    findings ─► report.py (verdicts) ─► table.py (text, Markdown) and a JSON file

A section measures a few rows that belong together, ours and the peers' by turns, in a process of
its own: whatever it leaves behind ends with it, and one that fails costs only its own rows.
"""
