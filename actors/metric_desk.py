# SPDX-License-Identifier: Apache-2.0
"""Where one stub's metrics are taken: what it opens and reads is answered, what it changes is not.

Belongs to the supervisor's loop, and to one incarnation.
"""

from __future__ import annotations

from actorserve.actors.answers import Answerer, Asker
from actorserve.errors import InvalidArgument
from actorserve.state.metric_registry import Session
from actorserve.state.metrics import MetricKind
from actorserve.wire.messages import MetricsChanged
from actorserve.wire.questions import OpenFamily, OpenMetric, ReadMetric


class MetricDesk:
    """See the module's head."""

    def __init__(self, session: Session, answerers: dict[type, Answerer]) -> None:
        """Answer this stub's questions about metrics from now on."""
        self._session = session
        answerers[OpenFamily] = self._open_family
        answerers[OpenMetric] = self._open_metric
        answerers[ReadMetric] = self._read

    def _open_family(self, question: OpenFamily, asker: Asker) -> None:
        try:
            kind = MetricKind(question.kind)
        except ValueError:
            raise InvalidArgument(f"no kind of metric has the number {question.kind}") from None
        self._session.open_family(question.family, question.name, question.description, kind)

    def _open_metric(self, question: OpenMetric, asker: Asker) -> None:
        self._session.open_metric(
            question.metric, question.family, question.labels, question.buckets
        )

    def _read(self, question: ReadMetric, asker: Asker) -> float:
        return self._session.value(question.metric)

    def change(self, message: MetricsChanged) -> None:
        """Take what the model did to its metrics."""
        self._session.apply(message.changes)

    def close(self) -> None:
        """Keep what is open for the instance's next life: the stub is dead."""
        self._session.lose()
