# SPDX-License-Identifier: Apache-2.0
"""The texts of a wrong configuration, and what is said of one that cannot be honoured."""

from __future__ import annotations

import pytest

from actorserve.errors import ConfigError
from actorserve.triton.config_completion import complete
from actorserve.triton.config_support import unsupported
from actorserve.triton.config_validation import MAX_INSTANCES, validate
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.text_format import parse_model_config

TENSOR = 'name: "I" data_type: TYPE_FP32'


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Leave out the look for leaks: all here is pure, and the look costs more than a case."""


def completed(text: str, gpu_count: int = 0) -> ModelConfig:
    """Read a text and fill in the defaults of a Python model called M."""
    config = parse_model_config(text, "config.pbtxt")
    return complete(config, "M", has_model_py=True, gpu_count=gpu_count)


def fault(text: str, gpu_count: int = 0) -> str:
    """Return the text of the error that a configuration gets."""
    with pytest.raises(ConfigError) as caught:
        validate(completed(text, gpu_count), gpu_count)
    return str(caught.value)


def test_complete_configuration_is_valid() -> None:
    """What the defaults make of an empty file is right, and can be honoured."""
    config = completed("")
    validate(config)
    assert unsupported(config) == ([], [])


def test_configuration_without_its_basics_is_refused() -> None:
    """Name, backend, version policy and instances must be there."""
    for config, text in (
        (ModelConfig(), "model configuration must specify 'name'"),
        (ModelConfig(name="M"), "must specify 'platform' or 'backend' for 'M'"),
        (ModelConfig(name="M", backend="b"), "must specify 'version policy' for M"),
    ):
        with pytest.raises(ConfigError) as caught:
            validate(config)
        assert str(caught.value) == text
    config = completed("")
    config.instance_group = []
    with pytest.raises(ConfigError, match=r"^must specify one or more 'instance group's for M$"):
        validate(config)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_size: -1", "'max_batch_size' must be non-negative value for M"),
        ("version_policy {}", "must specify 'version policy' for M"),
        ("input {}", "model input must specify 'name' for M"),
        ("output {}", "model output must specify 'name' for M"),
        ("input { name: 'I' }", "model input 'I' must specify 'data_type' for M"),
        ("output { name: 'I' }", "model output 'I' must specify 'data_type' for M"),
        (f"input {{ {TENSOR} }}", "model input 'I' must specify 'dims' for M"),
        (
            f"input {{ {TENSOR} dims: 0 }}",
            "model input 'I' dimension must be integer >= 1, or -1 to indicate a variable-size "
            "dimension for M",
        ),
        (
            f"output {{ {TENSOR} dims: 1 reshape {{}} }}",
            "model output 'I' cannot have empty reshape for non-batching model as scalar tensors "
            "are not supported for M",
        ),
        (
            f"input {{ {TENSOR} dims: 4 reshape {{ shape: [2, 0] }} }}",
            "model input 'I' reshape dimensions must be integer >= 1, or -1 to indicate a "
            "variable-size dimension for M",
        ),
        (
            f"input {{ {TENSOR} dims: 4 reshape {{ shape: [2, 3] }} }}",
            "model input 'I' has different size for dims and reshape for M",
        ),
        (
            f"input {{ {TENSOR} dims: [2, -1, 6] reshape {{ shape: [-1, 12] }} }}",
            "model input 'I' has different size for dims and reshape for M",
        ),
        (
            f"input {{ {TENSOR} dims: 4 }} input {{ {TENSOR} dims: 4 }}",
            "model input 'I' is configured more than once for M",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 0 }",
            "dynamic batching preferred size must be positive for M",
        ),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: [4, 5] }",
            "dynamic batching preferred size must be <= max batch size for M",
        ),
        (
            "dynamic_batching { priority_levels: 2 }",
            "default priority level must be in range [1, 2] for M",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 3 }",
            "default priority level must be in range [1, 2] for M",
        ),
        (
            "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 3 } }",
            "priority queue policy must have priority level in range [1, 2] for M",
        ),
        (
            "dynamic_batching { preserve_ordering: true "
            "priority_levels: 2 default_priority_level: 1 }",
            "Only one priority level is allowed when 'preserve_ordering' is true for M",
        ),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy { "
            "timeout_action: DELAY default_timeout_microseconds: 1 } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for M",
        ),
        (
            "dynamic_batching { preserve_ordering: true priority_levels: 1 "
            "default_priority_level: 1 priority_queue_policy { key: 1 value { "
            "timeout_action: DELAY default_timeout_microseconds: 1 } } }",
            "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true "
            "for M",
        ),
        (
            "instance_group { kind: KIND_GPU }",
            "instance group M_0 of model M has kind KIND_GPU but no GPUs are available",
        ),
        (
            "instance_group {} instance_group { kind: KIND_CPU gpus: 0 }",
            "instance group M_1 of model M has kind KIND_CPU but specifies one or more GPUs",
        ),
        (
            "instance_group { name: 'g' kind: KIND_MODEL gpus: 0 }",
            "instance group g of model M has kind KIND_MODEL but specifies one or more GPUs",
        ),
        (
            f"instance_group {{ count: {MAX_INSTANCES + 1} }}",
            "instance group M_0 of model M has 'count' 1001: expected a number from 1 to 1000",
        ),
        (
            "instance_group { count: -1 }",
            "instance group M_0 of model M has 'count' -1: expected a number from 1 to 1000",
        ),
        (
            "model_transaction_policy { decoupled: true } response_cache { enable: true }",
            "Response Cache does not currently support model M with 'decoupled' transaction "
            "policy. Please disable the response cache.",
        ),
        (
            "sequence_batching {} response_cache { enable: true }",
            "Response Cache does not currently support model M with 'Sequence Batching' scheduler "
            "type. Please disable the response cache.",
        ),
        (
            "backend: 'python' default_model_filename: 'm.pt'",
            "Model name must end with '.py'. Model name is \"m.pt\".",
        ),
        (
            "backend: 'python' default_model_filename: '../m.py'",
            "'default_model_filename' of model 'M' must be a path inside the version's folder, "
            "got '../m.py'",
        ),
    ],
)
def test_wrong_configuration_has_the_known_text(text: str, expected: str) -> None:
    """Each mistake gets the text that clients of the reference server know."""
    assert fault(text) == expected


@pytest.mark.parametrize("name", ["a/b", "..\\x", "x;y", "a\nb", "$(x)"])
def test_group_names_that_are_no_file_names_are_refused(name: str) -> None:
    """An instance's name becomes part of file and process names, so it is limited."""
    config = completed("instance_group {}")
    config.instance_group[0].name = name
    with pytest.raises(ConfigError, match=r"contains invalid characters$"):
        validate(config)


