# SPDX-License-Identifier: Apache-2.0
"""A model's own parameters on requests and responses: checked, and turned into JSON text."""

from __future__ import annotations

import json

from actorserve.triton.error import TritonModelException


def parameters_json(parameters: object) -> str:
    """Return the JSON text of a dict of str to bool, int or str.

    Raises TritonModelException for anything else, in the words that models know.
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
    return json.dumps(parameters)
