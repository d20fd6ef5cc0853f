# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model that names the backend "generation", and its completed configuration.

All such models have the same inputs and outputs, whatever their engine: what config.pbtxt says of
them it may repeat but not contradict. Names are those of TensorRT-LLM's backend where it has one.

    prompt    exactly one of text_input, input_ids, messages (JSON: [{"role": …, "content": …}])
    response  text_output, output_ids, index, finish_reason; the last one of a sequence has the
              counts of tokens, too. Log probabilities and logits come where they are asked for.

Pure: nothing is read from disk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import msgspec

from actorserve.errors import ConfigError
from actorserve.triton.model_config import ModelConfig, ModelTransactionPolicy
from actorserve.triton.tensor_config import DataType, ModelInput, ModelOutput

GENERATION = "generation"
"""The name of the backend, and the platform that clients see."""


class GenerationTensor(msgspec.Struct, frozen=True):
    """One input or output."""

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    help: str


def _tensor(
    name: str, data_type: DataType, help: str, dims: tuple[int, ...] = (1,)
) -> GenerationTensor:
    return GenerationTensor(name, data_type, dims, help)


_STRING, _INT32, _INT64 = DataType.TYPE_STRING, DataType.TYPE_INT32, DataType.TYPE_INT64
_FP32, _BOOL = DataType.TYPE_FP32, DataType.TYPE_BOOL
_MANY = (-1,)

INPUTS: tuple[GenerationTensor, ...] = (
    _tensor("text_input", _STRING, "the prompt as text"),
    _tensor("input_ids", _INT32, "the prompt as tokens", _MANY),
    _tensor("messages", _STRING, "the prompt as a conversation: a JSON list of role and content"),
    _tensor("max_tokens", _INT32, "the most tokens to generate (`DEFAULT_MAX_TOKENS`)"),
    _tensor("min_tokens", _INT32, "the least, before anything may end a sequence"),
    _tensor("temperature", _FP32, "0 (the default) is greedy"),
    _tensor("top_k", _INT32, "choose among the k most probable tokens; 0: all"),
    _tensor("top_p", _FP32, "choose among those that make up this probability; 1: all"),
    _tensor("min_p", _FP32, "leave out what is less probable than this part of the best"),
    _tensor("repetition_penalty", _FP32, "1 changes nothing"),
    _tensor("presence_penalty", _FP32, "0 changes nothing"),
    _tensor("frequency_penalty", _FP32, "0 changes nothing"),
    _tensor("no_repeat_ngram_size", _INT32, "never repeat so many tokens in a row; 0: may repeat"),
    _tensor("random_seed", _INT64, "makes sampling repeatable"),
    _tensor("stop_words", _STRING, "texts that end a sequence, and are left out of it", _MANY),
    _tensor("include_stop", _BOOL, "leave the stop word in"),
    _tensor("bad_words", _STRING, "texts that are never generated", _MANY),
    _tensor("end_id", _INT32, "the token that ends a sequence, in place of the model's; -1: none"),
    _tensor("beam_width", _INT32, "beam search over so many beams"),
    _tensor("n", _INT32, "sequences to return"),
    _tensor("best_of", _INT32, "sequences to choose them from"),
    _tensor("length_penalty", _FP32, "beam search: over 0 favours longer beams"),
    _tensor("logit_bias", _STRING, 'JSON: {"token id": what is added to its logit}'),
    _tensor("return_log_probs", _BOOL, "return log probabilities of the tokens"),
    _tensor("num_logprobs", _INT32, "and of so many of the most probable ones"),
    _tensor("return_context_logits", _BOOL, "return the logits of the prompt"),
    _tensor("return_generation_logits", _BOOL, "return those of what was generated"),
    _tensor("exclude_input_in_output", _BOOL, "false: begin each sequence with the prompt"),
    _tensor("stream", _BOOL, "true: a response for each step; false: one for each sequence"),
    _tensor("lora_name", _STRING, "an adapter of the model's `ADAPTERS`"),
)

