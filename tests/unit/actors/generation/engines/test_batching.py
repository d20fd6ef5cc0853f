# SPDX-License-Identifier: Apache-2.0
"""The batching engine over a model that can be computed by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from actorserve.actors.generation.engine import RequestError
from actorserve.errors import AlreadyExists, InvalidArgument
from tests.unit.actors.generation.engines.toy import (
    CONTEXT,
    VOCABULARY,
    Client,
    generate,
    request,
    run,
    started,
    toy_logits,
)


def _greedy(prompt: list[int], count: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(toy_logits(prompt + tokens).argmax()))
    return tokens


def _logprobs(history: list[int]) -> Any:
    logits = toy_logits(history).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def test_greedy_is_the_most_probable_token_each_time() -> None:
    """One token an iteration, each streamed, "length" at the end."""
    answer = generate(started(), [3, 1, 4], max_tokens=9)
    assert answer.tokens == _greedy([3, 1, 4], 9)
    assert answer.finish == "length" and answer.stop_reason is None
    assert answer.deltas == [[token] for token in answer.tokens]


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_prompts_in_chunks_give_the_same(chunk: int) -> None:
    """However many iterations a prompt takes, alone or while others answer."""
    prompts = [[1, 2, 3], list(range(11)), [7] * 20]
    engine = started(chunk_tokens=chunk)
    client = run(engine, *(request(i, prompts[i], max_tokens=6) for i in range(3)))
    assert [client.answers[i][0].tokens for i in range(3)] == [_greedy(p, 6) for p in prompts]
    assert all(sum(s.count for s in batch.spans) <= chunk for batch in engine.model.batches)


def _random_request(number: int, seed: int) -> Any:
    chance = random.Random(seed)
    settings: dict[str, Any] = {"max_tokens": chance.randint(1, 14), "seed": seed}
    if chance.random() < 0.7:
        settings["temperature"] = chance.choice([0.5, 1.0, 2.0])
    for name, values in {
        "top_k": [3, 8],
        "top_p": [0.5, 0.9],
        "repetition_penalty": [1.3],
        "presence_penalty": [0.5],
        "no_repeat_ngram_size": [2, 3],
        "stop_words": [[[2, 3]], [[5], [1, 7]]],
        "bad_words": [[[4]], [[6, 1], [2]]],
        "logit_bias": [{3: 1.5}],
        "logprobs": [0, 3],
        "end_id": [0],
        "min_tokens": [1],
    }.items():
        if chance.random() < 0.3:
            settings[name] = chance.choice(values)
    width = chance.choice([1, 1, 1, 2, 3])
    if chance.random() < 0.3:
        settings |= {"beam_width": width, "n": min(2, width)}
    else:
        settings |= {"best_of": width, "n": chance.randint(1, width)}
    prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 20))]
    return request(number, prompt, stream=chance.random() < 0.7, **settings)


def test_a_request_alone_is_the_same_as_among_others() -> None:
    """Whatever is asked for, and whoever comes and goes beside it; nothing is left behind."""
    engine = started(slots=6, chunk_tokens=7)
    together, crowd = Client(), [_random_request(i, i) for i in range(120)]
    waiting = list(crowd)
    while len(together.over) < len(crowd):
        for _ in range(min(3, len(waiting))):
            engine.add(waiting.pop())
        together.take(engine.poll(0.0))
    for single in crowd:
        alone = run(started(slots=6), single)
        assert alone.answers[single.id].keys() == together.answers[single.id].keys()
        for index, answer in alone.answers[single.id].items():
            other = together.answers[single.id][index]
            assert (answer.tokens, answer.finish) == (other.tokens, other.finish), single
            assert answer.stop_reason == other.stop_reason
            assert answer.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-3)
    assert engine.capacity()[0] == 6 and engine.stats()["kv_tokens_used"] == 0


def test_without_streaming_an_answer_comes_at_once() -> None:
    """One output at the end, with everything."""
    answer = generate(started(), [1], max_tokens=5, stream=False)
    assert answer.deltas == [_greedy([1], 5)]


def test_requests_beyond_the_slots_wait_in_order() -> None:
    """The capacity says 0 then; each gets its turn."""
    engine = started(slots=2)
    for number in range(5):
        engine.add(request(number, [number], max_tokens=3))
    assert engine.capacity() == (0, 0)
    client = Client()
    while len(client.over) < 5:
        client.take(engine.poll(0.0))
    assert client.over == [0, 1, 2, 3, 4]
    assert engine.poll(0.0) == []
    assert engine.capacity()[0] == 2


def test_answers_end_with_the_context() -> None:
    """The last token that has a place in memory may have one successor."""
    prompt = [1] * (CONTEXT - 2)
    answer = generate(started(), prompt, max_tokens=50)
    assert answer.tokens == _greedy(prompt, 3) and answer.finish == "length"
    assert len(generate(started(), [1] * CONTEXT, max_tokens=50).tokens) == 1


# --- ends ----------------------------------------------------------------------------------------


def test_the_end_id_ends_and_is_cut() -> None:
    """It is the reason; with `include_stop` it stays."""
    tokens = _greedy([2], 12)
    end = tokens[4]
    first = tokens.index(end)
    answer = generate(started(), [2], max_tokens=12, end_id=end)
    assert (answer.tokens, answer.finish, answer.stop_reason) == (tokens[:first], "stop", end)
    answer = generate(started(), [2], max_tokens=12, end_id=end, include_stop=True)
    assert answer.tokens == tokens[: first + 1]


def test_stop_words_are_never_seen() -> None:
    """A beginning is held back until it is decided; the whole word is cut with its logprobs."""
    tokens = _greedy([2], 12)
    word = tokens[4:7]
    words = [[99 % VOCABULARY, 98 % VOCABULARY, 1, 1], word, [*tokens[1:3], (tokens[3] + 1) % 13]]
    answer = generate(started(), [2], max_tokens=12, stop_words=words, logprobs=0)
    assert (answer.tokens, answer.finish, answer.stop_reason) == (tokens[:4], "stop", 1)
    assert [pairs[0][0] for pairs in answer.logprobs] == tokens[:4]
    assert answer.cum_logprob == pytest.approx(sum(pairs[0][1] for pairs in answer.logprobs))
    assert tokens[1:4] in answer.deltas, "what was held back came when it was decided"
    answer = generate(started(), [2], max_tokens=12, stop_words=words, include_stop=True)
    assert answer.tokens == tokens[:7]


def test_what_is_held_back_comes_at_the_end() -> None:
    """The beginning of a stop word that never came is part of the answer."""
    tokens = _greedy([2], 6)
    words = [[*tokens[4:6], 1, 2, 3]]
    answer = generate(started(), [2], max_tokens=6, stop_words=words)
    assert answer.tokens == tokens and answer.finish == "length"
    assert answer.deltas[-1] == tokens[4:6]


def test_nothing_ends_before_min_tokens() -> None:
    """The end id cannot come, and a stop word is no stop, until so many tokens are there."""
    tokens = _greedy([2], 12)
    word = [tokens[2]]
    later = generate(started(), [2], max_tokens=12, min_tokens=5, stop_words=[word])
    assert later.tokens[:5] == tokens[:5]
    end = tokens[1]
    forced = generate(started(), [2], max_tokens=12, min_tokens=4, end_id=end)
    assert end not in forced.tokens[:4] and len(forced.tokens) >= 4


def test_if_every_token_is_forbidden_that_request_fails() -> None:
    """Its error says so; the others go on."""
    bias = dict.fromkeys(range(VOCABULARY), float("-inf"))
    client = run(
        started(),
        request(1, [1], max_tokens=4, logit_bias=bias, temperature=1.0),
        request(2, [1], max_tokens=4, logit_bias=bias, beam_width=2),
        request(3, [1], max_tokens=4),
    )
    for number in (1, 2):
        answer = client.answers[number][0]
        assert answer.finish == "error" and answer.error == "every token is forbidden"
    assert client.answers[3][0].tokens == _greedy([1], 4)


# --- several answers, and what is told beside tokens ---------------------------------------------


def test_n_answers_have_seeds_of_their_own() -> None:
    """The first is that of n = 1; each finishes; one output is final."""
    settings: dict[str, Any] = {"max_tokens": 8, "temperature": 2.0, "seed": 4}
    several = run(started(), request(1, [1], n=3, **settings)).answers[1]
    assert several[0].tokens == generate(started(), [1], **settings).tokens
    assert len({tuple(answer.tokens) for answer in several.values()}) == 3
    assert [several[i].finish for i in range(3)] == ["length"] * 3


def test_best_of_returns_the_most_probable() -> None:
    """All are generated, the best n come at the end, best first."""
    settings: dict[str, Any] = {"max_tokens": 6, "temperature": 2.0, "seed": 4, "logprobs": 0}
    everything = run(started(), request(1, [1], n=5, best_of=5, **settings)).answers[1]
    ranked = sorted(everything.values(), key=lambda answer: -(answer.cum_logprob or 0))
    best = run(started(), request(1, [1], n=2, best_of=5, **settings)).answers[1]
    assert [best[i].tokens for i in range(2)] == [answer.tokens for answer in ranked[:2]]
    assert len(best) == 2 and len(best[0].deltas) == 1


def test_an_open_seed_is_different_each_time() -> None:
    """Neither two requests of one engine nor two engines agree."""
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 5.0}
    client = run(started(), request(1, [1], **settings), request(2, [1], **settings))
    answers = [client.answers[1][0], client.answers[2][0], generate(started(), [1], **settings)]
    assert len({tuple(answer.tokens) for answer in answers}) == 3


def test_logprobs_are_those_of_the_model() -> None:
    """Before bias and temperature; the chosen one first, then the most probable."""
    answer = generate(started(), [2], max_tokens=5, logprobs=2, logit_bias={7: 4.0}, seed=1)
    for index, pairs in enumerate(answer.logprobs):
        expected = _logprobs([2, *answer.tokens[:index]])
        assert [token for token, _ in pairs] == [
            answer.tokens[index],
            *np.argsort(-expected, kind="stable")[:2],
        ]
        assert [value for _, value in pairs] == pytest.approx(
            [expected[token] for token, _ in pairs], abs=1e-4
        )
    assert answer.cum_logprob == pytest.approx(sum(p[0][1] for p in answer.logprobs))


@pytest.mark.parametrize("stream", [True, False])
def test_logits_are_given_on_request(stream: bool) -> None:
    """Those of the prompt, and those of the tokens that are kept."""
    prompt, tokens = [2, 4, 6, 8], _greedy([2, 4, 6, 8], 6)
    answer = generate(
        started(chunk_tokens=3),
        prompt,
        max_tokens=6,
        stream=stream,
        context_logits=True,
        generation_logits=True,
        stop_words=[tokens[4:6]],
    )
    context = [toy_logits(prompt[: end + 1]) for end in range(4)]
    np.testing.assert_array_equal(answer.arrays["context_logits"], context)
    generated = [toy_logits(prompt + tokens[:end]) for end in range(4)]
    np.testing.assert_array_equal(answer.arrays["generation_logits"], generated)


# --- aborts --------------------------------------------------------------------------------------


def test_abort_ends_a_request_wherever_it_is() -> None:
    """Waiting, in its prompt, answering: one final "cancelled" each, and the slots are free."""
    engine = started(slots=3, chunk_tokens=4)
    engine.add(request(1, [1], max_tokens=30, n=2))
    engine.add(request(2, [1] * 30, max_tokens=30))
    engine.add(request(3, [1], max_tokens=30))
    client = Client()
    client.take(engine.poll(0.0))
    client.take(engine.poll(0.0))
    engine.abort([1, 2, 3, 99])
    assert engine.capacity()[0] == 3
    client.take(engine.poll(0.0))
    assert sorted(client.over) == [1, 2, 3]
    assert client.answers[1][0].tokens == client.answers[1][1].tokens == _greedy([1], 2)
    finishes = {answer.finish for each in client.answers.values() for answer in each.values()}
    assert finishes == {"cancelled"}
    engine.abort([1, 2, 3])
    assert engine.poll(0.0) == []


def test_abort_gives_out_what_was_held_back() -> None:
    """Of a beam search its best beams, of a request that does not stream what it has."""
    engine = started()
    engine.add(request(1, [1], max_tokens=30, stream=False))
    engine.add(request(2, [1], max_tokens=30, beam_width=3, n=2, stream=False))
    engine.add(request(3, [1], max_tokens=30, best_of=3, n=1, temperature=1.0))
    client = Client()
    for _ in range(3):
        client.take(engine.poll(0.0))
    engine.abort([1, 2, 3])
    client.take(engine.poll(0.0))
    assert client.answers[1][0].tokens == _greedy([1], 3)
    assert [len(client.answers[2][i].tokens) for i in range(2)] == [3, 3]
    assert len(client.answers[3][0].tokens) == 3
    assert sorted(client.over) == [1, 2, 3]


# --- adapters, events, statistics ----------------------------------------------------------------


def test_adapters_touch_their_own_requests_alone() -> None:
    """In prompts and answers, mixed with others in one batch."""
    engine = started()
    engine.load_adapter(1, "100")
    engine.load_adapter(2, "-100")
    client = run(
        engine,
        request(1, [3], max_tokens=5, adapter=1),
        request(2, [3], max_tokens=5),
        request(3, [3], max_tokens=5, adapter=2),
    )
    assert client.answers[1][0].tokens == [5] * 5
    assert client.answers[2][0].tokens == _greedy([3], 5)
    assert 5 not in client.answers[3][0].tokens
    assert engine.call("adapters") == [1, 2]
    engine.unload_adapter(1)
    engine.unload_adapter(7)
    with pytest.raises(RequestError, match="adapter: 1 is not loaded"):
        engine.add(request(4, [1], adapter=1))


def test_adapters_that_cannot_be_loaded_change_nothing() -> None:
    """An unreadable file, a number that is taken, the number of the bare model."""
    engine = started()
    engine.load_adapter(1, "1")
    with pytest.raises(RequestError, match="cannot be read"):
        engine.load_adapter(2, "nothing")
    with pytest.raises(AlreadyExists, match="unload it first"):
        engine.load_adapter(1, "2")
    with pytest.raises(RequestError, match="0 is the bare model"):
        engine.load_adapter(0, "1")
    assert engine.call("adapters") == [1]
    with pytest.raises(InvalidArgument, match="no call 'sing'"):
        engine.call("sing")


def test_events_tell_what_happens_to_slots() -> None:
    """Allocated, stored, copied, freed; each slot that is taken is given back."""
    engine = started(slots=2, chunk_tokens=2)
    run(engine, request(7, [1, 2, 3], max_tokens=2, n=2))
    assert engine.kv_events() == [
        ("allocated", 0, 7),
        ("allocated", 1, 7),
        ("stored", 0, 7, 0, 2),
        ("stored", 0, 7, 2, 1),
        ("copied", 0, 1, 3),
        ("freed", 0, 7, 4),
        ("freed", 1, 7, 4),
    ]
    assert engine.kv_events() == []


def test_stats_say_what_is_in_use() -> None:
    """After the first iteration the prompt is in memory."""
    engine = started(slots=4)
    engine.add(request(1, [1, 2, 3], max_tokens=5))
    engine.poll(0.0)
    stats = engine.stats()
    assert stats["slots_used"] == 1 and stats["slots"] == 4
    assert stats["kv_tokens_used"] == 3 and stats["kv_tokens"] == 4 * CONTEXT
    assert stats["prompt_rows"] == 3 and stats["decode_rows"] == 0


@pytest.mark.parametrize("option", ["slots", "chunk_tokens"])
def test_options_are_looked_at(option: str) -> None:
    """Nothing runs without a slot."""
    with pytest.raises(InvalidArgument, match=option):
        started(**{option: 0})


def test_a_closed_engine_takes_nothing() -> None:
    """Closing drops all requests."""
    engine = started()
    engine.add(request(1, [1]))
    engine.close()
    with pytest.raises(InvalidArgument, match="closed"):
        engine.add(request(2, [1]))
    assert engine.poll(0.0) == []