def test_gpus_must_exist() -> None:
    """With GPUs, a group must name some, and only such as are there."""
    assert fault("instance_group { kind: KIND_GPU gpus: [0, 2] }", gpu_count=2) == (
        "instance group M_0 of model M specifies invalid or unsupported gpu id 2. GPUs with at "
        "least the minimum required CUDA compute compatibility of 6.000000 are: 0, 1"
    )
    config = completed("instance_group { kind: KIND_GPU gpus: 1 }", gpu_count=2)
    validate(config, gpu_count=2)
    config.instance_group[0].gpus = []
    with pytest.raises(ConfigError, match=r"has kind KIND_GPU but specifies no GPUs$"):
        validate(config, gpu_count=2)


@pytest.mark.parametrize(
    "text",
    [
        f"input {{ {TENSOR} dims: [2, 4, -1, 6] reshape {{ shape: [8, -1, 1, 6] }} }}",
        f"max_batch_size: 1 input {{ {TENSOR} dims: 1 reshape {{}} }}",
        f"input {{ {TENSOR} dims: -1 }} output {{ {TENSOR} dims: -1 }}",
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: 8 priority_levels: 2 "
        "default_priority_level: 1 priority_queue_policy { key: 2 } }",
        "dynamic_batching { preserve_ordering: true "
        "default_queue_policy { timeout_action: DELAY } }",
        "default_model_filename: 'sub/other.py' backend: 'python'",
        "response_cache { enable: false } model_transaction_policy { decoupled: true }",
        "instance_group { kind: KIND_MODEL count: 2 }",
        "version_policy { all {} }",
    ],
)
def test_right_configuration_passes(text: str) -> None:
    """What the reference server accepts is accepted."""
    validate(completed(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ensemble_scheduling {}", "ensemble_scheduling is not supported by this version"),
        ("platform: 'ensemble'", "ensemble_scheduling is not supported by this version"),
        ("sequence_batching {}", "sequence_batching is not supported by this version"),
        ("backend: 'onnxruntime'", "backend 'onnxruntime' is not supported: only the backend"),
        ("platform: 'tensorrt_plan'", "platform 'tensorrt_plan' is not supported"),
        ("backend: 'python' runtime: 'x.so'", "runtime 'x.so' is not supported"),
        ("model_repository_agents { agents { name: 'checksum' } }", "model_repository_agents are"),
    ],
)
def test_what_cannot_be_served_is_an_error(text: str, expected: str) -> None:
    """A valid configuration that would be served wrongly fails with a reason."""
    config = completed(text)
    validate(config)
    errors, warnings = unsupported(config)
    assert len(errors) == 1
    assert errors[0].startswith(f"model 'M': {expected}")
    assert warnings == []