OUTPUTS: tuple[GenerationTensor, ...] = (
    _tensor("text_output", _STRING, "the text, or with `stream` what is new of it"),
    _tensor("output_ids", _INT32, "its tokens", _MANY),
    _tensor("index", _INT32, "which sequence, from 0"),
    _tensor("finish_reason", _STRING, "stop, length, cancelled, timeout, error; empty before"),
    _tensor("prompt_tokens", _INT32, "tokens of the prompt; in the last response of a sequence"),
    _tensor("completion_tokens", _INT32, "tokens of the sequence; in its last response"),
    _tensor("cum_log_probs", _FP32, "the sum of the log probabilities; in the last response"),
    _tensor("output_log_probs", _FP32, "the log probability of each token", _MANY),
    _tensor("top_logprobs", _STRING, "JSON: for each token its text and the most probable ones"),
    _tensor("context_logits", _FP32, "prompt tokens by vocabulary", (-1, -1)),
    _tensor("generation_logits", _FP32, "tokens by vocabulary", (-1, -1)),
)


def complete_generation(config: ModelConfig) -> ModelConfig:
    """Return the configuration of such a model with its inputs, outputs and policy filled in.

    Raises ConfigError where it says something that cannot be.
    """
    done = copy.deepcopy(config)
    _refuse(done)
    done.model_transaction_policy = ModelTransactionPolicy(decoupled=True)
    done.input = _complete_inputs(done)
    done.output = _complete_outputs(done)
    return done


def _refuse(config: ModelConfig) -> None:
    """Raise ConfigError for what a model of this backend cannot have."""
    if config.max_batch_size:
        raise _wrong(
            f"max_batch_size is {config.max_batch_size}, expected 0: the engine itself puts "
            "requests together"
        )
    policy = config.model_transaction_policy
    if policy is not None and not policy.decoupled:
        raise _wrong("model_transaction_policy says that it is not decoupled, but it always is")
    for field in ("default_model_filename", "runtime"):
        value = getattr(config, field)
        if value:
            raise _wrong(f"{field} is '{value}', but there is no model file: leave it out")


def _complete_inputs(config: ModelConfig) -> list[ModelInput]:
    _check_all("input", config.input, INPUTS)
    if any(each.allow_ragged_batch for each in config.input):
        raise _wrong("an input cannot have allow_ragged_batch")
    return [
        ModelInput(name=each.name, data_type=each.data_type, dims=list(each.dims), optional=True)
        for each in INPUTS
    ]


def _complete_outputs(config: ModelConfig) -> list[ModelOutput]:
    _check_all("output", config.output, OUTPUTS)
    return [
        ModelOutput(name=each.name, data_type=each.data_type, dims=list(each.dims))
        for each in OUTPUTS
    ]


def _check_all(
    what: str, given: Sequence[ModelInput | ModelOutput], specs: tuple[GenerationTensor, ...]
) -> None:
    known = {each.name: each for each in specs}
    for each in given:
        _check(what, each, known)
    if len({each.name for each in given}) < len(given):
        raise _wrong(f"an {what} is configured more than once")


def _check(what: str, given: ModelInput | ModelOutput, known: dict[str, GenerationTensor]) -> None:
    """Raise ConfigError for a tensor that is none of ours, or another one."""
    spec = known.get(given.name)
    if spec is None:
        names = ", ".join(known)
        raise _wrong(f"there is no {what} '{given.name}': {what}s are {names}")
    if given.data_type not in (DataType.TYPE_INVALID, spec.data_type):
        raise _wrong(
            f"{what} '{given.name}' has data_type {given.data_type.name}, expected "
            f"{spec.data_type.name}"
        )
    if given.dims and tuple(given.dims) != spec.dims:
        raise _wrong(
            f"{what} '{given.name}' has dims {list(given.dims)}, expected {list(spec.dims)}"
        )
    if given.reshape is not None:
        raise _wrong(f"{what} '{given.name}' cannot have reshape")


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"backend '{GENERATION}': {text}")
