# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/configuration.md from the tables in the code: `python <this file>`.

Each stands between `<!-- NAME -->` and `<!-- end NAME -->`; a test fails when one is stale. What
the server refuses or ignores in a config.pbtxt is not written down here: it is asked.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))  # it may be run, or loaded by its path

from page_tables import filled

from actorserve.config import OPTIONS, Option, Settings
from actorserve.frontend.arguments import make_parser
from actorserve.triton.config_completion import complete
from actorserve.triton.config_support import unsupported
from actorserve.triton.model_config import ModelConfig, ModelInstanceGroup
from actorserve.triton.model_parameters import PARAMETERS, ModelParameters
from actorserve.triton.optimization_config import ModelOptimizationPolicy
from actorserve.triton.proto_schema import schema_of
from actorserve.triton.scheduling_config import ModelDynamicBatching, ModelQueuePolicy
from actorserve.triton.tensor_config import ModelInput, ModelOutput
from actorserve.triton.text_format import parse_model_config

NONE = "\N{EN DASH}"
PAGE = Path(__file__).with_name("configuration.md")

EMBEDDED = (
    "model_control_mode",
    "load_model",
    "model_load_thread_count",
    "auto_complete_config",
    "backend_directory",
    "exit_timeout_s",
    "strict_readiness",
    "backend_config",
    "restart_backoff_s",
    "device_driver",
    "device_slab_bytes",
    "device_max_bytes",
    "device_foreign",
    "device_fence",
    "device_full",
    "device_quarantine_s",
    "device_isolation",
    "crash_dir",
    "metrics_config",
    "metrics_interval_ms",
    "allow_cpu_metrics",
)
"""The settings that mean something without a front end, and are no business of the host's log."""

MESSAGES: dict[str, type[msgspec.Struct]] = {
    "": ModelConfig,
    "input.": ModelInput,
    "output.": ModelOutput,
    "instance_group.": ModelInstanceGroup,
    "dynamic_batching.": ModelDynamicBatching,
    "dynamic_batching.default_queue_policy.": ModelQueuePolicy,
    "optimization.": ModelOptimizationPolicy,
}
"""The messages whose fields are listed, by what stands before a field's name."""

FIELDS: dict[str, str] = {
    "name": "the folder's name; may be left out",
    "platform": "not needed: see `backend`",
    "backend": '`"python"`, or nothing where a version has a `model.py`; `"generation"` '
    "([generation.md](generation.md)); or a backend of `--backend-directory`; others are refused",
    "runtime": "`model.py` or nothing",
    "version_policy": "`latest { num_versions: n }` (n is 1 without it), `all {}` or "
    "`specific { versions: [ … ] }`",
    "max_batch_size": "the most rows of one batch; 0: no batch dimension",
    "input": "see below",
    "output": "see below",
    "optimization": "see below",
    "dynamic_batching": "see below; without it each request is a batch",
    "instance_group": "see below; without it one instance",
    "default_model_filename": "the file in each version's folder, `model.py` without it",
    "parameters": "see above; all others are the model's own",
    "model_transaction_policy": "`decoupled`: any number of responses to a request",
    "input.name": "what requests call it",
    "input.data_type": "`TYPE_BOOL` to `TYPE_FP64`, `TYPE_BF16`, `TYPE_STRING`",
    "input.format": "shown to clients and to the model",
    "input.dims": "without the batch; -1 for any size",
    "input.reshape": "the shape that the model sees",
    "input.allow_ragged_batch": "requests of different shapes may share a batch",
    "input.optional": "requests may leave it out",
    "output.name": "what responses call it",
    "output.data_type": "as of inputs",
    "output.dims": "as of inputs",
    "output.reshape": "the shape that the model returns",
    "output.label_filename": "there is no classification yet",
    "instance_group.name": "of its instances, with a number behind it: `<name>_0`",
    "instance_group.kind": "`KIND_CPU`, `KIND_GPU`, `KIND_MODEL` or `KIND_AUTO`; `KIND_GPU` needs "
    "a device driver ([devices.md](devices.md)), and fails without one",
    "instance_group.count": "instances, each a process; 1000 at most",
    "instance_group.gpus": "only for `KIND_GPU`",
    "dynamic_batching.preferred_batch_size": "rows at which a batch is sent without waiting",
    "dynamic_batching.max_queue_delay_microseconds": "how long a batch may wait for more rows",
    "dynamic_batching.preserve_ordering": "responses come in the order of their requests",
    "dynamic_batching.priority_levels": "1 is the highest; 0: none",
    "dynamic_batching.default_priority_level": "of requests that name none",
    "dynamic_batching.default_queue_policy": "see below",
    "dynamic_batching.priority_queue_policy": "the same for single levels",
    "dynamic_batching.default_queue_policy.timeout_action": "`REJECT`, or `DELAY`: behind all "
    "others",
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": "how long a request may "
    "wait; 0: for ever",
    "dynamic_batching.default_queue_policy.allow_timeout_override": "a request's own timeout may "
    "shorten it",
    "dynamic_batching.default_queue_policy.max_queue_size": "how many may wait; 0: any number",
    "optimization.input_pinned_memory": "CPU memory is all there is",
    "optimization.output_pinned_memory": "likewise",
}
"""What fields mean that are honoured."""

