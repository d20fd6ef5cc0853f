# SPDX-License-Identifier: Apache-2.0
"""The llama architecture: against the same model written out for one sequence, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.engines.decoder import Batch, Span
from actorserve.actors.generation.engines.gguf_file import GgufFile
from actorserve.actors.generation.engines.llama_model import LlamaModel
from actorserve.errors import InvalidArgument
from tests.unit.actors.generation.engines.gguf_maker import (
    HEADS,
    KV_HEADS,
    LAYERS,
    WIDTH,
    floats,
    gguf_bytes,
    llama_metadata,
    llama_weights,
    write_llama,
)

Doubles = npt.NDArray[np.float64]
SIZE = WIDTH // HEADS
TOKENS = [5, 77, 31, 200, 9, 14, 150, 3, 88]


def _norm(x: Doubles, factors: Any) -> Doubles:
    return np.asarray(x / np.sqrt((x * x).mean() + 1e-5) * factors)


def _turned(head: Doubles, position: int) -> Doubles:
    """Turn neighbouring pairs of a head by angles that grow with the position."""
    out = head.copy()
    for pair in range(SIZE // 2):
        angle = position * 1000.0 ** (-2 * pair / SIZE)
        a, b = head[2 * pair], head[2 * pair + 1]
        out[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
        out[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
    return out


def _plain(weights: dict[str, Any], tokens: list[int]) -> Doubles:
    """Return the logits behind each token, computed without any batch, cache or joined matrix."""
    w = {name.removesuffix(".weight"): each.astype(np.float64) for name, each in weights.items()}
    keys: list[list[Doubles]] = [[] for _ in range(LAYERS)]
    values: list[list[Doubles]] = [[] for _ in range(LAYERS)]
    out = []
    for position, token in enumerate(tokens):
        x = w["token_embd"][token].copy()
        for layer in range(LAYERS):
            part = {
                name.split(".", 2)[2]: each
                for name, each in w.items()
                if name.startswith(f"blk.{layer}.")
            }
            h = _norm(x, part["attn_norm"])
            q = (part["attn_q"] @ h).reshape(HEADS, SIZE)
            k = (part["attn_k"] @ h).reshape(KV_HEADS, SIZE)
            keys[layer].append(np.stack([_turned(head, position) for head in k]))
            values[layer].append((part["attn_v"] @ h).reshape(KV_HEADS, SIZE))
            seen = []
            for head in range(HEADS):
                of = head // (HEADS // KV_HEADS)
                turned = _turned(q[head], position)
                scores = np.array([turned @ key[of] for key in keys[layer]]) / np.sqrt(SIZE)
                share = np.exp(scores - scores.max())
                share /= share.sum()
                seen.append(sum(s * v[of] for s, v in zip(share, values[layer])))
            x = x + part["attn_output"] @ np.concatenate(seen)
            h = _norm(x, part["ffn_norm"])
            gate = part["ffn_gate"] @ h
            x = x + part["ffn_down"] @ (gate / (1 + np.exp(-gate)) * (part["ffn_up"] @ h))
        out.append(w.get("output", w["token_embd"]) @ _norm(x, w["output_norm"]))
    return np.array(out)


def _model(folder: Path, slots: int = 4, **options: Any) -> LlamaModel:
    model = LlamaModel(GgufFile(write_llama(folder / "m.gguf", **options)))
    model.allocate(slots)
    return model


def _prompt(tokens: list[int], slot: int = 0, wanted: Any = None) -> Batch:
    count = len(tokens)
    return Batch(
        np.array(tokens),
        np.arange(count),
        np.full(count, slot),
        0,
        [Span(slot, 0, count, 0)],
        wanted,
    )


@pytest.mark.parametrize("own_head", [False, True])
def test_logits_are_those_of_the_plain_model(tmp_path: Path, own_head: bool) -> None:
    """A prompt at once gives what the written-out model gives, with a tied head and without."""
    expected = _plain(llama_weights(own_head=own_head), TOKENS)
    logits = _model(tmp_path, own_head=own_head).forward(_prompt(TOKENS))
    assert np.allclose(logits, expected, rtol=1e-3, atol=1e-3)


def test_prompts_in_pieces_and_tokens_one_by_one_give_the_same(tmp_path: Path) -> None:
    """Sequences of different lengths share batches, and none changes another's logits."""
    model = _model(tmp_path)
    others = TOKENS[::-1]
    expected, other = _plain(llama_weights(), TOKENS), _plain(llama_weights(), others)
    model.forward(_prompt(TOKENS[:4], 2))
    first = Batch(
        np.array([TOKENS[4], *others[:3]]),
        np.array([4, 0, 1, 2]),
        np.array([2, 1, 1, 1]),
        1,
        [Span(1, 1, 3, 0)],
        np.array([0, 3]),
    )
    logits = model.forward(first)
    assert np.allclose(logits, [expected[4], other[2]], rtol=1e-3, atol=1e-3)
    for step in range(4):
        rows = Batch(
            np.array([others[3 + step], TOKENS[5 + step]]),
            np.array([3 + step, 5 + step]),
            np.array([1, 2]),
            2,
        )
        both = [other[3 + step], expected[5 + step]]
        assert np.allclose(model.forward(rows), both, rtol=1e-3, atol=1e-3)


