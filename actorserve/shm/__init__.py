# SPDX-License-Identifier: Apache-2.0
"""Shared memory: segments, lanes, doorbells, arenas, the health page."""
