# SPDX-License-Identifier: Apache-2.0
"""The warm-up samples of a configuration, as tensors: `model_warmup` of config.pbtxt.

Each row of a batch holds the same data: zeros, random numbers, or a file in the model's folder
`warmup/`. Serving does not send them; `actorserve check --dry-run` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from actorserve.errors import ActorserveError, ConfigError
from actorserve.triton.inference import InferTensor
from actorserve.triton.model_config import ModelConfig
from actorserve.triton.tensor_config import ModelInput, ModelWarmup
from actorserve.wire.tensors import BY_NUMBER, DataType, check_bytes, element_count

FOLDER = "warmup"
MOST_BYTES = 4 << 30
SEED = 0


def warm_up_tensors(sample: ModelWarmup, config: ModelConfig, folder: Path) -> list[InferTensor]:
    """Return the inputs of a sample; `folder` is the model's, `config` its completed configuration.

    Raises ConfigError where the sample does not fit the model or its data.
    """
    if config.max_batch_size == 0 and sample.batch_size > 1:
        raise ConfigError(f"batch_size is {sample.batch_size}, but max_batch_size is 0: no batches")
    if config.max_batch_size and sample.batch_size > config.max_batch_size:
        raise ConfigError(
            f"batch_size is {sample.batch_size}, more than max_batch_size {config.max_batch_size}"
        )
    known = {each.name: each for each in config.input}
    return [
        _tensor(name, each, known, folder, sample.batch_size if config.max_batch_size else None)
        for name, each in sample.inputs.items()
    ]


def warm_up_problems(config: ModelConfig, folder: Path) -> Iterator[str]:
    """Yield what is wrong with each sample, as far as can be seen without the model's code."""
    for number, sample in enumerate(config.model_warmup):
        try:
            warm_up_tensors(sample, config, folder)
        except ConfigError as error:
            yield f"{sample_title(sample, number)}: {error.message}"


def sample_title(sample: ModelWarmup, number: int) -> str:
    """Return what people call the sample; `number` counts from 0."""
    return f"warm-up sample '{sample.name}'" if sample.name else f"warm-up sample {number + 1}"


def _tensor(
    name: str,
    given: ModelWarmup.Input,
    known: dict[str, ModelInput],
    folder: Path,
    rows: int | None,
) -> InferTensor:
    """Make one input, with a batch dimension of `rows` unless that is None."""
    wanted = known.get(name)
    if wanted is None:
        names = ", ".join(known) or "none"
        raise ConfigError(f"the model has no input '{name}' (its inputs: {names})")
    if given.data_type != wanted.data_type:
        raise ConfigError(
            f"input '{name}': data_type is {given.data_type.name}, "
            f"but the model's is {wanted.data_type.name}"
        )
    if any(extent < 0 for extent in given.dims):
        raise ConfigError(f"input '{name}': dims {given.dims} must have no -1: give a number")
    if not _fits(wanted.dims, given.dims):
        raise ConfigError(
            f"input '{name}': dims {given.dims} do not fit the model's {wanted.dims}"
            + ("" if rows is None else " (both are without the batch dimension)")
        )
    datatype = BY_NUMBER[given.data_type]
    row = _row(name, given, datatype, folder, rows or 1)
    shape = tuple(given.dims)
    if rows is None:
        return InferTensor(name, datatype.wire_name, shape, row)
    return InferTensor(name, datatype.wire_name, (rows, *shape), row * rows)


def _fits(wanted: list[int], given: list[int]) -> bool:
    return len(wanted) == len(given) and all(
        extent in (-1, own) for extent, own in zip(wanted, given)
    )


def _row(name: str, given: ModelWarmup.Input, datatype: DataType, folder: Path, rows: int) -> bytes:
    """Return the bytes of one row."""
    try:
        count = element_count(given.dims)
    except ActorserveError as error:
        raise ConfigError(f"input '{name}': {error.message}") from None
    # A string of no characters is its length alone.
    nbytes = count * (datatype.element_bytes or 4)
    if nbytes * rows > MOST_BYTES:
        raise ConfigError(f"input '{name}': {nbytes * rows} bytes are more than {MOST_BYTES}")
    if given.input_data_file is not None:
        return _from_file(name, given.input_data_file, datatype, folder, count)
    if given.random_data is not None:
        return _random(datatype, count)
    if given.zero_data is not None:
        return bytes(nbytes)
    raise ConfigError(f"input '{name}': expected zero_data, random_data or input_data_file")


def _random(datatype: DataType, count: int) -> bytes:
    """Return random elements, the same each time; strings are empty, as in the real server.

    Floating-point numbers are from 0 to 1: random bits would be NaN now and then.
    """
    generator = np.random.default_rng(SEED)
    if datatype == DataType.BYTES:
        return bytes(4 * count)
    if datatype == DataType.BOOL:
        return generator.integers(0, 2, count, np.uint8).tobytes()
    if datatype == DataType.BF16:
        # The upper half of an FP32 is the BF16 next to it.
        return (generator.random(count, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    if datatype in (DataType.FP16, DataType.FP32, DataType.FP64):
        return generator.random(count).astype(datatype.body_dtype).tobytes()
    return generator.bytes(count * datatype.element_bytes)


def _from_file(name: str, file: str, datatype: DataType, folder: Path, count: int) -> bytes:
    """Read a file of raw data, little-endian; strings each with their length before them."""
    where = f"input '{name}': input_data_file '{file}'"
    root = (folder / FOLDER).resolve()
    path = (root / file).resolve()
    if not file or root not in path.parents:
        raise ConfigError(f"{where} must name a file below '{folder / FOLDER}'")
    expected = count * datatype.element_bytes
    try:
        nbytes = path.stat().st_size
        if datatype != DataType.BYTES and nbytes != expected:
            raise ConfigError(f"{where} has {nbytes} bytes, but its dims need {expected}")
        if nbytes > MOST_BYTES:
            raise ConfigError(f"{where} has {nbytes} bytes, more than {MOST_BYTES}")
        body = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {path}: {error.strerror}") from None
    if datatype == DataType.BYTES:
        try:
            check_bytes(body, count)
        except ActorserveError as error:
            raise ConfigError(f"{where}: {error.message}") from None
    return body
