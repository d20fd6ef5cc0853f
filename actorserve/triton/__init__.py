# SPDX-License-Identifier: Apache-2.0
"""What a Triton Python model imports, and the model configuration."""
