# SPDX-License-Identifier: Apache-2.0
"""What crosses a process: messages, tensors and their codec. May import only the base modules."""
