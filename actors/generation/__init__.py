# SPDX-License-Identifier: Apache-2.0
"""The generation executor: an engine's tokens as futures and streams.

executor   submit ─► GenerationResult     any thread, any loop
             │             ▲
             ▼ requests    │ outputs
pump        add ─► poll ───┘              a thread here, or ranks in processes of their own
engine

A stranger needs the names below; what is not listed is not for users.
"""
