# SPDX-License-Identifier: Apache-2.0
"""The trace that a request belongs to, to be handed on to the requests that it causes."""

from __future__ import annotations


class InferenceTrace:
    """A trace; this version records none."""

    __slots__ = ("__weakref__",)

    def get_context(self) -> str | None:
        """Return the trace's context as JSON, or None where nothing is traced."""
        return None
