# SPDX-License-Identifier: Apache-2.0
"""Train a LoRA adapter of TinyGPT on a text: needs torch.

    python examples/llm/train_adapter.py --out zen.npz           half a minute on two cores

Without --text the text is the Zen of Python, which the standard library has in its module `this`.
A request with the adapter then goes on as the text does; one without it is not changed.
"""

import argparse
import codecs
import contextlib
import io
from pathlib import Path

import torch
from tinygpt_torch import from_file, to_arrays
from train_tinygpt import say, train

from actorserve.actors.generation.engines.bpe import BytePairTokenizer
from actorserve.actors.generation.engines.lora import write_lora
from actorserve.actors.generation.engines.tinygpt import BUNDLED

PEAK_RATE = 1e-2  # few weights bear more of it than many


def main() -> None:
    """Train, write the adapter, and let the engine say something with it and without."""
    options = _options()
    torch.manual_seed(0)
    text = Path(options.text).read_text() if options.text else zen()
    model, joins = from_file(options.weights)
    model.add_adapters(options.rank)
    tokens = BytePairTokenizer(joins).encode(text)
    train(model, torch.tensor(tokens * 2), options.steps, batch=8, peak=PEAK_RATE)
    arrays = to_arrays(model.adapters)
    names = sorted({name.rpartition(".")[0] for name in arrays})
    write_lora(options.out, {name: (arrays[f"{name}.a"], arrays[f"{name}.b"]) for name in names})
    prompt = text[:24]
    print("without:", say(options.weights, prompt))
    print("with:", say(options.weights, prompt, options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the file to write, .npz")
    parser.add_argument("--text", default="", help="the file to learn from")
    parser.add_argument("--weights", default=str(BUNDLED), help="the model's file")
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400)
    return parser.parse_args()


def zen() -> str:
    """Return the Zen of Python; its module prints it when it is imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return codecs.decode(this.s, "rot13")


if __name__ == "__main__":
    main()
