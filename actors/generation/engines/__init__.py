# SPDX-License-Identifier: Apache-2.0
"""The engines that come with the package; `registry` finds them, and others', by name."""
