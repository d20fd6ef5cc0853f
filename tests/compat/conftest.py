# SPDX-License-Identifier: Apache-2.0
"""A server of the examples and of some more models, for clients that others wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.harness import EXAMPLES, IDENTITY, Launcher, Server, write_model

CONFIG = """\
backend: "python"
input [ {{ name: "INPUT0" data_type: TYPE_{0} dims: [ -1 ] }} ]
output [ {{ name: "OUTPUT0" data_type: TYPE_{0} dims: [ -1 ] }} ]
"""
FAILS = """
class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("the model says no", pb_utils.TritonError.UNSUPPORTED)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return the server; it is up until the last test of this folder."""
    repository = tmp_path_factory.mktemp("repository")
    for kind in ("FP32", "FP16", "INT64", "STRING", "BOOL"):
        write_model(repository, f"identity_{kind.lower()}", IDENTITY, CONFIG.format(kind))
    write_model(repository, "fails", FAILS, CONFIG.format("FP32"))
    versions = CONFIG.format("FP32") + "version_policy { all {} }"
    write_model(repository, "versions", IDENTITY, versions, (1, 2))
    launcher = Launcher(tmp_path_factory.mktemp("server"))
    yield launcher(EXAMPLES, repository)
    launcher.stop_all()
