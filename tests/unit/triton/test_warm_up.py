# SPDX-License-Identifier: Apache-2.0
"""Warm-up samples: from config.pbtxt to the bytes of a request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actorserve.errors import ConfigError
from actorserve.triton.inference import InferTensor
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.text_format import parse_model_config
from actorserve.triton.warm_up import sample_title, warm_up_problems, warm_up_tensors
from actorserve.wire.tensors import BY_CONFIG_NAME, encode_bytes

TYPES = sorted(BY_CONFIG_NAME)


def config(sample: str, batch: int = 0, datatype: str = "TYPE_FP32") -> ModelConfig:
    """Return the configuration of a model with one input and one sample."""
    text = (
        f'name: "m" max_batch_size: {batch} '
        f'input {{ name: "X" data_type: {datatype} dims: [ -1, 2 ] }} model_warmup {{ {sample} }}'
    )
    return parse_model_config(text.encode(), "config.pbtxt")


def given(data: str, datatype: str = "TYPE_FP32", dims: str = "[ 3, 2 ]") -> str:
    """Return a sample's input."""
    value = f"{{ data_type: {datatype} dims: {dims} {data} }}"
    return f'name: "s" batch_size: 2 inputs {{ key: "X" value: {value} }}'


def tensor(found: ModelConfig, folder: Path) -> InferTensor:
    """Return the one tensor of the one sample."""
    (only,) = warm_up_tensors(found.model_warmup[0], found, folder)
    assert only.name == "X"
    return only


@pytest.mark.parametrize("datatype", TYPES)
@pytest.mark.parametrize("data", ["zero_data: true", "random_data: true"])
def test_made_data_fits_its_type(datatype: str, data: str, tmp_path: Path):
    """Rows are all the same; zeros are zero, random numbers finite, strings empty."""
    kind = BY_CONFIG_NAME[datatype]
    found = tensor(config(given(data, datatype), 4, datatype), tmp_path)
    assert (found.datatype, tuple(found.shape)) == (kind.wire_name, (2, 3, 2))
    body = bytes(found.data)
    assert len(body) == 12 * (kind.element_bytes or 4)
    assert body[: len(body) // 2] == body[len(body) // 2 :]
    if "zero" in data or kind.wire_name == "BYTES":
        assert not any(body)
        return
    assert any(body)
    array = np.frombuffer(body, kind.body_dtype)
    if kind.wire_name == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    if array.dtype.kind == "f":
        assert ((array >= 0) & (array <= 1)).all()
    if kind.wire_name == "BOOL":
        assert set(body) <= {0, 1}


def test_random_data_is_the_same_each_time(tmp_path: Path):
    """A failure can be looked for again."""
    found = config(given("random_data: true"), 4)
    assert tensor(found, tmp_path).data == tensor(found, tmp_path).data


def test_files_are_read_from_the_folder_of_the_model(tmp_path: Path):
    """Raw data, one row; strings have their lengths before them."""
    (tmp_path / "warmup").mkdir()
    row = np.arange(6, dtype="<f4").tobytes()
    (tmp_path / "warmup" / "x").write_bytes(row)
    assert tensor(config(given('input_data_file: "x"'), 4), tmp_path).data == row * 2
    text = encode_bytes(np.array([b"a", b"", b"bcd", b"d", b"e", b"f"], object))
    (tmp_path / "warmup" / "text").write_bytes(text)
    found = config(given('input_data_file: "text"', "TYPE_STRING"), 4, "TYPE_STRING")
    assert tensor(found, tmp_path).data == text * 2


def test_a_model_without_batches_gets_the_dims_as_they_are(tmp_path: Path):
    """No batch dimension is put before them."""
    sample = given("zero_data: true").replace("batch_size: 2", "")
    found = tensor(config(sample), tmp_path)
    assert (tuple(found.shape), len(found.data)) == ((3, 2), 24)


@pytest.mark.parametrize(
    ("sample", "batch", "reason"),
    [
        (given("zero_data: true"), 0, "batch_size is 2, but max_batch_size is 0: no batches"),
        (given("zero_data: true"), 1, "batch_size is 2, more than max_batch_size 1"),
        (given("zero_data: true").replace('"X"', '"Y"'), 4, "the model has no input 'Y' (its inp"),
        (given("zero_data: true", "TYPE_INT8"), 4, "input 'X': data_type is TYPE_INT8, but the mo"),
        (given("zero_data: true", dims="[ -1, 2 ]"), 4, "input 'X': dims [-1, 2] must have no -1"),
        (given("zero_data: true", dims="[ 2 ]"), 4, "input 'X': dims [2] do not fit the model's ["),
        (given("zero_data: true", dims="[ 3, 3 ]"), 4, "input 'X': dims [3, 3] do not fit"),
        (given("zero_data: true", dims="[ 1073741824, 2 ]"), 4, "input 'X': 17179869184 bytes are"),
        (given(""), 4, "input 'X': expected zero_data, random_data or input_data_file"),
        (given('input_data_file: "no"'), 4, "input 'X': input_data_file 'no': "),
        (
            given('input_data_file: "short"'),
            4,
            "input 'X': input_data_file 'short' has 5 bytes, bu",
        ),
        (given('input_data_file: "../out"'), 4, "input 'X': input_data_file '../out' must name a"),
        (given('input_data_file: "/etc/passwd"'), 4, "input 'X': input_data_file '/etc/passwd' mu"),
        (given('input_data_file: ""'), 4, "input 'X': input_data_file '' must name a file below"),
        (given('input_data_file: "."'), 4, "input 'X': input_data_file '.' must name a file belo"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path: Path, sample: str, batch: int, reason: str):
    """The input, what was found and what was expected."""
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "short").write_bytes(b"12345")
    (tmp_path / "out").write_bytes(bytes(24))
    found = config(sample, batch)
    with pytest.raises(ConfigError) as error:
        tensor(found, tmp_path)
    assert error.value.message.startswith(reason)
    assert list(warm_up_problems(found, tmp_path)) == [f"warm-up sample 's': {error.value}"]


def test_strings_of_a_file_are_counted(tmp_path: Path):
    """As many as the dims say, none cut off."""
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x").write_bytes(encode_bytes(np.array([b"a"], object)))
    with pytest.raises(ConfigError, match="input_data_file 'x': "):
        tensor(config(given('input_data_file: "x"', "TYPE_STRING"), 4, "TYPE_STRING"), tmp_path)


def test_a_sample_without_a_name_has_a_number():
    """Counted from 1, as people do."""
    sample = config("batch_size: 1").model_warmup[0]
    assert sample_title(sample, 2) == "warm-up sample 3"
