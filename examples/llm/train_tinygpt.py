# SPDX-License-Identifier: Apache-2.0
"""Train TinyGPT on the documentation that comes with Python: needs torch, and no download.

    python examples/llm/train_tinygpt.py --out tinygpt.npz       about five minutes on two cores

The file has everything that the engine needs: `EngineSpec("tinygpt", {"weights": "tinygpt.npz"})`.
The same seed and number of steps give the same model on the same machine.
"""

import argparse
import math
import pydoc_data.topics
import time

import numpy as np
import torch
from tinygpt_torch import TinyGpt, to_arrays

from actorserve.actors.generation.engine import GenRequest, Sampling
from actorserve.actors.generation.engines.bpe import BytePairTokenizer, learn_joins
from actorserve.actors.generation.engines.tinygpt import TinyGPT

HELD_OUT = 0.05  # of the text, to measure with
PEAK_RATE = 2e-3
WARM_UP_STEPS = 50


def main() -> None:
    """Learn the tokenizer, train, write the file, and let the engine say something."""
    options = _options()
    torch.manual_seed(options.seed)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    joins = learn_joins(text.encode(), options.vocabulary)
    tokenizer = BytePairTokenizer(joins)
    tokens = torch.tensor(tokenizer.encode(text))
    bytes_per_token = len(text.encode()) / len(tokens)
    print(f"{len(tokens)} tokens of {bytes_per_token:.2f} bytes", flush=True)
    model = TinyGpt(
        options.width, options.layers, options.heads, options.context, tokenizer.vocab_size
    )
    border = int(len(tokens) * (1 - HELD_OUT))
    train(model, tokens[:border], options.steps, options.batch)
    nats = measure(model, tokens[border:])
    print(f"held out: {nats:.3f} nats a token, {nats / bytes_per_token:.3f} a byte")
    np.savez_compressed(
        options.out,
        shape=np.array(model.shape, np.int32),
        joins=np.array(joins, np.uint16),
        **to_arrays(model.weights),
    )
    print(say(options.out, "The for statement is used to "))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the file to write, .npz")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="tokens")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens")
    return parser.parse_args()


def pieces(tokens: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """Return pieces of a text from places taken at random."""
    starts = torch.randint(len(tokens) - length, (count, 1))
    return tokens[starts + torch.arange(length)]


def rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: a short rise, then half a cosine down to a twentieth."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    return peak * rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    model: TinyGpt, tokens: torch.Tensor, steps: int, batch: int, peak: float = PEAK_RATE
) -> None:
    """Train in place."""
    trainable = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trainable, betas=(0.9, 0.95), weight_decay=0.1)
    context = min(model.shape[3], len(tokens) - 2)
    started_s = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, peak)
        loss = model.loss(pieces(tokens, batch, context + 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started_s
            print(f"step {step + 1}: {loss.item():.3f} nats, {seconds:.0f} s", flush=True)


@torch.inference_mode()
def measure(model: TinyGpt, tokens: torch.Tensor, batches: int = 8) -> float:
    """Return nats a token on a text."""
    context = model.shape[3]
    losses = [model.loss(pieces(tokens, 16, context + 1)).item() for _ in range(batches)]
    return sum(losses) / batches


def say(weights: str, prompt: str, adapter: str = "") -> str:
    """Return what the engine says with a file of weights, and an adapter if one is named."""
    engine = TinyGPT(slots=1, weights=weights)
    engine.start(0, None)
    tokenizer = TinyGPT.tokenizer({"weights": weights})
    if adapter:
        engine.load_adapter(1, adapter)
    tokens = tokenizer.encode(prompt)
    engine.add(GenRequest(1, tokens, Sampling(max_tokens=60), adapter=1 if adapter else 0))
    is_over = False
    while not is_over:
        for output in engine.poll(0.0):
            tokens += output.tokens
            is_over = is_over or output.final
    return tokenizer.decode_bytes(tokens).decode(errors="replace")


if __name__ == "__main__":
    main()
