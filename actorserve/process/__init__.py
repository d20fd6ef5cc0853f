# SPDX-License-Identifier: Apache-2.0
"""Processes: the zygote, spawning, the boot socket, exits, guards and watching."""
