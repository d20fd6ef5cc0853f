# SPDX-License-Identifier: Apache-2.0
"""Requests against a configuration: every refusal in the words that clients match on."""

from __future__ import annotations

from typing import Any

import pytest

from actorserve.errors import InvalidArgument
from actorserve.triton.inference import InferRequest, InferTensor
from actorserve.triton.request_validation import InputRule, RequestRules
from actorserve.wire.tensors import DataType, encode_bytes

FP32, INT32, BYTES = DataType.FP32, DataType.INT32, DataType.BYTES
NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


def rules(*inputs: InputRule, max_batch_size: int = 0) -> RequestRules:
    """Return the rules of model 'm' with the output OUT."""
    return RequestRules("m", max_batch_size, inputs, ["OUT"])


def rule(name: str = "A", datatype: DataType = FP32, dims: tuple[int, ...] = (-1,), **more: Any):
    """Return what is configured of one input."""
    return InputRule(name, datatype, dims, **more)


def tensor(
    name: str = "A",
    shape: tuple[int, ...] = (2,),
    data: Any = None,
    datatype: str = "FP32",
) -> InferTensor:
    """Return an input; without data, zeros of 4 bytes an element."""
    if data is None:
        count = 1
        for extent in shape:
            count *= extent
        data = bytes(4 * count)
    return InferTensor(name, datatype, shape, data)


def refusal(checked: RequestRules, *inputs: InferTensor, **fields: Any) -> str:
    """Return the text of the refusal of a request."""
    with pytest.raises(InvalidArgument) as caught:
        checked.check(InferRequest("m", list(inputs), **fields))
    return caught.value.message


# --- what fits -----------------------------------------------------------------------------------


def test_a_request_that_fits_has_numbers_for_types():
    """And no rows but one, where the model does not batch."""
    checked = rules(rule(), rule("B", INT32, (2, -1))).check(
        InferRequest("m", [tensor("B", (2, 5), datatype="INT32"), tensor("A", (3,))])
    )
    assert checked.rows == 1
    assert [(each.datatype, each.shape) for each in checked.inputs] == [(8, (2, 5)), (11, (3,))]


def test_rows_are_the_first_extent():
    """Up to max_batch_size."""
    batched = rules(rule(dims=(4,)), max_batch_size=8)
    assert batched.check(InferRequest("m", [tensor("A", (8, 4))])).rows == 8
    assert batched.check(InferRequest("m", [tensor("A", (1, 4))])).inputs[0].shape == (1, 4)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bodies_of_every_kind_are_counted(kind):
    """Also a memoryview of wider items, in bytes."""
    rules(rule()).check(InferRequest("m", [tensor(data=kind(bytes(8)))]))
    wide = memoryview(bytes(8)).cast("f")
    rules(rule()).check(InferRequest("m", [tensor(data=wide)]))


def test_no_elements_fit_a_variable_dimension():
    """A tensor of none has no bytes."""
    rules(rule()).check(InferRequest("m", [tensor("A", (0,))]))


# --- names and numbers of inputs -----------------------------------------------------------------


def test_an_output_that_is_not_configured():
    """Checked before all else."""
    text = refusal(rules(rule()), outputs=["OUT", "Z"])
    assert text == "unexpected inference output 'Z' for model 'm'"


@pytest.mark.parametrize(
    ("given", "got", "lacks"),
    [
        ([], "[]", "['A','B']"),
        (["A"], "['A']", "['B']"),
        (["A", "C"], "", None),
        (["C"], "['C']", "['A','B']"),
        (["A", "B", "C"], "['C','B','A']", "]"),
    ],
)
def test_the_number_of_inputs(given, got, lacks):
    """Names in the order that clients know; a lone bracket where none is missing."""
    text = refusal(rules(rule("A"), rule("B")), *[tensor(name) for name in given], id="my id")
    if lacks is None:
        assert text == "unexpected inference input 'C' for model 'm'"
        return
    assert text == (
        f"[request id: my id] expected 2 inputs but got {len(given)} inputs for model 'm'. "
        f"Got input(s) {got}, but missing required input(s) {lacks}. "
        "Please provide all required input(s)."
    )


def test_the_number_of_inputs_with_optional_ones():
    """A range; and an optional input does not stand for a required one."""
    checked = rules(rule("A"), rule("B", optional=True))
    checked.check(InferRequest("m", [tensor("A")]))
    checked.check(InferRequest("m", [tensor("B"), tensor("A")]))
    expected = "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got "
    assert refusal(checked) == (
        f"{expected}0 inputs for model 'm'. Got input(s) [], but missing required input(s) ['A']. "
        "Please provide all required input(s)."
    )
    assert refusal(checked, tensor("B")) == (
        f"{expected}1 inputs for model 'm'. Got input(s) ['B'], but missing required input(s) "
        "['A']. Please provide all required input(s)."
    )


def test_an_unknown_input():
    """With and without batching."""
    text = "unexpected inference input 'Z' for model 'm'"
    assert refusal(rules(rule()), tensor("Z")) == text
    assert refusal(rules(rule(), max_batch_size=2), tensor("Z")) == text


# --- types and shapes ----------------------------------------------------------------------------