NO_EFFECT = {
    "platform",
    "input.format",
    "output.label_filename",
    "optimization.input_pinned_memory",
    "optimization.output_pinned_memory",
}
"""Those of them that are taken and change nothing."""

PROBES: dict[str, str] = {
    "batch_input": 'batch_input { target_name: "X" source_input: "INPUT" }',
    "batch_output": 'batch_output { target_name: "OUTPUT" source_input: "INPUT" }',
    "sequence_batching": "sequence_batching { }",
    "ensemble_scheduling": 'ensemble_scheduling { step { model_name: "x" model_version: 1 } }',
    "cc_model_filenames": 'cc_model_filenames { key: "8.0" value: "x" }',
    "metric_tags": 'metric_tags { key: "a" value: "b" }',
    "model_warmup": 'model_warmup { name: "x" batch_size: 1 inputs { key: "INPUT" value { '
    "data_type: TYPE_FP32 dims: 1 zero_data: true } } }",
    "model_operations": 'model_operations { op_library_filename: "x" }',
    "model_repository_agents": 'model_repository_agents { agents { name: "checksum" } }',
    "response_cache": "response_cache { enable: true }",
    "model_metrics": "model_metrics { metric_control { metric_identifier { family: "
    '"nv_inference_first_response_histogram_ms" } } }',
    "input.is_shape_tensor": "input { name: 'X' is_shape_tensor: true }",
    "input.is_non_linear_format_io": "input { name: 'X' is_non_linear_format_io: true }",
    "output.is_shape_tensor": "output { name: 'X' is_shape_tensor: true }",
    "output.is_non_linear_format_io": "output { name: 'X' is_non_linear_format_io: true }",
    "instance_group.rate_limiter": "instance_group { rate_limiter { priority: 1 } }",
    "instance_group.secondary_devices": "instance_group { secondary_devices { device_id: 0 } }",
    "instance_group.profile": 'instance_group { profile: "x" }',
    "instance_group.passive": "instance_group { passive: true }",
    "instance_group.host_policy": 'instance_group { host_policy: "x" }',
    "optimization.graph": "optimization { graph { level: 1 } }",
    "optimization.priority": "optimization { priority: PRIORITY_MAX }",
    "optimization.cuda": "optimization { cuda { graphs: true } }",
    "optimization.execution_accelerators": "optimization { execution_accelerators { } }",
    "optimization.gather_kernel_buffer_threshold": "optimization { gather_kernel_buffer_threshold:"
    " 1 }",
    "optimization.eager_batching": "optimization { eager_batching: true }",
}
"""Configurations that use a field which may be refused or ignored; `FIELDS` has the others."""

HONOURED = {
    "metric_tags": "further labels of the server's metrics about the model",
    "model_metrics": "the buckets of `nv_inference_first_response_histogram_ms`, and of no other",
    "model_warmup": "requests that each instance answers before it is ready",
}
"""What probed fields mean once they are honoured."""


def main() -> int:
    """Bring the page up to date."""
    PAGE.write_text(render(PAGE.read_text()))
    return 0


def render(page: str) -> str:
    """Return the page with its tables as they should be."""
    return filled(page, TABLES)


