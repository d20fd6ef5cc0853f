# SPDX-License-Identifier: Apache-2.0
"""The backend "generation": an engine behind the model API, for entries without a model.py."""
