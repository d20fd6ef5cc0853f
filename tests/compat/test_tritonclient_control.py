# SPDX-License-Identifier: Apache-2.0
"""tritonclient's repository functions, as its users use them."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from tests.conftest import wait_until
from tests.server.conftest import repository, start_server  # noqa: F401 (fixtures)
from tests.server.harness import IDENTITY, MODEL_HEAD, write_model

pytest.importorskip("tritonclient")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    gevent = pytest.importorskip("gevent")
    http = pytest.importorskip("tritonclient.http")
    from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def client(start_server, repository):  # noqa: F811
    """Return a client of a server in explicit mode, with a model that is not loaded."""
    write_model(repository, "model")
    server = start_server(repository, "--model-control-mode=explicit")
    made = http.InferenceServerClient(server.address)
    yield made
    made.close()
    gevent.get_hub().destroy(destroy_loop=True)


def infer(client, name):
    """Return what a model makes of 1.5."""
    x = http.InferInput("INPUT0", [1], "FP32")
    x.set_data_from_numpy(np.array([1.5], np.float32))
    return client.infer(name, [x]).as_numpy("OUTPUT0").tolist()


def test_models_are_controlled(client):
    """Index, load, readiness, unload, overrides with files, and what goes wrong."""
    assert client.get_model_repository_index() == [{"name": "model"}]
    assert not client.is_model_ready("model")
    client.load_model("model")
    assert client.is_model_ready("model")
    assert infer(client, "model") == [1.5]
    ready = [{"name": "model", "version": "1", "state": "READY"}]
    assert client.get_model_repository_index() == ready
    config = client.get_model_config("model")
    body = MODEL_HEAD + IDENTITY.replace("as_numpy()", "as_numpy() + 1")
    config["name"] = "brought"
    client.load_model(
        "brought", config=json.dumps(config), files={"file:1/model.py": body.encode()}
    )
    assert infer(client, "brought") == [2.5]
    client.load_model("model", config=json.dumps({**config, "name": "model"}))
    client.unload_model("model", unload_dependents=True)
    assert not client.is_model_ready("model")
    wait_until(lambda: client.get_model_repository_index()[1].get("reason") == "unloaded")
    with pytest.raises(InferenceServerException, match="failed to poll from model repository"):
        client.load_model("nobody")
    with pytest.raises(InferenceServerException, match="Invalid config override"):
        client.load_model("model", config="{")
    with pytest.raises(InferenceServerException):
        infer(client, "model")