def test_another_type():
    """Both are named."""
    assert refusal(rules(rule(datatype=INT32)), tensor("A")) == (
        "[request id: <id_unknown>] inference input 'A' data-type is 'FP32', but model 'm' "
        "expects 'INT32'"
    )


@pytest.mark.parametrize(
    ("dims", "shape"), [((4,), (3,)), ((4,), (4, 1)), ((-1, 4), (4,)), ((2, -1), (3, 7))]
)
def test_another_shape(dims, shape):
    """As configured and as given, without a remark where the model does not batch."""
    assert refusal(rules(rule(dims=dims)), tensor("A", shape)) == (
        "[request id: <id_unknown>] unexpected shape for input 'A' for model 'm'. Expected "
        f"{str(list(dims)).replace(' ', '')}, got {str(list(shape)).replace(' ', '')}. "
    )


def test_another_shape_with_batching():
    """The batch dimension is shown, with the remark that helps most."""
    assert refusal(rules(rule(dims=(4,)), max_batch_size=2), tensor("A", (1, 3))) == (
        "[request id: <id_unknown>] unexpected shape for input 'A' for model 'm'. Expected "
        f"[-1,4], got [1,3]. {NOTE}"
    )


def test_a_batch_beyond_the_limit():
    """Also where everything else fits."""
    assert refusal(rules(rule(dims=(1,)), max_batch_size=2), tensor("A", (3, 1)), id="x") == (
        "[request id: x] inference request batch-size must be <= 2 for 'm'"
    )


def test_inputs_of_different_batches():
    """The one that differs from those before it is named."""
    checked = rules(rule(dims=(1,)), rule("B", dims=(1,)), max_batch_size=4)
    assert refusal(checked, tensor("A", (2, 1)), tensor("B", (3, 1))) == (
        "[request id: <id_unknown>] input 'B' batch size does not match other inputs for 'm'"
    )


def test_no_batch_dimension_at_all():
    """A scalar to a model that batches."""
    assert refusal(rules(rule(dims=(1,)), max_batch_size=4), tensor("A", ())) == (
        "[request id: <id_unknown>] input 'A' has no shape but model requires batch dimension "
        "for 'm'"
    )


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 4, 7, 9, 12])
def test_a_body_of_another_size(nbytes):
    """In bytes."""
    assert refusal(rules(rule()), tensor("A", (2,), bytes(nbytes))) == (
        "[request id: <id_unknown>] input byte size mismatch for input 'A' for model 'm'. "
        f"Expected 8, got {nbytes}"
    )


THREE = encode_bytes([b"a", b"", b"ccc"])


@pytest.mark.parametrize(
    ("count", "body", "text"),
    [
        (4, THREE, "expected 4 string elements for inference input 'A' for model 'm', got 3"),
        (
            2,
            THREE,
            "unexpected number of string elements 3 for inference input 'A' for model 'm', "
            "expecting 2",
        ),
        (
            3,
            THREE[:7],
            "incomplete string length indicator for inference input 'A' for model 'm', expecting "
            "4 bytes but only 2 bytes available. Please make sure the string length indicator is "
            "in one buffer.",
        ),
        (
            3,
            THREE[:-1],
            "incomplete string data for inference input 'A' for model 'm', expecting string of "
            "length 3 at element 2 but only 2 bytes available",
        ),
        (1, b"", "expected 1 string elements for inference input 'A' for model 'm', got 0"),
        (
            1,
            b"\xff\xff\xff\xff",
            "incomplete string data for inference input 'A' for model 'm', expecting string of "
            "length 4294967295 at element 0 but only 0 bytes available",
        ),
    ],
)
def test_texts_that_do_not_add_up(count, body, text):
    """Too few, too many, and those that are cut off."""
    checked = rules(rule(datatype=BYTES))
    assert refusal(checked, tensor("A", (count,), body, "BYTES")) == (
        f"[request id: <id_unknown>] {text}"
    )


def test_texts_that_add_up():
    """Of any number, none included."""
    checked = rules(rule(datatype=BYTES))
    checked.check(InferRequest("m", [tensor("A", (3,), THREE, "BYTES")]))
    checked.check(InferRequest("m", [tensor("A", (0,), b"", "BYTES")]))


# --- reshapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dims", "reshape", "shape", "seen"),
    [
        ((1,), (), (3, 1), (3,)),
        ((4,), (2, 2), (1, 4), (1, 2, 2)),
        ((-1, 2), (1, -1, 2), (2, 5, 2), (2, 1, 5, 2)),
        ((-1, 3, -1), (-1, 1, 3, -1), (1, 7, 3, 9), (1, 7, 1, 3, 9)),
    ],
)
def test_a_reshape_is_what_the_model_sees(dims, reshape, shape, seen):
    """Behind the batch; variable extents are taken over in their order."""
    checked = rules(rule(dims=dims, reshape=reshape), max_batch_size=4)
    assert checked.check(InferRequest("m", [tensor("A", shape)])).inputs[0].shape == seen


def test_a_reshape_without_batching():
    """The whole shape is replaced."""
    checked = rules(rule(dims=(6,), reshape=(2, 3)))
    assert checked.check(InferRequest("m", [tensor("A", (6,))])).inputs[0].shape == (2, 3)
