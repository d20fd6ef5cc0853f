# SPDX-License-Identifier: Apache-2.0
"""A door behind which a model speaks: "w0 w1 w2 …", a word a token, as the prompt orders.

    "say 3"     three words, then it stops        "wait"       nothing, until it is cancelled
    "fail 3"    three words, then an error        "full"       the queue has no room
    "down"      no stub is there                  "gone 3"     three words, and the time is over
    "long"      each word has 4 KiB               "wrong"      the model's own InvalidArgument

Anything else: as many words as may be. A word is sent with each turn of the loop, at most WINDOW of
them before they are taken.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from actorserve.errors import InternalError, InvalidArgument, Unavailable
from actorserve.state.backlog import FULL_MESSAGE
from actorserve.triton.generation_tensors import GENERATION, INPUTS
from actorserve.triton.inference import (
    IndexEntry,
    InferRequest,
    InferResponse,
    InferTensor,
    ModelInfo,
    TensorSpec,
)
from actorserve.triton.request_validation import InputRule, RequestRules
from actorserve.wire.tensors import BY_NUMBER, BY_WIRE_NAME, decode_bytes, encode_bytes
from tests.unit.frontend.conftest import MODELS, FakeDoor, FakeInFlight

WINDOW = 8

_SPECS = tuple(
    TensorSpec(each.name, BY_NUMBER[each.data_type].wire_name, each.dims, True) for each in INPUTS
)
INFO = ModelInfo("words", "1", ("1",), GENERATION, 0, True, _SPECS, ())
RULES = RequestRules(
    "words",
    0,
    [InputRule(each.name, BY_WIRE_NAME[each.datatype], each.shape, True) for each in _SPECS],
    [*("text_output", "index", "finish_reason", "prompt_tokens", "completion_tokens")]
    + ["top_logprobs", "output_ids"],
)


def read_inputs(request: InferRequest) -> dict[str, Any]:
    """Return the inputs of a request as plain values, and its parameters."""
    found: dict[str, Any] = dict(request.parameters)
    for tensor in request.inputs:
        assert isinstance(tensor.data, bytes)
        if tensor.datatype == "BYTES":
            values = [each.decode() for each in decode_bytes(tensor.data)]
        else:
            values = np.frombuffer(tensor.data, BY_WIRE_NAME[tensor.datatype].body_dtype).tolist()
        is_list = tensor.name in ("input_ids", "stop_words", "bad_words")
        found[tensor.name] = values if is_list else values[0]
    return found


class Speech(FakeInFlight):
    """One request to the model."""

    def __init__(
        self, door: LanguageDoor, request: InferRequest, on_response: Callable[..., None]
    ) -> None:
        super().__init__(door, request, on_response)
        self.inputs = read_inputs(request)
        self.sent = 0
        self._door = door
        given = self.inputs
        if "messages" in given:
            prompt = json.loads(given["messages"])[-1]["content"]
        else:
            prompt = given.get("text_input", "tokens")
        order, _, count = prompt.partition(" ")
        self.order, self._prompt = order, prompt
        limit = given.get("max_tokens", 4)
        self._words = min(int(count), limit) if count.isdigit() else limit
        self._finish = "stop" if order == "say" and int(count) <= limit else "length"
        self._finish = "timeout" if order == "gone" else self._finish
        sequences = range(given.get("n", 1))
        self._left = deque([(index, word) for word in range(self._words) for index in sequences])
        self._texts: dict[int, list[str]] = {index: [] for index in sequences}
        if order != "wait":
            self._next()

    def consumed(self, count: int = 1) -> None:
        """Note what was taken, and go on."""
        super().consumed(count)
        if self.sent - self.taken + count == WINDOW:
            self._next()

    def _next(self) -> None:
        assert self._door.loop is not None
        self._door.loop.call_soon(self._step)

    def _step(self) -> None:
        if self.is_gone:
            return
        if not self._left and self.order == "fail":
            self._send([], True, InternalError("the engine has lost the thread"))
            return
        index, word = self._left.popleft()
        text = f"w{word} " + "." * (4096 if self.order == "long" else 0)
        if word == 0 and not self.inputs.get("exclude_input_in_output", True):
            text = f"{self._prompt}{text}"
        is_last = word == self._words - 1 and self.order != "fail"
        finish = self._finish if is_last else ""
        if self.inputs["stream"]:
            self._send(self._outputs(index, text, word, finish), is_last and not self._left)
        else:
            self._texts[index].append(text)
            if is_last:
                whole = "".join(self._texts[index])
                self._send(self._outputs(index, whole, word, finish), not self._left)
        if (self._left or self.order == "fail") and self.sent - self.taken < WINDOW:
            self._next()

    def _outputs(self, index: int, text: str, word: int, finish: str) -> list[InferTensor]:
        outputs = [_text("text_output", text), _number("index", index)]
        outputs.append(_text("finish_reason", finish))
        if finish:
            outputs.append(_number("prompt_tokens", len(self._prompt.split())))
            outputs.append(_number("completion_tokens", word + 1))
        if self.inputs.get("return_log_probs"):
            first = word if self.inputs["stream"] else 0
            most = self.inputs["num_logprobs"]
            told = [_told(each, most) for each in range(first, word + 1)]
            outputs.append(_text("top_logprobs", json.dumps(told)))
        return outputs

    def _send(
        self, outputs: list[InferTensor], final: bool, error: Exception | None = None
    ) -> None:
        assert self.on_response is not None and self.request is not None
        self.sent += 1
        response = InferResponse("words", "1", self.request.id, outputs, final=final)
        response.error = error  # type: ignore[assignment]
        self.on_response(response)


def _told(word: int, most: int) -> dict[str, Any]:
    text = f"w{word} "
    own = {"id": word, "token": text, "bytes": list(text.encode()), "logprob": -0.5}
    others = [own, {"id": 9, "token": "no", "bytes": [110, 111], "logprob": None}]
    return {**own, "top_logprobs": others[:most]}


def _text(name: str, text: str) -> InferTensor:
    return InferTensor(name, "BYTES", (1,), memoryview(encode_bytes([text])))


def _number(name: str, number: int) -> InferTensor:
    return InferTensor(name, "INT32", (1,), memoryview(np.array([number], "<i4").tobytes()))


class _Control:
    async def index(self, *, is_ready: bool = False) -> list[IndexEntry]:
        """Return every model, in all its versions."""
        await asyncio.sleep(0)
        assert is_ready
        names = [*MODELS, "words", "words"]
        return [IndexEntry(name, str(at), "READY") for at, name in enumerate(names)]


class LanguageDoor(FakeDoor):
    """The models of the other tests, none of which speaks, and "words"."""

    def __init__(self) -> None:
        super().__init__()
        self.speeches: list[Speech] = []
        self.control = _Control()

    def model_info(self, name: str, version: str = "") -> ModelInfo:
        """Describe a model."""
        if name == "loading":
            raise Unavailable("model 'loading' is not ready", 3.4)
        return INFO if name == "words" else super().model_info(name, version)

    def submit(
        self, request: InferRequest, on_response: Callable[[InferResponse], None]
    ) -> FakeInFlight:
        """Let the model speak."""
        if request.model_name != "words":
            return super().submit(request, on_response)
        RULES.check(request)
        prompt = read_inputs(request).get("text_input", "")
        if prompt == "full":
            raise Unavailable(FULL_MESSAGE, retry_after_s=1.0)
        if prompt == "down":
            raise Unavailable("no stub is there", retry_after_s=2.5)
        if prompt == "wrong":
            raise InvalidArgument("the prompt is wrong")
        self.speeches.append(Speech(self, request, on_response))
        return self.speeches[-1]
