# SPDX-License-Identifier: Apache-2.0
"""One invariant: whatever flat JSON a client sends, it becomes tensors that are what they say, or
an InvalidArgument; and whatever a model answers becomes one line of JSON, or an error.

Seeded: `ACTORSERVE_FUZZ_SEED` and `ACTORSERVE_FUZZ_ROUNDS` choose another run and a longer one.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

from actorserve.errors import InternalError, InvalidArgument
from actorserve.frontend.v2_generate import GenerateEncoder, event, parse_generate
from actorserve.triton.inference import InferResponse, InferTensor, ModelInfo, TensorSpec
from actorserve.wire.tensors import BY_WIRE_NAME, DataType, check_bytes, element_count

SEED = int(os.environ.get("ACTORSERVE_FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("ACTORSERVE_FUZZ_ROUNDS", "4000"))
KINDS = [kind.wire_name for kind in DataType if kind]
NAMES = ["A", "B", "id", "parameters", "timeout", "sequence_id", "triton_x", "binary_data_output"]
LIMIT = 2000


def any_model(dice: random.Random) -> ModelInfo:
    """Make a model with some inputs."""
    batch = dice.choice([0, 0, 8])
    specs = []
    for name in dice.sample(NAMES[:4], dice.choice([0, 1, 2, 2, 3])):
        dims = tuple(dice.choice([-1, 1, 2, 3]) for _ in range(dice.choice([0, 1, 1, 1, 2, 3])))
        kind = dice.choice([*KINDS, "BYTES", "BYTES", "INT32", "FP32"])
        specs.append(TensorSpec(name, kind, ((-1,) if batch else ()) + dims))
    return ModelInfo("m", "1", ("1",), "python", batch, True, tuple(specs), ())


def any_value(dice: random.Random, depth: int = 0) -> Any:
    """Make a JSON value."""
    kind = dice.random()
    if kind < 0.25 and depth < 3:
        return [any_value(dice, depth + 1) for _ in range(dice.choice([0, 1, 2, 3, 6]))]
    if kind < 0.3 and depth < 3:
        return {dice.choice(NAMES): any_value(dice, depth + 1) for _ in range(2)}
    plain: list[Any] = [0, 1, -1, 255, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, 1e39, -0.0]
    plain += [True, False, None, "", "a", "é" * 50, "\\n\\n", "\x00", "\ud800", "x" * 3000]
    value = dice.choice(plain)
    many: list[Any] = [value] * dice.choice([1, 2, 3, 4, 6, 400])
    return many if dice.random() < 0.3 and depth < 3 else value


def any_document(dice: random.Random) -> bytes:
    """Make a document, sometimes a broken one."""
    whole = {dice.choice(NAMES): any_value(dice) for _ in range(dice.choice([0, 1, 2, 3, 5]))}
    if dice.random() < 0.3:
        whole["parameters"] = {dice.choice(NAMES): any_value(dice) for _ in range(2)}
    text = bytearray(json.dumps(whole, ensure_ascii=dice.random() < 0.5).encode(errors="replace"))
    while dice.random() < 0.2 and text:
        at = dice.randrange(len(text))
        text[at : at + dice.choice([0, 1, 5])] = dice.randbytes(dice.choice([0, 1, 1, 3]))
    return bytes(text)


def test_any_document_is_tensors_or_an_error() -> None:
    """Each body has exactly the elements of its shape, and all of them stay below the limit."""
    dice = random.Random(SEED)
    accepted = 0
    for number in range(ROUNDS):
        model, document = any_model(dice), any_document(dice)
        try:
            request = parse_generate(document, model, "", LIMIT)
        except InvalidArgument as error:
            assert error.message, number
            continue
        accepted += 1
        given = [tensor.name for tensor in request.inputs]
        assert len(set(given)) == len(given), document
        assert sum(len(tensor.data) for tensor in request.inputs) <= LIMIT
        for tensor in request.inputs:
            spec = next(spec for spec in model.inputs if spec.name == tensor.name)
            assert len(tensor.shape) == len(spec.shape)
            kind, count = BY_WIRE_NAME[tensor.datatype], element_count(tensor.shape)
            if kind is DataType.BYTES:
                check_bytes(tensor.data, count)
            else:
                assert len(tensor.data) == count * kind.element_bytes, document
    assert accepted > ROUNDS // 20


def test_any_response_is_one_line_of_json_or_an_error() -> None:
    """With its members in the order of their names."""
    dice = random.Random(SEED)
    encoder = GenerateEncoder(strict_json=True)
    encoded = 0
    for number in range(ROUNDS):
        outputs = []
        for _ in range(dice.choice([0, 1, 1, 2, 3])):
            size = dice.choice([0, 1, 4, 4, 8, 8, 16, 64])
            shape = tuple(dice.choice([0, 1, 1, 2, 4]) for _ in range(dice.choice([0, 1, 1, 2])))
            name = dice.choice([*NAMES, '"', "\n", "", "model_name"])
            kind = dice.choice([*KINDS, "NONE"])
            outputs.append(InferTensor(name, kind, shape, memoryview(dice.randbytes(size))))
        parameters: dict[str, Any] = {}
        if dice.random() < 0.3:
            parameters = {dice.choice(NAMES): dice.choice([1, True, 0.5, "a\n\n"])}
        response = InferResponse("m", "1", dice.choice(["", "7"]), outputs, parameters)
        try:
            text = event(encoder.encode(response))
        except (InvalidArgument, InternalError):
            continue
        encoded += 1
        assert text.startswith(b"data: {"), number
        assert text.endswith(b"}\n\n"), number
        assert text.count(b"\n") == 2, number
        members = list(json.loads(text[6:]))
        assert members == sorted(members)
        assert {"model_name", "model_version"} <= set(members)
    assert encoded > ROUNDS // 20
