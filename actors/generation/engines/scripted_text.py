# SPDX-License-Identifier: Apache-2.0
"""A tokenizer without a vocabulary to load: one token a byte of UTF-8, and one for the end."""

from __future__ import annotations

from collections.abc import Sequence

from actorserve.errors import InvalidArgument

END = 256


class ByteTokenizer:
    """See the module's head."""

    end_id: int | None = END
    vocab_size = 257

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of tokens; the end gives none."""
        return bytes([token for token in tokens if token < END])

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Return a conversation as lines of "role: content", the last one open."""
        for message in messages:
            if message.get("role") not in ("system", "user", "assistant"):
                raise InvalidArgument(f"there is no role {message.get('role')!r}")
        lines = [f"{each['role']}: {each['content']}\n" for each in messages]
        return self.encode("".join([*lines, "assistant: "]))
