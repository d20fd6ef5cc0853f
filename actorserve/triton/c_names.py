# SPDX-License-Identifier: Apache-2.0
"""The module that models import as `c_python_backend_utils`: what is native in the real server."""

from __future__ import annotations

from actorserve.triton.error import TritonError, TritonModelException
from actorserve.triton.logger import Logger, LogLevel
from actorserve.triton.memory import MemoryType, PreferredMemory
from actorserve.triton.metric import Metric, MetricFamily, MetricKind
from actorserve.triton.model_control import (
    get_model_dir,
    is_model_ready,
    load_model,
    unload_model,
)
from actorserve.triton.request import InferenceRequest
from actorserve.triton.response import InferenceResponse
from actorserve.triton.response_iterator import ResponseIterator
from actorserve.triton.response_sender import InferenceResponseSender
from actorserve.triton.shared_memory import SharedMemory, shared_memory
from actorserve.triton.tensor import Tensor
from actorserve.triton.trace import InferenceTrace

TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU

__all__ = [
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "SharedMemory",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "get_model_dir",
    "is_model_ready",
    "load_model",
    "shared_memory",
    "unload_model",
]
