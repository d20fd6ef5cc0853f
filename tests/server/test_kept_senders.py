# SPDX-License-Identifier: Apache-2.0
"""What becomes of senders that a model keeps when the model is taken out of service."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from actorserve.errors import Unavailable
from tests.server.calling_models import until
from tests.server.script_models import Heard, ScriptServer, served

GRACE_S = 0.4


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptServer]:
    """Return a server of script models that gives them little time."""
    yield from served(tmp_path_factory.mktemp("kept"), exit_timeout_s=GRACE_S)


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """Replace the look after each test: the server is looked at when it ends."""


KEEP = "kept.__dict__.setdefault('senders', []).append(request.get_response_sender())"


@pytest.mark.parametrize("model", ["plain", "stream"])
def test_an_unload_does_not_wait_for_ever(server, caplog, model):
    """The client hears why, and the log says so."""
    caplog.set_level(logging.WARNING, "actorserve")

    async def main():
        heard = Heard()
        server.submit(model, KEEP, heard)
        await server.server.unload(model)
        await until(heard.ended.is_set)
        return heard.values

    (error,) = server.run(main())
    assert isinstance(error, Unavailable)
    assert f"model '{model}' version 1 is taken out of service" in error.message
    assert f"sent nothing for {GRACE_S} s" in error.message
    assert "requests=1 whose response senders are kept" in caplog.text
    assert f"'{model}' version 1" in caplog.text


def test_a_sender_that_goes_on_is_waited_for(server):
    """As long as something comes; so is what execute has in its hands."""
    code = f"""
        def run(sender):
            for n in range(20):
                threading.Event().wait({GRACE_S / 5})
                sender.send(answer([n]))
            sender.send(flags=FINAL)
        start(run, request.get_response_sender())
        """
    busy = f"threading.Event().wait({3 * GRACE_S})\nresult = [answer([1])]"

    async def main():
        streamed, answered = Heard(reads=True), Heard()
        server.submit("stream", code, streamed)
        server.submit("plain", busy, answered)
        await server.server.unload("stream")
        await server.server.unload("plain")
        await until(lambda: streamed.ended.is_set() and answered.ended.is_set())
        return streamed.values, answered.values

    streamed, answered = server.run(main())
    assert streamed == [*range(20), ""]
    assert answered == [1]


def test_an_instance_that_leaves_does_not_wait_for_a_client_that_is_gone(server):
    """The model has fewer instances now; the one that goes has a sender of nobody's."""
    config = server.folder / "deep" / "config.pbtxt"

    def leaving() -> int:
        (version,) = server.server._models["deep"].versions()
        return len(version._leaving)

    async def main():
        sent = [server.submit("deep", KEEP, Heard()) for _ in range(8)]
        last = Heard()
        server.submit("deep", "result = [answer([1])]", last)
        await until(last.ended.is_set)
        for each in sent:
            each.disconnect()
        config.write_text(config.read_text().replace("count: 4", "count: 1"))
        await server.server.load("deep")
        assert leaving() == 3
        await until(lambda: not leaving())

    server.run(main())