def _options() -> Iterator[str]:
    """Yield a table for each group of options."""
    for number, (group, options) in enumerate(itertools.groupby(OPTIONS, lambda o: o.group)):
        if number:
            yield ""
        yield from (f"**{group}**", "", "| flag | variable | default | meaning |")
        yield "|---|---|---|---|"
        for option in options:
            flags = ", ".join(f"`{flag}`" for flag in (option.flag, *option.aliases))
            values = option.metavar if option.metavar != "BOOL" else "true|false"
            shown = f"{flags} `{values}`".replace("|", "\\|")
            default = f"`{option.default_text}`" if option.default_text else NONE
            yield f"| {shown} | `{option.variable}` | {default} | {_meaning(option)} |"


def _meaning(option: Option) -> str:
    text = option.help.replace("|", "\\|").replace("*", "\\*")
    if not option.repeatable:
        return text
    between = "spaces" if option.separator is None else "commas"
    return f"{text}; any number of times, in the variable with {between} between"


def _settings() -> Iterator[str]:
    """Yield the settings that an embedded server goes by."""
    by_field = {option.field: option for option in OPTIONS}
    types = inspect.get_annotations(Settings)
    yield from ("| field | type | default | as |", "|---|---|---|---|")
    for name in EMBEDDED:
        default = getattr(Settings(), name)
        yield f"| `{name}` | `{types[name]}` | `{default!r}` | `{by_field[name].flag}` |"


def _parameters() -> Iterator[str]:
    """Yield the parameters of a model."""
    yield from ("| parameter | default | meaning |", "|---|---|---|")
    for rule in PARAMETERS:
        default = _default(getattr(ModelParameters(), rule.field))
        yield f"| `{rule.name}` | {default} | {rule.help} |"


def _default(value: object) -> str:
    """Return a parameter's default as one would write it."""
    if isinstance(value, bool):
        return "`yes`" if value else "`copy`"
    if isinstance(value, (int, float)):
        return f"`{value:g}`"
    return NONE if value == "" else "`none`"


def _fields() -> Iterator[str]:
    """Yield the fields of config.pbtxt. Raises KeyError for one that this file says nothing of."""
    for prefix, message in MESSAGES.items():
        if prefix:
            yield from ("", f"**`{prefix[:-1]}`**", "")
        yield from ("| field | | |", "|---|---|---|")
        for name in schema_of(message).fields:
            yield f"| `{name}` | {' | '.join(_fate(prefix + name))} |"


def _fate(path: str) -> tuple[str, str]:
    """Return what becomes of a field and what is to be said of it."""
    if path not in PROBES:
        return "no effect" if path in NO_EFFECT else "honoured", FIELDS[path]
    head = "" if path == "ensemble_scheduling" else 'backend: "python"\n'
    config = complete(parse_model_config(head + PROBES[path], path), "m", has_model_py=True)
    errors, warnings = unsupported(config)
    if errors:
        return "**fails**", _plain(errors[0])
    if warnings:
        return "warning", _plain(warnings[0])
    return "honoured", HONOURED[path]


def _commands() -> Iterator[str]:
    """Yield what the commands take, but for `start`."""
    yield from ("| command | argument | default | meaning |", "|---|---|---|---|")
    parser = make_parser()
    (commands,) = [each.choices for each in parser._actions if isinstance(each.choices, dict)]
    for command, subparser in commands.items():
        if command == "start":
            continue
        for action in subparser._actions:
            if action.dest == "help" or action.help == argparse.SUPPRESS:
                continue
            shown = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            if action.option_strings and action.nargs != 0:
                shown += f" {action.metavar or action.dest.rpartition('_')[2].upper()}"
            default = action.default
            default = f"{default:g}" if isinstance(default, float) else default
            text = re.sub(r" *\(?default: .*$", "", action.help or "").replace("|", "\\|")
            default = f"`{default}`" if default else NONE
            yield f"| `{command}` | `{shown}` | {default} | {text} |"


def _plain(text: str) -> str:
    """Return a message without the names of our probe."""
    text = text.removeprefix("model 'm': ")
    for name in ("instance_group 'm_0': ", "tensor 'X': "):
        text = text.removeprefix(name)
    return text.replace("'checksum'", "they")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "options": _options,
    "settings": _settings,
    "parameters": _parameters,
    "fields": _fields,
    "commands": _commands,
}

if __name__ == "__main__":
    sys.exit(main())