def test_a_copied_slot_goes_on_by_itself(tmp_path: Path) -> None:
    """A copy continues like the original, from as many positions as were copied."""
    model = _model(tmp_path)
    model.forward(_prompt(TOKENS[:6], 3))
    model.copy_slot(3, 0, 4)
    row = Batch(np.array([TOKENS[4]]), np.array([4]), np.array([0]), 1)
    assert np.allclose(model.forward(row)[0], _plain(llama_weights(), TOKENS)[4], atol=1e-3)


def test_a_gate_far_below_zero_warns_of_nothing(tmp_path: Path) -> None:
    """Where the exponential of a gate overflows, its share is nought, and no warning comes."""
    weights = llama_weights()
    for layer in range(LAYERS):
        weights[f"blk.{layer}.ffn_gate.weight"] *= 1e4
    tensors = {name: floats(each) for name, each in weights.items()}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(llama_metadata(), tensors))
    model = LlamaModel(GgufFile(path))
    model.allocate(1)
    assert np.isfinite(model.forward(_prompt(TOKENS))).all()


def test_the_context_may_be_shorter_than_the_model_knows(tmp_path: Path) -> None:
    """An option makes slots smaller, never longer than the model was made for."""
    file = GgufFile(write_llama(tmp_path / "m.gguf"))
    lengths = [LlamaModel(file, context_tokens=n).context_tokens for n in (0, 10, 1000)]
    assert lengths == [64, 10, 64]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"general.architecture": "mamba"}, "'mamba'; this engine runs 'llama'"),
        ({"llama.attention.head_count": 3}, "do not fit"),
        ({"llama.attention.head_count_kv": 3}, "do not fit"),
        ({"llama.rope.dimension_count": 2}, "rotates 2 of 4"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn'"),
        ({"llama.feed_forward_length": 23}, r"expected \[23, 16\]"),
        ({"llama.block_count": 1}, "9 tensors that no plain llama"),
        ({"llama.block_count": 3}, r"blk\.2.* is missing"),
        ({"llama.embedding_length": "x"}, "no usable 'llama.embedding_length'"),
    ],
)
def test_a_model_that_would_run_wrongly_is_refused(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    """Other architectures, variants and sizes are errors at load, not wrong words later."""
    with pytest.raises(InvalidArgument, match=expected):
        _model(tmp_path, **change)


def test_adapters_are_refused_as_a_request_is(tmp_path: Path) -> None:
    """A LoRA adapter is an error of whoever asked, with the model's name."""
    with pytest.raises(RequestError, match="tiny"):
        _model(tmp_path).load_adapter("x.npz")


def test_a_model_without_memory_says_so(tmp_path: Path) -> None:
    """Running before allocate() is refused."""
    model = LlamaModel(GgufFile(write_llama(tmp_path / "m.gguf")))
    with pytest.raises(InvalidArgument, match="allocate"):
        model.forward(_prompt(TOKENS))
