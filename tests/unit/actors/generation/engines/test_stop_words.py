# SPDX-License-Identifier: Apache-2.0
"""Words of tokens in a stream."""

from __future__ import annotations

import random

from actorserve.actors.generation.engines.stop_words import WordAutomaton


def _states(words: list[list[int]], stream: list[int]) -> list[int]:
    automaton = WordAutomaton(words)
    states, state = [], WordAutomaton.START
    for token in stream:
        state = automaton.advance(state, token)
        states.append(state)
    return states


def test_it_agrees_with_looking_at_every_end_of_the_stream() -> None:
    """Ended words, pending tokens and completing tokens are those that a search by hand finds."""
    random.seed(5)
    for _ in range(200):
        words = [
            [random.randrange(3) for _ in range(random.randint(1, 4))]
            for _ in range(random.randint(1, 5))
        ]
        automaton = WordAutomaton(words)
        stream = [random.randrange(3) for _ in range(12)]
        for end, state in enumerate(_states(words, stream), 1):
            seen = stream[:end]
            ended = {tuple(word) for word in words if seen[-len(word) :] == word}
            assert {tuple(words[index]) for index in automaton.ended(state)} == ended
            heads = [word[:size] for word in words for size in range(1, len(word) + 1)]
            pending = max((len(head) for head in heads if seen[-len(head) :] == head), default=0)
            assert automaton.pending(state) == pending
            completing = {
                word[-1]
                for word in words
                if (seen[len(seen) - len(word) + 1 :] == word[:-1]) and len(seen) >= len(word) - 1
            }
            assert set(automaton.completing(state)) == completing


def test_of_several_words_the_longest_comes_first() -> None:
    """The one that takes the most of the stream decides."""
    words = [[2], [1, 2], [0, 1, 2]]
    automaton = WordAutomaton(words)
    assert automaton.ended(_states(words, [0, 1, 2])[-1]) == (2, 1, 0)


def test_of_equal_words_the_first_counts() -> None:
    """The index that a client gets is that of the first one."""
    automaton = WordAutomaton([[7], [7]])
    assert automaton.ended(automaton.advance(WordAutomaton.START, 7)) == (0,)
