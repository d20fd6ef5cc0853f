# SPDX-License-Identifier: Apache-2.0
"""Device memory drivers and slabs (none yet)."""
