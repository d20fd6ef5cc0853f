# SPDX-License-Identifier: Apache-2.0
"""What two requests must have in common to share a batch. Pure.

The reference's rule: the same inputs, each with the same shape besides the batch dimension, as the
model sees it. An input with `allow_ragged_batch` may have any shape, but has to be there in both
or in neither, which matters where inputs are optional. The order in which a client names its
inputs says nothing, and neither do requested outputs and parameters.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from actorserve.triton.inference import InferTensor
from actorserve.triton.request_validation import CheckedInput


def batch_signature(
    tensors: Sequence[InferTensor], checked: Sequence[CheckedInput], ragged: Set[str]
) -> object:
    """Return a value that is equal for requests of one model that may share a batch.

    `tensors` and `checked` are a request's inputs in the same order, `ragged` the names of the
    inputs with allow_ragged_batch.
    """
    if len(tensors) == 1:
        name = tensors[0].name
        return (name, None if name in ragged else checked[0].shape[1:])
    return {
        tensor.name: None if tensor.name in ragged else each.shape[1:]
        for tensor, each in zip(tensors, checked)
    }
