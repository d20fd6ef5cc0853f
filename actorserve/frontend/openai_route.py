# SPDX-License-Identifier: Apache-2.0
"""The paths of OpenAI's API. Imports nothing, as http_route.py."""

from __future__ import annotations

PREFIX = b"/v1/"

ACTIONS = {b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}
"""The paths that generate: by POST, and never through the ASGI application."""
