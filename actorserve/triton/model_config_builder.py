# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`: the configuration that a model completes in `auto_complete_config`.

What the configuration says already, a model may repeat but not change; what it leaves open is
filled in. Every refusal is a ValueError in the words that the real server uses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_INPUT_KEYS = ("name", "data_type", "dims", "optional")
_OUTPUT_KEYS = ("name", "data_type", "dims")


class ModelConfig:
    """A configuration to complete; every setter raises ValueError where it contradicts it."""

    def __init__(self, model_config: str) -> None:
        """Read the configuration's JSON text."""
        self._model_config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration itself, not a copy."""
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch, which must not be below what the configuration says."""
        given = self._model_config.get("max_batch_size", 0)
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config "
                f"function for model '{self._name()}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Turn dynamic batching on, unless another kind of scheduling is configured."""
        for choice in ("sequence_batching", "ensemble_scheduling"):
            if choice in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{choice}', but "
                    f"auto-complete-config function for model '{self._name()}' tries to set "
                    "scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set `{"decoupled": bool}`, the only property there is."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    "model transaction property in auto-complete-config function for model "
                    f"'{self._name()}' contains property other than 'decoupled'."
                )
        if "decoupled" not in transaction_policy_dict:
            return
        wanted = transaction_policy_dict["decoupled"]
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if policy.setdefault("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model "
                f"'{self._name()}', which is already set to '{policy['decoupled']}'."
            )

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input (`name`, `data_type`, `dims` and, if wanted, `optional`), or complete it."""
        self._check_keys("input", input, _INPUT_KEYS, "'name', 'data_type', 'dims' and 'optional'")
        self._add("input", input)

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output (`name`, `data_type` and `dims`), or complete it."""
        self._check_keys("output", output, _OUTPUT_KEYS, "'name', 'data_type' and 'dims'")
        self._add("output", output)

    def _name(self) -> str:
        return str(self._model_config.get("name", ""))

    def _check_keys(
        self, kind: str, entry: Mapping[str, Any], allowed: tuple[str, ...], listed: str
    ) -> None:
        where = f"in auto-complete-config function for model '{self._name()}'"
        if "name" not in entry:
            raise ValueError(f"{kind} {where} is missing 'name' property.")
        for key in entry:
            if key not in allowed:
                raise ValueError(
                    f"{kind} '{entry['name']}' {where} contains property other than {listed}."
                )
        for key in ("data_type", "dims"):
            if key not in entry:
                raise ValueError(f"{kind} '{entry['name']}' {where} is missing '{key}' property.")

    def _add(self, kind: str, entry: Mapping[str, Any]) -> None:
        entries = self._model_config.setdefault(kind, [])
        for existing in entries:
            if existing.get("name") == entry["name"]:
                self._complete(kind, existing, entry)
                return
        added = {"name": entry["name"], "data_type": entry["data_type"], "dims": entry["dims"]}
        if "optional" in entry:
            added["optional"] = entry["optional"]
        entries.append(added)

    def _complete(self, kind: str, existing: dict[str, Any], entry: Mapping[str, Any]) -> None:
        """Fill in what the configuration leaves open, after a check of what it says."""
        name = self._name()
        given_type = existing.get("data_type", "TYPE_INVALID")
        if given_type not in ("TYPE_INVALID", entry["data_type"]):
            raise ValueError(
                f"unable to load model '{name}', configuration expects datatype {given_type} for "
                f"{kind} '{entry['name']}', model provides {entry['data_type']}"
            )
        given_dims = existing.get("dims") or []
        if given_dims and list(given_dims) != list(entry["dims"]):
            raise ValueError(
                f"model '{name}', tensor '{entry['name']}': the model expects dims "
                f"{list(entry['dims'])} but the model configuration specifies dims "
                f"{list(given_dims)}"
            )
        if "optional" in entry and existing.get("optional", entry["optional"]) != entry["optional"]:
            raise ValueError(
                f"model '{name}', tensor '{entry['name']}': the model expects optional "
                f"{entry['optional']} but the model configuration specifies optional "
                f"{existing['optional']}"
            )
        existing.update(entry)
