# SPDX-License-Identifier: Apache-2.0
"""Defaults, instances, versions, and the protocol's view of a configuration."""

from __future__ import annotations

import pytest

from actorserve.errors import ConfigError, InvalidArgument
from actorserve.triton.config_completion import complete, merge_auto_completed
from actorserve.triton.config_json import model_config_to_dict
from actorserve.triton.inference import InferRequest, InferTensor, TensorSpec
from actorserve.triton.instance_group import InstanceSpec, expand_instances
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.model_info import input_rules, model_info
from actorserve.triton.request_validation import RequestRules
from actorserve.triton.text_format import parse_model_config
from actorserve.triton.version_policy import missing_versions, select_versions

ADD_SUB = """
max_batch_size: 8
input [
  { name: "A" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "B" data_type: TYPE_STRING dims: [ 1 ] reshape { shape: [] } optional: true }
]
output { name: "C" data_type: TYPE_BF16 dims: [ -1, 2 ] }
"""


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


def read(text: str) -> ModelConfig:
    """Read a text as it stands."""
    return parse_model_config(text, "config.pbtxt")


def done(text: str, gpu_count: int = 0) -> ModelConfig:
    """Read a text and fill in the defaults of a Python model called m."""
    return complete(read(text), "m", has_model_py=True, gpu_count=gpu_count)


def names(text: str, gpu_count: int = 0) -> list[str]:
    """Return the names of the instances of a model called m."""
    return [one.name for one in expand_instances(done(text, gpu_count))]


def test_an_empty_file_becomes_a_python_model() -> None:
    """All that clients see at the config endpoint has its default."""
    value = model_config_to_dict(done(""))
    assert value["name"] == "m"
    assert value["backend"] == "python"
    assert value["default_model_filename"] == "model.py"
    assert value["version_policy"] == {"latest": {"num_versions": 1}}
    assert value["optimization"] == {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }
    assert value["instance_group"] == [
        {
            "name": "m",
            "kind": "KIND_CPU",
            "count": 1,
            "gpus": [],
            "secondary_devices": [],
            "profile": [],
            "passive": False,
            "host_policy": "",
        }
    ]
    assert "dynamic_batching" not in value


def test_completion_changes_nothing_in_place() -> None:
    """The configuration that was read stays as it was, and completing again changes nothing."""
    config = read("instance_group {} optimization {} version_policy { latest {} }")
    first = complete(config, "m", has_model_py=True)
    assert config == read("instance_group {} optimization {} version_policy { latest {} }")
    assert complete(first, "m", has_model_py=True) == first


def test_what_is_stated_stays() -> None:
    """No default replaces what the file says."""
    text = (
        "name: 'm' backend: 'b' default_model_filename: 'f' version_policy { latest { "
        "num_versions: 3 } } optimization { input_pinned_memory { enable: false } } "
        "instance_group { name: 'g' count: 2 kind: KIND_MODEL }"
    )
    config = done(text)
    expected = read(text)
    assert config.optimization is not None
    assert config.optimization.input_pinned_memory == (
        expected.optimization and expected.optimization.input_pinned_memory
    )
    config.optimization = expected.optimization
    assert config == expected


def test_name_must_be_the_folders() -> None:
    """Another name than the folder's is refused, with the known text."""
    with pytest.raises(ConfigError) as caught:
        done("name: 'x'")
    assert str(caught.value) == (
        "unexpected directory name 'm' for model 'x', directory name must equal model name"
    )


@pytest.mark.parametrize(
    ("text", "directory", "has_model_py", "backend"),
    [
        ("", "m", True, "python"),
        ("default_model_filename: 'model.py'", "m", False, "python"),
        ("platform: 'x' default_model_filename: 'model.py'", "m", False, "python"),
        ("platform: 'x'", "m", True, ""),
        ("", "m.onnx", False, "onnx"),
        ("default_model_filename: 'other.py'", "m.custom", True, "custom"),
        ("backend: 'b'", "m", True, "b"),
        ("ensemble_scheduling {}", "m", False, ""),
    ],
)
def test_backend_is_found_out(text: str, directory: str, has_model_py: bool, backend: str) -> None:
    """A file that names no backend means the one that its folder shows."""
    assert complete(read(text), directory, has_model_py=has_model_py).backend == backend


def test_backend_that_nothing_tells_is_an_error() -> None:
    """Without a model.py, and without a suffix of the name, nothing tells the backend."""
    with pytest.raises(ConfigError, match=r"^Invalid model name: Could not determine backend for"):
        complete(ModelConfig(), "m", has_model_py=False)


def test_strict_fills_in_neither_name_nor_backend() -> None:
    """With auto-completion switched off the file itself must state them."""
    config = complete(ModelConfig(), "m", has_model_py=True, strict=True)
    assert (config.name, config.backend) == ("", "")
    assert config.version_policy is not None


def test_ensemble_gets_no_instances() -> None:
    """Instance groups and optimization do not apply to an ensemble."""
    config = done("ensemble_scheduling {}")
    assert (config.instance_group, config.optimization) == ([], None)


def test_auto_completed_parts_are_taken_over() -> None:
    """A model's own function decides tensors and batching, and nothing else."""
    config = done("")
    theirs = read(
        ADD_SUB + "name: 'evil' dynamic_batching {} model_transaction_policy { decoupled: true }"
    )
    merged = merge_auto_completed(config, theirs)
    assert merged.name == "m"
    assert merged.max_batch_size == 8
    assert [one.name for one in merged.input] == ["A", "B"]
    assert merged.dynamic_batching is not None and merged.is_decoupled
    assert config == done("")


