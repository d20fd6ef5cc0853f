# SPDX-License-Identifier: Apache-2.0
"""What is logged and how, over HTTP.

    GET  /v2/logging     {"log_file", "log_info", "log_warning", "log_error",
                          "log_verbose_level", "log_format"}
    POST /v2/logging     any of them but "log_file"; answers as GET

A change takes effect with the next line, and only if all of it is right. Who may ask is decided
before (`http_access.may_administer`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from actorserve.actors.server_log import LogSettings, ServerLog
from actorserve.config import OPTIONS
from actorserve.errors import InvalidArgument

LOGGING_PATH = b"/v2/logging"

_MOST_VERBOSE = 100
_FLAGS = ("log_info", "log_warning", "log_error")
_FORMATS = next(each.metavar for each in OPTIONS if each.field == "log_format").split("|")
_encode = msgspec.json.Encoder().encode


def show_log(log: ServerLog) -> bytes:
    """Return the settings as JSON."""
    return _encode(log.settings)


def change_log(log: ServerLog, body: bytes) -> None:
    """Change what a JSON object names. Raises InvalidArgument, and nothing is changed then."""
    try:
        wanted = msgspec.json.decode(body, type=dict[str, Any]) if body else {}
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"failed to parse the request JSON buffer: {error}") from None
    for name, value in wanted.items():
        _check(name, value)
    log.change(msgspec.structs.replace(log.settings, **wanted))


def _check(name: str, value: object) -> None:
    if name == "log_file":
        raise InvalidArgument("log file location can not be updated through network protocol")
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise InvalidArgument(f"'{name}' is true or false, got {value!r}")
    elif name == "log_verbose_level":
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not (is_number and 0 <= value <= _MOST_VERBOSE):  # type: ignore[operator]
            raise InvalidArgument(
                f"'{name}' is a whole number from 0 to {_MOST_VERBOSE}, got {value!r}"
            )
    elif name == "log_format":
        if value not in _FORMATS:
            raise InvalidArgument(f"'{name}' is one of {', '.join(_FORMATS)}, got {value!r}")
    else:
        known = ", ".join(LogSettings.__struct_fields__)
        raise InvalidArgument(f"there is no log setting '{name}', expected some of {known}")
