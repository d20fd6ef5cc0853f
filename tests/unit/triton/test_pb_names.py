# SPDX-License-Identifier: Apache-2.0
"""The names and functions of `triton_python_backend_utils` and its native half."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from actorserve.triton import c_names, model_control, pb_utils, shared_memory
from actorserve.triton.pb_utils import (
    InferenceRequest,
    InferenceResponse,
    Tensor,
    TritonModelException,
)

NATIVE = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "PreferredMemory",
    "ResponseIterator",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "is_model_ready",
    "load_model",
    "unload_model",
]


@pytest.mark.parametrize("name", NATIVE)
def test_native_names_are_the_same_in_both_modules(name: str) -> None:
    """Models import them from either."""
    assert getattr(pb_utils, name) is getattr(c_names, name)


def test_star_import_gives_every_public_name() -> None:
    """`__all__` lists what there is, and only that."""
    for module in (pb_utils, c_names):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert hasattr(module, name)


def test_unmodified_models_import_both_modules() -> None:
    """After `install`, the real names work in every form of import."""
    script = """
import sys
from actorserve.triton.importing import install
install()
import triton_python_backend_utils as pb_utils
import c_python_backend_utils as c_utils
from c_python_backend_utils import shared_memory, MetricFamily, InferenceResponseSender
from triton_python_backend_utils import *
assert Tensor is pb_utils.Tensor is c_utils.Tensor
assert np.float32 is pb_utils.np.float32
print(shared_memory.free_memory())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_constants_have_the_apis_values() -> None:
    """The numbers that models pass."""
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START == 1
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END == 2
    assert pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2
    assert int(pb_utils.TRITONSERVER_MEMORY_GPU) == 0
    assert int(pb_utils.TRITONSERVER_MEMORY_CPU) == 1


# --- data types ----------------------------------------------------------------------------------


def test_config_names_lead_to_numpy_types() -> None:
    """Every type but BF16, which numpy lacks; unknown ones are a KeyError."""
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert len(pb_utils.TRITON_STRING_TO_NUMPY) == 13
    for name in ("TYPE_BF16", "FP32", ""):
        with pytest.raises(KeyError):
            pb_utils.triton_string_to_numpy(name)


def test_numbers_lead_to_numpy_types_and_back() -> None:
    """Both ways agree; what has no numpy type is None."""
    for number in range(1, 14):
        kind = pb_utils.triton_to_numpy_type(number)
        assert kind is not None
        assert pb_utils.numpy_to_triton_type(kind) == number
    assert pb_utils.triton_to_numpy_type(1) is np.bool_
    assert pb_utils.triton_to_numpy_type(13) is np.object_
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.triton_to_numpy_type(0) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13


def test_data_type_of_a_tensor_leads_to_its_numpy_type() -> None:
    """The two halves of the API fit together."""
    tensor = Tensor("x", np.ones(1, np.int16))
    assert pb_utils.triton_to_numpy_type(tensor.triton_dtype()) is np.int16


# --- BYTES ---------------------------------------------------------------------------------------


def test_byte_tensors_are_serialized() -> None:
    """Object and `S` arrays in C order; nothing is an empty tuple; other arrays are None."""
    array = np.array([["ab", b"\xff"], [1, ""]], np.object_)
    assert pb_utils.serialize_byte_tensor(array) == (
        b"\x02\x00\x00\x00ab\x01\x00\x00\x00\xff\x01\x00\x00\x001\x00\x00\x00\x00"
    )
    assert pb_utils.serialize_byte_tensor(np.array([b"abc"])) == b"\x03\x00\x00\x00abc"
    assert pb_utils.serialize_byte_tensor(np.zeros(0, np.object_)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(0, np.float32)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(2, np.float32)) is None


def test_byte_tensors_are_deserialized() -> None:
    """The elements are bytes, in one dimension."""
    encoded = pb_utils.serialize_byte_tensor(np.array([["a", "b"], ["", "c"]], np.object_))
    assert isinstance(encoded, bytes)
    array = pb_utils.deserialize_bytes_tensor(encoded)
    assert array.dtype == np.object_
    assert array.tolist() == [b"a", b"b", b"", b"c"]


