# SPDX-License-Identifier: Apache-2.0
"""The engine "tinygpt": a GPT of half a million weights that has read the Python documentation.

Small enough to come with the package and quick enough for tests, and yet a real model: its own
tokens, key-value cache, adapters, and as many ranks as divide its four heads. Its weights
lie beside it; they were learnt from what `pydoc` says of the language, as
examples/llm/train_tinygpt.py learns them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from actorserve.actors.generation.engine import Tokenizer, World
from actorserve.actors.generation.engines.array_file import read_arrays
from actorserve.actors.generation.engines.batching import BatchEngine
from actorserve.actors.generation.engines.bpe import BytePairTokenizer
from actorserve.actors.generation.engines.tinygpt_model import TinyGptModel, TinyGptShape
from actorserve.errors import InvalidArgument

__all__ = ["TinyGPT"]

BUNDLED = Path(__file__).parent / "weights" / "tinygpt.npz"


class TinyGPT(BatchEngine):
    """Options: `slots`, `chunk_tokens`, and `weights`, a file of examples/llm/train_tinygpt.py."""

    has_adapters = True

    def __init__(self, *, slots: int = 32, chunk_tokens: int = 128, weights: str = "") -> None:
        super().__init__(slots=slots, chunk_tokens=chunk_tokens)
        self._path = _path_of(weights)

    def load_model(self, rank: int, world: World | None) -> TinyGptModel:
        """Read the weights; every rank keeps its part of them."""
        weights = _read(self._path, lambda name: name != "joins", needed={"shape", "tokens"})
        sizes = weights.pop("shape").tolist()
        if len(sizes) != len(fields(TinyGptShape)):
            raise InvalidArgument(f"tinygpt: weights {str(self._path)!r} have the sizes {sizes}")
        shape = TinyGptShape(*sizes)
        return TinyGptModel(shape, weights, rank, world)

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        """Return the tokenizer that was learnt with the weights."""
        path = _path_of(options.get("weights", ""))
        joins = _read(path, lambda name: name == "joins", needed={"joins"})["joins"]
        return BytePairTokenizer([(first, second) for first, second in joins.tolist()])


def _path_of(weights: str) -> Path:
    return Path(weights) if weights else BUNDLED


def _read(path: Path, wanted: Callable[[str], bool], needed: set[str]) -> dict[str, Any]:
    try:
        arrays = read_arrays(path, wanted)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"tinygpt: weights {str(path)!r} cannot be read: {error}") from error
    missing = sorted(needed - arrays.keys())
    if missing:
        raise InvalidArgument(f"tinygpt: weights {str(path)!r} lack {', '.join(missing)}")
    return arrays