def test_auto_completion_keeps_the_scheduler() -> None:
    """A scheduler that the file chose is not replaced."""
    theirs = read("dynamic_batching {}")
    mine = done("dynamic_batching { preferred_batch_size: 4 }")
    assert merge_auto_completed(mine, theirs).dynamic_batching == mine.dynamic_batching
    assert merge_auto_completed(done("sequence_batching {}"), theirs).dynamic_batching is None


def test_instances_have_the_real_names() -> None:
    """Groups are numbered by their place, instances by their count."""
    assert names("") == ["m_0"]
    assert names("instance_group {}") == ["m_0_0"]
    assert names("instance_group { count: 2 } instance_group { name: 'g' } instance_group {}") == [
        "m_0_0",
        "m_0_1",
        "g_0",
        "m_2_0",
    ]


def test_instance_names_are_unique() -> None:
    """Groups of one name go on counting where the one before stopped."""
    assert names("instance_group { name: 'g' count: 2 } instance_group { name: 'g' }") == [
        "g_0",
        "g_1",
        "g_2",
    ]


def test_gpu_groups_have_an_instance_for_each_gpu() -> None:
    """A group's count holds for each of its GPUs; without a list these are all."""
    config = done("instance_group { kind: KIND_GPU count: 2 }", gpu_count=2)
    assert expand_instances(config) == [
        InstanceSpec("m_0_0", "GPU", 0),
        InstanceSpec("m_0_1", "GPU", 1),
        InstanceSpec("m_0_2", "GPU", 0),
        InstanceSpec("m_0_3", "GPU", 1),
    ]


@pytest.mark.parametrize(
    ("text", "gpu_count", "expected"),
    [
        ("instance_group {}", 0, [("CPU", 0)]),
        ("instance_group { gpus: 0 }", 0, [("CPU", 0)]),
        ("instance_group {}", 2, [("GPU", 0), ("GPU", 1)]),
        ("instance_group { gpus: 1 }", 2, [("GPU", 1)]),
        ("instance_group { gpus: [0, 2] }", 2, [("CPU", 0)]),
        ("instance_group { kind: KIND_CPU }", 2, [("CPU", 0)]),
        ("instance_group { kind: KIND_MODEL }", 2, [("MODEL", 0)]),
        ("", 1, [("GPU", 0)]),
    ],
)
def test_automatic_kind_needs_its_gpus(
    text: str, gpu_count: int, expected: list[tuple[str, int]]
) -> None:
    """KIND_AUTO is the GPUs where they are, the CPU otherwise."""
    instances = expand_instances(done(text, gpu_count))
    assert [(one.kind, one.device_id) for one in instances] == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [10]),
        ("version_policy { latest {} }", [10]),
        ("version_policy { latest { num_versions: 2 } }", [3, 10]),
        ("version_policy { latest { num_versions: 9 } }", [1, 3, 10]),
        ("version_policy { all {} }", [1, 3, 10]),
        ("version_policy { specific { versions: [10, 1, 7] } }", [1, 10]),
        ("version_policy { specific {} }", []),
    ],
)
def test_policy_selects_versions(policy: str, expected: list[int]) -> None:
    """Versions are numbers, and come in ascending order."""
    for config in (read(policy), done(policy)):
        assert select_versions(config, [3, 10, 1]) == expected
        assert select_versions(config, []) == []


def test_versions_without_a_folder_are_reported() -> None:
    """A version that the policy names and that is not there can be warned of."""
    config = read("version_policy { specific { versions: [1, 7] } }")
    assert missing_versions(config, [1, 2]) == [7]
    assert missing_versions(read(""), [1]) == []


def test_model_is_described_in_the_protocols_terms() -> None:
    """Data types have the wire's names, and shapes the batch dimension in front."""
    info = model_info(done(ADD_SUB), 2, [10, 2])
    assert (info.name, info.version, info.versions) == ("m", "2", ("2", "10"))
    assert (info.platform, info.max_batch_size, info.decoupled) == ("python", 8, False)
    assert info.inputs == (
        TensorSpec("A", "FP32", (-1, 4)),
        TensorSpec("B", "BYTES", (-1, 1), optional=True),
    )
    assert info.outputs == (TensorSpec("C", "BF16", (-1, -1, 2)),)


def test_model_without_batching_has_its_shapes_verbatim() -> None:
    """Without batching the shapes are those of the file."""
    config = done(
        ADD_SUB.replace("max_batch_size: 8", "") + "model_transaction_policy { decoupled: 1 }"
    )
    info = model_info(config, 1, [1])
    assert [one.shape for one in (*info.inputs, *info.outputs)] == [(4,), (1,), (-1, 2)]
    assert info.decoupled


def test_requests_are_checked_by_the_configuration() -> None:
    """The rules that a configuration states let right requests pass and wrong ones not."""
    config = done(ADD_SUB)
    rules = RequestRules("m", config.max_batch_size, input_rules(config), ["C"])
    tensors = [
        InferTensor("A", "FP32", (2, 4), bytes(32)),
        InferTensor("B", "BYTES", (2, 1), bytes(8)),
    ]
    checked = rules.check(InferRequest("m", tensors))
    assert checked.rows == 2
    assert [one.shape for one in checked.inputs] == [(2, 4), (2,)]
    with pytest.raises(InvalidArgument, match="data-type is 'INT32'"):
        rules.check(InferRequest("m", [InferTensor("A", "INT32", (2, 4), bytes(32))]))
