# SPDX-License-Identifier: Apache-2.0
"""The classes whose objects only the server makes; this version makes none.

Their names are there because models annotate with them and test with `isinstance`.
"""

from __future__ import annotations


class InferenceResponseSender:
    """Sends a request's responses one by one."""

    def __init__(self) -> None:
        raise TypeError("InferenceResponseSender: objects come from get_response_sender() only")


class ResponseIterator:
    """Iterates over the responses of a decoupled model."""

    def __init__(self) -> None:
        raise TypeError("ResponseIterator: objects come from exec(decoupled=True) only")
