# SPDX-License-Identifier: Apache-2.0
"""Stands on a stub's sys.path, so that the interpreters that a model starts find the API too."""

import sys

from actorserve.triton import c_names

sys.modules[__name__] = c_names
