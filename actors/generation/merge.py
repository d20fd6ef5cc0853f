# SPDX-License-Identifier: Apache-2.0
"""Several outputs of one sequence made one: what is kept while nobody reads.

What always holds: applying the merged output is applying all of its parts in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from actorserve.wire.generation import Output

GROWING = "generation_logits"  # an array with one row a token: parts follow each other


class Merged(Output, array_like=True, gc=False):
    """An output whose lists are nobody else's, so that more can be put into them."""


def merged(outputs: Iterable[Output]) -> list[Output]:
    """Return one output a sequence, in the order in which their last ones came.

    Those of type Merged are extended in place.
    """
    by_seq: dict[int, Output] = {}
    whole: Merged | None = None  # the last one that was put into
    for output in outputs:
        if (
            whole is not None
            and output.seq == whole.seq
            and output.finish is None
            and output.logprobs is None
            and output.cum_logprob is None
            and output.arrays is None
            and output.extra is None
            and not (output.final or output.replace or output.error)
        ):  # new tokens and nothing else, as most are
            whole.tokens += output.tokens
            continue
        before = by_seq.pop(output.seq, None)
        if before is None:
            by_seq[output.seq] = output
            continue
        whole = before if type(before) is Merged else own(before)
        absorb(whole, output)
        by_seq[output.seq] = whole
    return list(by_seq.values())


def own(output: Output) -> Merged:
    """Return a copy with lists of its own."""
    return Merged(
        output.id,
        output.seq,
        list(output.tokens),
        output.finish,
        output.final,
        output.stop_reason,
        None if output.logprobs is None else list(output.logprobs),
        output.cum_logprob,
        output.error,
        output.replace,
        None if output.arrays is None else dict(output.arrays),
        None if output.extra is None else dict(output.extra),
    )


def absorb(whole: Merged, output: Output) -> None:
    """Put a later output of the same sequence behind what is there."""
    if output.replace:
        whole.tokens = list(output.tokens)
        whole.logprobs = None if output.logprobs is None else list(output.logprobs)
        whole.replace = True
        if whole.arrays is not None:
            whole.arrays.pop(GROWING, None)
    else:
        whole.tokens += output.tokens
        if output.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or ()), *output.logprobs]
    if output.cum_logprob is not None:
        whole.cum_logprob = output.cum_logprob
    if output.finish is not None:
        whole.finish = output.finish
        whole.stop_reason = output.stop_reason
    if output.error is not None:
        whole.error = output.error
    whole.final = whole.final or output.final
    if output.arrays is not None:
        whole.arrays = joined_arrays(whole.arrays, output.arrays)
    if output.extra is not None:
        whole.extra = {**(whole.extra or {}), **output.extra}


def joined_arrays(before: dict[str, Any] | None, after: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays of two outputs as one's: logits of tokens joined, others the later's."""
    joined = {**(before or {}), **after}
    if before is not None and GROWING in before and GROWING in after:
        joined[GROWING] = np.concatenate((before[GROWING], after[GROWING]))
    return joined