# --- look-ups ------------------------------------------------------------------------------------


def test_tensors_are_found_by_name() -> None:
    """The first of the name, or None."""
    tensors = [Tensor(name, np.ones(1)) for name in ("A", "B", "B")]
    request = InferenceRequest(model_name="m", inputs=tensors, requested_output_names=[])
    assert pb_utils.get_input_tensor_by_name(request, "B") is tensors[1]
    assert pb_utils.get_input_tensor_by_name(request, "C") is None
    response = InferenceResponse(tensors)
    assert pb_utils.get_output_tensor_by_name(response, "B") is tensors[1]
    assert pb_utils.get_output_tensor_by_name(response, "C") is None


def test_configurations_are_found_by_name() -> None:
    """The entry itself, or None, also where there is no such section."""
    config: dict[str, Any] = {"input": [{"name": "A"}, {"name": "B"}], "output": [{"name": "C"}]}
    assert pb_utils.get_input_config_by_name(config, "B") is config["input"][1]
    assert pb_utils.get_output_config_by_name(config, "C") is config["output"][0]
    assert pb_utils.get_input_config_by_name(config, "C") is None
    assert pb_utils.get_output_config_by_name({}, "C") is None


@pytest.mark.parametrize(
    ("config", "decoupled"),
    [
        ({}, False),
        ({"model_transaction_policy": {}}, False),
        ({"model_transaction_policy": {"decoupled": False}}, False),
        ({"model_transaction_policy": {"decoupled": True}}, True),
    ],
)
def test_decoupled_models_are_told_apart(config: dict[str, Any], decoupled: bool) -> None:
    """An absent section means that the model is not decoupled."""
    assert pb_utils.using_decoupled_model_transaction_policy(config) is decoupled


# --- names that need a server --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "prefix"),
    [
        (lambda: pb_utils.load_model("m", config="{}", files={}), "Failed to load model: "),
        (lambda: pb_utils.unload_model("m", unload_dependents=True), "Failed to unload model: "),
        (lambda: pb_utils.is_model_ready("m", "1"), "Failed to check model readiness: "),
    ],
)
def test_what_needs_a_server_says_so(call: Any, prefix: str) -> None:
    """The documented prefix, and when it can be used."""
    with pytest.raises(TritonModelException, match=f"^{prefix}a model that a server runs can do"):
        call()


@pytest.mark.parametrize("name", ["InferenceResponseSender", "Metric", "ResponseIterator"])
def test_what_only_the_server_makes_has_a_name(name: str) -> None:
    """Models annotate with it, but cannot make one."""
    with pytest.raises(TypeError, match=name):
        getattr(pb_utils, name)()


def test_model_dir_is_what_the_stub_says() -> None:
    """Outside of a server there is none."""
    with pytest.raises(TritonModelException, match="get_model_dir"):
        pb_utils.get_model_dir()
    model_control.set_model_dir("/repo/m/1")
    try:
        assert pb_utils.get_model_dir() == "/repo/m/1"
    finally:
        model_control.set_model_dir(None)


def test_free_memory_is_what_the_stub_counts() -> None:
    """`shared_memory.free_memory()` asks whoever counts."""
    shared_memory.set_free_bytes(lambda: 1234)
    try:
        assert c_names.shared_memory.free_memory() == 1234
    finally:
        shared_memory.set_free_bytes(None)


def test_preferred_memory_checks_its_arguments() -> None:
    """A kind of memory and a number."""
    pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 1)
    pb_utils.PreferredMemory(preferred_memory_type=pb_utils.TRITONSERVER_MEMORY_CPU)
    for arguments in ((0,), (None,), (pb_utils.TRITONSERVER_MEMORY_CPU, "0")):
        with pytest.raises(TypeError):
            pb_utils.PreferredMemory(*arguments)
