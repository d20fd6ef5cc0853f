# SPDX-License-Identifier: Apache-2.0
"""POST …/infer: an exchange that goes through the server's door, without an ASGI cycle or task.

Intake makes the request of the body's bytes; the door calls back with the response; the reply is
one write, or a few where outputs are large. Only what is slow (JSON text of large outputs,
compression) runs in a codec thread.
"""

from __future__ import annotations

from actorserve.errors import ActorserveError, DecoupledModel
from actorserve.frontend.http_exchange import unexpected
from actorserve.frontend.http_intake import Intake
from actorserve.frontend.v2_compression import compress
from actorserve.frontend.v2_request import Draft, OutputChoice
from actorserve.frontend.v2_response import (
    EncodedBody,
    body_bytes,
    encode_response,
    json_output_bytes,
)
from actorserve.triton.inference import InferResponse, InFlight, ModelInfo

ENCODE_OFF_LOOP_BYTES = 64 * 1024
DECOUPLED = "HTTP end point doesn't support models with decoupled transaction policy"


class InferExchange(Intake):
    """One inference on a connection."""

    _choice = OutputChoice()  # replaced by the request's own, never changed
    _in_flight: InFlight | None = None
    _has_response = False
    _is_final = False

    def abandon(self) -> None:
        """Stop: the peer is gone. Accepted work is cancelled, memory is given back."""
        super().abandon()
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self.connection.front.disconnects += 1
            in_flight.cancel()

    def on_failure(self, error: ActorserveError) -> None:
        """A step failed: of the intake, or of the reply."""
        if self._has_response:
            self.reply_error(error)
        else:
            self.fail(error)

    def _check_info(self, info: ModelInfo) -> None:
        """Refuse a model that answers in streams; where it loads just now, the door does."""
        if info.decoupled:
            raise DecoupledModel(DECOUPLED)

    def on_draft(self, draft: Draft) -> None:
        """Send the request through the door."""
        front = self.connection.front
        self._choice = draft.choice
        front.inferences += 1
        front.in_flight += 1
        try:
            in_flight = front.door.submit(draft.request, self._on_response)
        except DecoupledModel:
            front.in_flight -= 1
            self.reply_error(DecoupledModel(DECOUPLED))
        except ActorserveError as error:
            front.in_flight -= 1
            self.reply_error(error)
        except Exception:
            front.in_flight -= 1
            self.reply_error(unexpected())
        else:
            if not self._is_final:
                self._in_flight = in_flight

    # --- what the door calls ---

    def _on_response(self, response: InferResponse) -> None:
        """Reply with the first response; only a decoupled model could send more."""
        if response.final and not self._is_final:
            self._is_final = True
            self._in_flight = None
            self.connection.front.in_flight -= 1
        if self._has_response or self.disconnected:
            return
        self._has_response = True
        if response.error is not None:
            self.reply_error(response.error)
            return
        try:
            if self._is_slow_reply(response):
                self.run_step(self._reply_slowly(response))
            else:
                self.reply(self._encode(response))
        except ActorserveError as error:
            self.reply_error(error)
        except Exception:
            self.reply_error(unexpected())

    def _is_slow_reply(self, response: InferResponse) -> bool:
        nbytes = json_output_bytes(response, self._choice)
        if self._head.accepted:
            nbytes += sum(len(body_bytes(output)) for output in response.outputs)
        return nbytes > ENCODE_OFF_LOOP_BYTES

    def _encode(self, response: InferResponse) -> EncodedBody:
        """Return the reply's body. Pure: may run in a codec thread."""
        body = encode_response(response, self._choice, self.connection.front.settings.strict_json)
        return compress(body, self._head.accepted) if self._head.accepted else body

    async def _reply_slowly(self, response: InferResponse) -> None:
        self.reply(await self.connection.front.off_loop(self._encode, response))