def test_python_based_backend_is_honoured() -> None:
    """Once it was found; what else is wrong is still said."""
    config = completed("backend: 'mine' runtime: 'model.py'")
    assert unsupported(config, is_python_based=True) == ([], [])
    assert len(unsupported(config)[0]) == 1
    config = completed("backend: 'mine' sequence_batching {}")
    assert "sequence_batching" in unsupported(config, is_python_based=True)[0][0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model_warmup { name: 'w' }", "model_warmup is ignored"),
        ("response_cache { enable: true }", "response_cache is ignored"),
        ("batch_input {}", "batch_input is ignored"),
        ("batch_output {}", "batch_output is ignored"),
        ("optimization { cuda { graphs: true } }", "optimization.cuda is ignored"),
        ("optimization { priority: PRIORITY_MAX }", "optimization.priority is ignored"),
        ("optimization { eager_batching: true }", "optimization.eager_batching is ignored"),
        (
            "instance_group { rate_limiter { priority: 1 } }",
            "instance_group 'M_0': rate_limiter is ignored",
        ),
        ("instance_group { passive: true }", "instance_group 'M_0': passive is ignored"),
        ("instance_group { host_policy: 'h' }", "instance_group 'M_0': host_policy is ignored"),
        ("instance_group { profile: 'p' }", "instance_group 'M_0': profile is ignored"),
        (
            "instance_group { secondary_devices {} }",
            "instance_group 'M_0': secondary_devices is ignored",
        ),
        (
            f"input {{ {TENSOR} dims: 1 is_shape_tensor: true }}",
            "tensor 'I': is_shape_tensor and is_non_linear_format_io are ignored",
        ),
        ("cc_model_filenames { key: '7.5' value: 'x' }", "cc_model_filenames is ignored"),
        ("model_operations { op_library_filename: 'x' }", "model_operations is ignored"),
        ("metric_tags { key: 'a-b' value: 'b' }", "metric_tags: 'a-b' is ignored"),
        ("metric_tags { key: 'model' value: 'b' }", "metric_tags: 'model' is ignored"),
        (
            "model_metrics { metric_control { metric_identifier { family: 'x' } } }",
            "model_metrics: 'x' is ignored: only nv_inference_first_response_histogram_ms has",
        ),
        (
            "dynamic_batching { priority_queue_policy { key: 1 } }",
            "dynamic_batching.priority_queue_policy is ignored: priority_levels is not set",
        ),
        (
            "dynamic_batching { preserve_ordering: true default_queue_policy { "
            "timeout_action: DELAY allow_timeout_override: true } }",
            "dynamic_batching: timeout_action DELAY is ignored: with preserve_ordering no request",
        ),
    ],
)
def test_what_is_ignored_is_said(text: str, expected: str) -> None:
    """A configuration that is served without some part of it says which."""
    errors, warnings = unsupported(completed(text))
    assert errors == []
    assert len(warnings) == 1
    assert warnings[0].startswith(f"model 'M': {expected}")


def test_what_has_no_effect_either_way_is_not_warned_of() -> None:
    """Pinned memory, a cache that is off and empty sections are no reason for a warning."""
    config = completed(
        "optimization { input_pinned_memory { enable: false } } response_cache {} "
        "model_operations {} model_metrics {} model_repository_agents {} runtime: 'model.py' "
        "metric_tags { key: 'a' value: 'b' } "
        "max_batch_size: 4 instance_group { count: 2 } dynamic_batching { preserve_ordering: true "
        "default_queue_policy { max_queue_size: 3 default_timeout_microseconds: 5 } }"
    )
    assert unsupported(config) == ([], [])
