# SPDX-License-Identifier: Apache-2.0
"""The generation executor: an engine's tokens as futures and streams.

    executor   submit ─► GenerationResult     any thread, any loop
                 │             ▲
                 ▼ requests    │ outputs
    pump        add ─► poll ───┘              a thread here, or ranks in processes of their own
    engine

A stranger needs the names below; what is not listed is not for users. They are looked up on first
use, so that a rank does not pay for what only its parent needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "CompletionOutput": "actorserve.actors.generation.output",
    "Engine": "actorserve.actors.generation.engine",
    "EngineDeadError": "actorserve.errors",
    "EngineInfo": "actorserve.actors.generation.engine",
    "EngineSpec": "actorserve.actors.generation.spec",
    "ExecutorConfig": "actorserve.actors.generation.spec",
    "GenRequest": "actorserve.actors.generation.engine",
    "GenerationExecutor": "actorserve.actors.generation.executor",
    "GenerationRequest": "actorserve.actors.generation.request",
    "GenerationResult": "actorserve.actors.generation.result",
    "LoRARequest": "actorserve.actors.generation.request",
    "Output": "actorserve.actors.generation.engine",
    "RequestError": "actorserve.actors.generation.engine",
    "Sampling": "actorserve.actors.generation.engine",
    "SamplingParams": "actorserve.actors.generation.sampling_params",
    "Tokenizer": "actorserve.actors.generation.engine",
    "World": "actorserve.actors.generation.engine",
}
__all__ = [*_PUBLIC]  # noqa: PLE0604 (the keys are strings)

if TYPE_CHECKING:
    from actorserve.actors.generation.engine import Engine as Engine
    from actorserve.actors.generation.engine import EngineInfo as EngineInfo
    from actorserve.actors.generation.engine import GenRequest as GenRequest
    from actorserve.actors.generation.engine import Output as Output
    from actorserve.actors.generation.engine import RequestError as RequestError
    from actorserve.actors.generation.engine import Sampling as Sampling
    from actorserve.actors.generation.engine import Tokenizer as Tokenizer
    from actorserve.actors.generation.engine import World as World
    from actorserve.actors.generation.executor import GenerationExecutor as GenerationExecutor
    from actorserve.actors.generation.output import CompletionOutput as CompletionOutput
    from actorserve.actors.generation.request import GenerationRequest as GenerationRequest
    from actorserve.actors.generation.request import LoRARequest as LoRARequest
    from actorserve.actors.generation.result import GenerationResult as GenerationResult
    from actorserve.actors.generation.sampling_params import SamplingParams as SamplingParams
    from actorserve.actors.generation.spec import EngineSpec as EngineSpec
    from actorserve.actors.generation.spec import ExecutorConfig as ExecutorConfig
    from actorserve.errors import EngineDeadError as EngineDeadError


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
