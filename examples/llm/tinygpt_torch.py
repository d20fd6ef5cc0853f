# SPDX-License-Identifier: Apache-2.0
"""TinyGPT in PyTorch, to train it; the engine "tinygpt" runs it in numpy.

Matrices are [inputs, outputs] and named as the engine's files name them, so that a state here is
a file there. Each matrix may have an adapter of low rank beside it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

MATRICES = ("qkv", "out", "up", "down")


class TinyGpt(nn.Module):
    """A decoder whose head is its table of tokens."""

    def __init__(self, width: int, layers: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.shape = (width, layers, heads, context, vocabulary)
        self.heads = heads
        self.layers = layers
        self.adapters = nn.ParameterDict()
        self.weights = nn.ParameterDict()
        self._add_matrix("tokens", vocabulary, width)
        self._add_matrix("positions", context, width)
        self._add_norm("norm", width)
        for layer in range(layers):
            prefix = f"layer{layer}_"
            self._add_norm(f"{prefix}norm1", width)
            self._add_norm(f"{prefix}norm2", width)
            self._add_matrix(f"{prefix}qkv", width, 3 * width)
            self._add_matrix(f"{prefix}out", width, width)
            self._add_matrix(f"{prefix}up", width, 4 * width)
            self._add_matrix(f"{prefix}down", 4 * width, width)
            self.weights[f"{prefix}up_bias"] = nn.Parameter(torch.zeros(4 * width))
            self.weights[f"{prefix}down_bias"] = nn.Parameter(torch.zeros(width))

    def _add_matrix(self, name: str, inputs: int, outputs: int) -> None:
        self.weights[name] = nn.Parameter(torch.randn(inputs, outputs) * 0.02)

    def _add_norm(self, name: str, width: int) -> None:
        self.weights[f"{name}_gain"] = nn.Parameter(torch.ones(width))
        self.weights[f"{name}_bias"] = nn.Parameter(torch.zeros(width))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        gain, bias = self.weights[f"{name}_gain"], self.weights[f"{name}_bias"]
        return functional.layer_norm(x, gain.shape, gain, bias)

    def _times(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[name]
        if f"{name}_a" in self.adapters:
            y = y + x @ self.adapters[f"{name}_a"] @ self.adapters[f"{name}_b"]
        return y

    def _attend(self, prefix: str, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        parts = self._times(f"{prefix}qkv", self._norm(f"{prefix}norm1", x)).split(width, -1)
        q, k, v = (each.view(batch, count, self.heads, -1).transpose(1, 2) for each in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._times(f"{prefix}out", seen.transpose(1, 2).reshape(x.shape))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of every position of [batch, count] tokens."""
        x = self.weights["tokens"][tokens] + self.weights["positions"][: tokens.shape[1]]
        for layer in range(self.layers):
            prefix = f"layer{layer}_"
            x = x + self._attend(prefix, x)
            hidden = self._times(f"{prefix}up", self._norm(f"{prefix}norm2", x))
            hidden = functional.gelu(hidden + self.weights[f"{prefix}up_bias"], approximate="tanh")
            x = x + self._times(f"{prefix}down", hidden) + self.weights[f"{prefix}down_bias"]
        return self._norm("norm", x) @ self.weights["tokens"].T

    def loss(self, tokens: Tensor) -> Tensor:
        """Return nats a token, of [batch, count + 1] tokens each of which follows the last."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def add_adapters(self, rank: int) -> None:
        """Put an adapter beside each matrix, which changes nothing yet; freeze all else."""
        self.requires_grad_(False)
        for layer in range(self.layers):
            for matrix in MATRICES:
                name = f"layer{layer}_{matrix}"
                inputs, outputs = self.weights[name].shape
                a = torch.randn(inputs, rank) * inputs**-0.5
                self.adapters[f"{name}_a"] = nn.Parameter(a)
                self.adapters[f"{name}_b"] = nn.Parameter(torch.zeros(rank, outputs))


def to_arrays(parameters: nn.ParameterDict) -> dict[str, Any]:
    """Return parameters as the engine's files have them, in 16 bits."""
    return {
        name.replace("_", "."): each.detach().numpy().astype(np.float16)
        for name, each in parameters.items()
    }


def from_file(path: str) -> tuple[TinyGpt, list[tuple[int, int]]]:
    """Return the model of a file, and the joins of its tokenizer."""
    with np.load(path) as file:
        model = TinyGpt(*file["shape"].tolist())
        with torch.no_grad():
            for name, parameter in model.weights.items():
                array = file[name.replace("_", ".")].astype(np.float32)
                parameter.copy_(torch.from_numpy(array))
        return model, [(first, second) for first, second in file["joins"].tolist()]
