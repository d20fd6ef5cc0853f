# SPDX-License-Identifier: Apache-2.0
"""Adapter files, and what they add to a product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engine import RequestError
from actorserve.actors.generation.engines.decoder import Batch
from actorserve.actors.generation.engines.lora import add_adapters, read_lora, write_lora

SHAPES = {"layer0.up": (4, 6), "layer0.down": (6, 4)}


def _pair(inputs: int = 4, outputs: int = 6, rank: int = 2) -> Any:
    random = np.random.default_rng(0)
    return (
        random.normal(size=(inputs, rank)).astype(np.float32),
        random.normal(size=(rank, outputs)).astype(np.float32),
    )


def test_a_written_adapter_is_read(tmp_path: Path) -> None:
    """The scale is multiplied into it."""
    a, b = _pair()
    write_lora(tmp_path / "one.npz", {"layer0.up": (a, b)}, scale=0.5)
    lora = read_lora(str(tmp_path / "one.npz"), SHAPES)
    assert list(lora) == ["layer0.up"]
    np.testing.assert_allclose(lora["layer0.up"][0], a)
    np.testing.assert_allclose(lora["layer0.up"][1], b * 0.5)


def test_rows_get_what_their_adapter_adds() -> None:
    """Others keep the product as it is; a matrix that an adapter has not is left alone."""
    a, b = _pair()
    x = np.ones((3, 4), np.float32)
    y = np.zeros((3, 6), np.float32)
    nothing = np.zeros(3, np.int64)
    batch = Batch(nothing, nothing, nothing, 3, adapters=[({"m": (a, b)}, np.array([0, 2]))])
    add_adapters(batch, "other", x, y)
    assert not y.any()
    add_adapters(batch, "m", x, y)
    np.testing.assert_allclose(y[[0, 2]], np.ones((2, 4)) @ a @ b, rtol=1e-5)
    assert not y[1].any()


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, "changes nothing"),
        ({"layer9.up.a": _pair()[0], "layer9.up.b": _pair()[1]}, "'layer9.up', which this model"),
        ({"layer0.up.a": _pair()[0]}, "layer0.up has no b"),
        ({"layer0.up.b": _pair()[1]}, "layer0.up has no a"),
        ({"layer0.up.a": _pair(5)[0], "layer0.up.b": _pair()[1]}, r"expected \[4, rank\]"),
        ({"layer0.up.a": _pair()[0], "layer0.up.b": _pair(rank=3)[1]}, r"\[rank, 6\]"),
        ({"layer0.up.a": np.ones(4), "layer0.up.b": _pair()[1]}, "the shapes"),
        ({"scale": np.ones(2)}, "scale has the shape"),
        (
            {"layer0.up.a": _pair()[0], "layer0.up.b": _pair()[1], "layer0.up.c": np.ones(1)},
            "no meaning",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, arrays: dict[str, Any], text: str
) -> None:
    """The error names the file, the matrix, and what was expected."""
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(RequestError, match=text) as caught:
        read_lora(str(tmp_path / "bad.npz"), SHAPES)
    assert "bad.npz" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a file of arrays", b"PK\x03\x04 cut"])
def test_files_that_are_none_are_refused(tmp_path: Path, content: bytes) -> None:
    """A broken file is that request's mistake; nothing in it is unpickled."""
    (tmp_path / "broken.npz").write_bytes(content)
    for path in ("broken.npz", "missing.npz", "."):
        with pytest.raises(RequestError, match="cannot be read"):
            read_lora(str(tmp_path / path), SHAPES)
