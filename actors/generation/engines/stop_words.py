# SPDX-License-Identifier: Apache-2.0
"""Find words made of tokens in a stream of tokens, one token at a time.

Serves stop words, of which a stream must hold back what may still become one, and bad words, of
which the last token must never be chosen. One automaton (Aho and Corasick) finds all words of a
request at once: its state is an int, the longest end of the stream that begins some word.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["WordAutomaton"]


class WordAutomaton:
    """All words of one request. Immutable; a stream's state is an int that its owner keeps."""

    START = 0

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._ends: list[tuple[int, ...]] = [()]
        self._completing: list[tuple[int, ...]] = [()]
        self.lengths = [len(word) for word in words]
        for index, word in enumerate(words):
            self._insert(index, word)
        self._link()

    def _insert(self, index: int, word: Sequence[int]) -> None:
        state = self.START
        for token in word:
            following = self._children[state].get(token)
            if following is None:
                following = len(self._children)
                self._children[state][token] = following
                self._children.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._ends.append(())
                self._completing.append(())
            state = following
        if not self._ends[state]:  # of two equal words the first one counts
            self._ends[state] = (index,)

    def _link(self) -> None:
        """Lead each state to the longest shorter one that is an end of it; collect what ends."""
        waiting = deque([self.START])
        while waiting:
            state = waiting.popleft()
            fallback = self._fail[state]
            if state != self.START:
                self._ends[state] += self._ends[fallback]
            own = [token for token, child in self._children[state].items() if self._ends[child]]
            inherited = self._completing[fallback] if state != self.START else ()
            self._completing[state] = tuple(dict.fromkeys((*own, *inherited)))
            for token, child in self._children[state].items():
                if state != self.START:
                    self._fail[child] = self.advance(fallback, token)
                waiting.append(child)

    def advance(self, state: int, token: int) -> int:
        """Return the state after one more token."""
        while state and token not in self._children[state]:
            state = self._fail[state]
        return self._children[state].get(token, self.START)

    def ended(self, state: int) -> tuple[int, ...]:
        """Return the words (by index, longest first) that the last token completed."""
        return self._ends[state]

    def pending(self, state: int) -> int:
        """Return how many of the last tokens may be the beginning of a word."""
        return self._depth[state]

    def completing(self, state: int) -> tuple[int, ...]:
        """Return the tokens that would complete a word."""
        return self._completing[state]
