# SPDX-License-Identifier: Apache-2.0
"""What /metrics says, read by Prometheus's own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from actorserve.frontend.metrics_text import exposition
from tests.server.harness import Server

Scrape = dict[str, float]


def scrape(server: Server, port: int | None = None) -> Scrape:
    """Return every sample by its name and labels, as in `name{a="b"}`."""
    reply = server.request("GET", "/metrics", port=port)
    assert reply.status == 200, reply.body
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(reply.body.decode())


def read(server: object) -> Scrape:
    """Return the same of an embedded server."""
    return parsed(exposition(server.metrics()))  # type: ignore[attr-defined]


def parsed(text: str) -> Scrape:
    """Return every sample of an exposition; fails where one is there twice."""
    found: Scrape = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(
                f'{label}="{value}"' for label, value in sorted(sample.labels.items())
            )
            name = sample.name
            if family.type == "counter" and f"# TYPE {name} counter\n" not in text:
                name = name.removesuffix("_total")  # which the parser has added
            key = f"{name}{{{labels}}}" if labels else name
            assert key not in found, key
            found[key] = sample.value
    return found


def of_model(found: Scrape, model: str, name: str, version: int = 1, **labels: str) -> float:
    """Return a sample of a model's version."""
    labels = {**labels, "model": model, "version": str(version)}
    text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return found[f"{name}{{{text}}}"]
