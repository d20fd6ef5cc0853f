# SPDX-License-Identifier: Apache-2.0
"""Writes GGUF files: any, and that of a tiny llama model with a small vocabulary of bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from actorserve.actors.generation.engines.gguf_file import TENSOR_TYPES

F32 = 0
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, CONTEXT = 2, 16, 4, 2, 24, 64


class MadeTensor(NamedTuple):
    """A tensor to be written: `shape` has the rows first."""

    number: int
    shape: tuple[int, ...]
    data: bytes


def floats(array: npt.NDArray[Any]) -> MadeTensor:
    """Return a tensor of F32."""
    return MadeTensor(F32, array.shape, array.astype("<f4").tobytes())


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """Return the type and the bytes of a value."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_value(item) for item in value]
    kind = items[0][:4] if items else struct.pack("<I", 4)
    return (
        struct.pack("<I", 9)
        + kind
        + struct.pack("<Q", len(items))
        + b"".join(item[4:] for item in items)
    )


def gguf_bytes(metadata: dict[str, Any], tensors: dict[str, MadeTensor], version: int = 3) -> bytes:
    """Return a whole file."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    data = b""
    for name, (number, shape, content) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", number, len(data))
        data += content + bytes(-len(content) % 32)
    return head + bytes(-len(head) % 32) + data


def letters() -> list[str]:
    """Return the letters of all bytes, in the order that such vocabularies have them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return [*map(chr, printable), *(chr(256 + number) for number in range(len(hidden)))]


def vocabulary(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a tokenizer: three marks, all bytes, and what five merges make."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens = [*MARKS, *letters(), *(merge.replace(" ", "") for merge in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(MARKS) + [1] * (len(tokens) - len(MARKS)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
        **changes,
    }


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a tiny model."""
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.embedding_length": WIDTH,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.feed_forward_length": HIDDEN,
        "llama.context_length": CONTEXT,
        "llama.rope.freq_base": 1000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **vocabulary(),
        **changes,
    }


def llama_weights(seed: int = 1, own_head: bool = False) -> dict[str, npt.NDArray[np.float32]]:
    """Return the weights of a tiny model, by their names, [outputs, inputs]."""
    rng = np.random.default_rng(seed)
    kv_width = WIDTH // HEADS * KV_HEADS
    tokens = len(vocabulary()["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (tokens, WIDTH), "output_norm": (WIDTH,)}
    if own_head:
        shapes["output"] = (tokens, WIDTH)
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (WIDTH,),
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (kv_width, WIDTH),
            f"blk.{layer}.attn_v": (kv_width, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_norm": (WIDTH,),
            f"blk.{layer}.ffn_gate": (HIDDEN, WIDTH),
            f"blk.{layer}.ffn_up": (HIDDEN, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, HIDDEN),
        }
    return {
        f"{name}.weight": (rng.standard_normal(shape) * 0.6).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_llama(path: Path, *, seed: int = 1, own_head: bool = False, **changes: Any) -> str:
    """Write a tiny model; `changes` are entries of its metadata. Returns the path."""
    tensors = {name: floats(each) for name, each in llama_weights(seed, own_head).items()}
    path.write_bytes(gguf_bytes(llama_metadata(**changes), tensors))
    return str(path)


def block_bytes(name: str) -> int:
    """Return the bytes of a block of a type of tensor."""
    return next(each.nbytes for each in TENSOR_TYPES.values() if each.name == name)
