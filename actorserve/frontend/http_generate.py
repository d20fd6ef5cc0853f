# SPDX-License-Identifier: Apache-2.0
"""POST …/generate: flat JSON in, the model's one response as flat JSON out.

Its first half, the intake of a document that is mapped by the model's description, is that of
…/generate_stream too. Both take models that are decoupled and those that are not.
"""

from __future__ import annotations

from actorserve.errors import ActorserveError, InvalidArgument
from actorserve.frontend.http_exchange import unexpected
from actorserve.frontend.http_infer import ENCODE_OFF_LOOP_BYTES
from actorserve.frontend.http_intake import Intake
from actorserve.frontend.v2_compression import compress, inflate
from actorserve.frontend.v2_generate import GenerateEncoder, parse_generate
from actorserve.frontend.v2_request import Draft, OutputChoice
from actorserve.frontend.v2_response import EncodedBody, body_bytes
from actorserve.frontend.v2_values import View
from actorserve.triton.inference import InferResponse, InFlight

NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


class GenerateIntake(Intake):
    """A request by flat JSON, through the door and until its last response.

    `_in_flight` is what the door gave, while anything is still to come of it. After `give_up`
    nothing that comes is looked at.
    """

    _needs_info = True
    _in_flight: InFlight | None = None
    _is_submitted = False
    _is_final = False
    _is_given_up = False

    def on_response(self, response: InferResponse) -> None:
        """Take one response; the peer is there and waits for it."""
        raise NotImplementedError

    def give_up(self) -> None:
        """Cancel what is still under way: nobody waits for an answer."""
        self._is_given_up = True
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._count_out()
            in_flight.disconnect()

    def abandon(self) -> None:
        """Stop: the peer is gone. Accepted work is cancelled now, memory is given back."""
        super().abandon()
        if self._in_flight is not None:
            self.connection.front.disconnects += 1
        self.give_up()

    def on_failure(self, error: ActorserveError) -> None:
        """A step failed: of the intake, or of the reply."""
        if self._is_submitted:
            self.give_up()
            self.reply_error(error)
        else:
            self.fail(error)

    # --- the request ---

    def _read(self, held: bytes | bytearray) -> tuple[Draft, View]:
        """Return the draft. Pure: may run in a codec thread."""
        assert self._info is not None  # else `_look_up` has raised
        head, route = self._head, self._route
        body: View = inflate(held, head.encoding, self._limit) if head.encoding else held
        request = parse_generate(body, self._info, route.version, self._limit)
        return Draft(request, [], OutputChoice()), b""

    def on_draft(self, draft: Draft) -> None:
        """Send the request through the door."""
        front = self.connection.front
        front.inferences += 1
        front.in_flight += 1
        self._is_submitted = True
        try:
            in_flight = front.door.submit(draft.request, self._on_response)
        except Exception as error:
            front.in_flight -= 1
            self.reply_error(error if isinstance(error, ActorserveError) else unexpected())
            return
        if not self._is_final:
            self._in_flight = in_flight
            if self._is_given_up:
                self.give_up()

    # --- what the door calls ---

    def _on_response(self, response: InferResponse) -> None:
        if response.final and not self._is_final:
            self._in_flight = None
            self._count_out()
        if not self._is_given_up:
            try:
                self.on_response(response)
            except Exception:
                self.on_failure(unexpected())

    def _count_out(self) -> None:
        self._is_final = True
        self.connection.front.in_flight -= 1


class GenerateExchange(GenerateIntake):
    """One generate on a connection. The reply waits for the end: only then there is just one."""

    _response: InferResponse | None = None

    def on_response(self, response: InferResponse) -> None:
        """Keep the one response until the end; refuse a second one, or none."""
        if response.error is not None:
            self._refuse(response.error)
        elif not response.is_empty and self._response is not None:
            self._refuse(InvalidArgument(NOT_ONE))
        else:
            if not response.is_empty:
                self._response = response
            if response.final:
                self._finish_reply()

    def _refuse(self, error: ActorserveError) -> None:
        self._response = None
        self.give_up()
        self.reply_error(error)

    def _finish_reply(self) -> None:
        response, self._response = self._response, None
        if response is None:
            self._refuse(InvalidArgument(NOT_ONE))
            return
        if is_slow(response):
            self.run_step(self._reply_slowly(response))
            return
        try:
            self.reply(self._encode(response))
        except ActorserveError as error:
            self.reply_error(error)

    def _encode(self, response: InferResponse) -> EncodedBody:
        """Return the reply's body. Pure: may run in a codec thread."""
        text = GenerateEncoder(self.connection.front.settings.strict_json).encode(response)
        body = EncodedBody([text], len(text))
        return compress(body, self._head.accepted) if self._head.accepted else body

    async def _reply_slowly(self, response: InferResponse) -> None:
        self.reply(await self.connection.front.off_loop(self._encode, response))


def is_slow(response: InferResponse) -> bool:
    """Whether making JSON of a response would hold up the loop."""
    nbytes = 0
    for output in response.outputs:
        nbytes += len(body_bytes(output))
    return nbytes > ENCODE_OFF_LOOP_BYTES
