# SPDX-License-Identifier: Apache-2.0
"""A model's own parameters on requests and responses: checked, and turned into JSON text."""

from __future__ import annotations

import json

from actorserve.triton.error import TritonModelException


def parameters_json(parameters: object) -> str:
    """Return the JSON text of a dict of str to bool, int or str.

    Raises TritonModelException for anything else, in the words that models know, and for values
    that cannot travel.
    """
    if not isinstance(parameters, dict):
        raise TritonModelException(
            f"Expect parameters to be a dictionary or None, got {type(parameters)}"
        )
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(
                f"Expect parameters keys to have type str, found type {type(key)}"
            )
        if not isinstance(value, (bool, int, str)):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
        _check_travels(key, value)
    return json.dumps(parameters)


def _check_travels(key: str, value: bool | int | str) -> None:
    """Refuse what no client could read: text that is no Unicode, integers beyond 64 bits."""
    try:
        key.encode()
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise TritonModelException(
            f"Expect parameters to be text that UTF-8 can hold, found {key!r}: {value!r}"
        ) from None
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise TritonModelException(
            f"Expect parameters values to fit into 64 bits, found {key!r}: {value}"
        )
