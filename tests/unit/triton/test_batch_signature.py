# SPDX-License-Identifier: Apache-2.0
"""Which requests may share a batch."""

from __future__ import annotations

import pytest

from actorserve.triton.batch_signature import batch_signature
from actorserve.triton.inference import InferRequest, InferTensor
from actorserve.triton.request_validation import InputRule, RequestRules
from actorserve.wire.tensors import DataType

Shapes = dict[str, tuple[int, ...]]


def _signature(shapes: Shapes, ragged: frozenset[str] = frozenset()) -> object:
    """Return the signature of a request to a model with the optional inputs A, B and C."""
    rules = [
        InputRule("A", DataType.UINT8, (-1,), optional=True),
        InputRule("B", DataType.UINT8, (-1,), optional=True),
        InputRule("C", DataType.UINT8, (-1, -1), optional=True, reshape=(-1, 1, -1)),
    ]
    tensors = []
    for name, shape in shapes.items():
        nbytes = 1
        for extent in shape:
            nbytes *= extent
        tensors.append(InferTensor(name, "UINT8", shape, bytes(nbytes)))
    checked = RequestRules("m", 8, rules, ["X"]).check(InferRequest("m", tensors))
    return batch_signature(tensors, checked.inputs, ragged)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"A": (1, 3)}, {"A": (5, 3)}, True),  # the batch dimension does not count
        ({"A": (1, 3)}, {"A": (1, 4)}, False),
        ({"A": (1, 3)}, {"B": (1, 3)}, False),  # other inputs, where some are optional
        ({"A": (1, 3)}, {"A": (1, 3), "B": (1, 3)}, False),
        ({"A": (1, 3), "B": (1, 3)}, {"A": (1, 3), "C": (1, 3, 1)}, False),
        ({"A": (1, 2), "B": (1, 3)}, {"B": (1, 3), "A": (1, 2)}, True),  # named in another order
        ({"A": (1, 2), "B": (1, 3)}, {"B": (1, 2), "A": (1, 3)}, False),
        ({"C": (1, 2, 3)}, {"C": (1, 3, 2)}, False),
        ({}, {}, True),
    ],
)
def test_same_inputs_of_the_same_shapes_share_a_batch(
    one: Shapes, other: Shapes, is_same: bool
) -> None:
    """Besides the batch dimension, and in whichever order the client names them."""
    assert (_signature(one) == _signature(other)) is is_same


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ({"A": (1, 3)}, {"A": (1, 4)}, True),
        ({"A": (1, 3), "B": (1, 3)}, {"A": (1, 4), "B": (1, 3)}, True),
        ({"A": (1, 3), "B": (1, 3)}, {"A": (1, 4), "B": (1, 4)}, False),
        ({"A": (1, 3), "B": (1, 3)}, {"B": (1, 3)}, False),  # it is there in both, or in neither
    ],
)
def test_shapes_of_ragged_inputs_do_not_count(one: Shapes, other: Shapes, is_same: bool) -> None:
    """allow_ragged_batch for A: the model gets a list of requests in any case."""
    ragged = frozenset({"A"})
    assert (_signature(one, ragged) == _signature(other, ragged)) is is_same
