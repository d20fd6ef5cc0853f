# SPDX-License-Identifier: Apache-2.0
"""Pure state machines: supervision, request life cycle, batching, health. No I/O, no clock."""
