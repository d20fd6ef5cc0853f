# SPDX-License-Identifier: Apache-2.0
"""The framework: channels now; actors, references and mailboxes build on them."""
