# SPDX-License-Identifier: Apache-2.0
"""Stands on a stub's sys.path, so that the interpreters that a model starts find the API too."""

import sys

from actorserve.triton import pb_utils

sys.modules[__name__] = pb_utils
