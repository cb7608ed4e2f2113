"""One request of a client, as one ext_proc stream of the data plane tells it.

The data plane says in its first message which parts of the bodies it sends, and how. It then tells
the request part by part, and waits for a response to most of them; a missing or a superfluous
response fails the request, and so does a response in the wrong order. Three rules follow.

In FULL_DUPLEX, nothing is answered before the worker is chosen, which is when the body is whole;
then the headers come first, and the body is sent back, in pieces. In BUFFERED, the headers are
answered at once, the body follows in one message, and its response names the worker. In STREAMED
and NONE, the worker is needed before the body is known, so it is chosen by load alone.

The reservation begins with the choice. It ends with the last message of the response, or with the
stream, whatever ends that: Envoy ends the stream with the response, complete or not, even if it
sends nothing of the response. There is one exception: if it sends the request in FULL_DUPLEX, and
nothing of the response, not even trailers, it resets the stream once the request is sent, and only
then without an end before the reset. Then an access log or its expiry ends the reservation.

The phases and what changes them: `Phase`, and the table in `tests/epp/test_stream.py`.
A response in BODY or CHOOSING is one of the data plane itself, such as a timeout."""

import asyncio
import logging
from enum import Enum, auto
from time import monotonic
from typing import Final, Protocol

from lean_selector.core.errors import WaitedTooLong
from lean_selector.core.health.ejections import OK, outcome_of_status
from lean_selector.epp import messages
from lean_selector.epp.picking import Picked, Picker, Refused, RequestToRoute
from lean_selector.gateway.answers import AnswerReader
from lean_selector.gateway.headers import is_stream
from lean_selector.gateway.route import refusal_fields
from lean_selector.wire.selection_bodies import OpenAiErrorBody

log = logging.getLogger("lean_selector.epp")

MOST_BODY_BYTES: Final = 8 << 20  # of a body that is kept until a worker is chosen by its prompt
MOST_KEPT_BYTES: Final = 16 << 20  # of one that is longer, while it waits for any worker
_TOO_LARGE: Final = Refused(413, "the request body is too large to wait for a worker")
_JSON: Final = {b"content-type": b"application/json"}
_JSON_LATER: Final = {**_JSON, b"retry-after": b"1"}
_HELD: Final = (
    "the gateway sends no part of responses (response body NONE, no trailers), so a reservation "
    "stays until --lifecycle-from or its expiry ends it: set response_trailer_mode: SEND"
)


class Phase(Enum):
    """What a request is at."""

    BEGUN = auto()
    BODY = auto()  # its body arrives
    CHOOSING = auto()  # a worker
    SENT = auto()  # to the worker
    ANSWERING = auto()  # the worker
    OVER = auto()


class Channel(Protocol):
    """The stream as a transport: it is told what to send. `finish`, with a status of gRPC, calls
    `closed`."""

    def send(self, *told: bytes) -> None: ...
    def finish(self, status: int = 0, text: str = "") -> None: ...


INVALID_ARGUMENT: Final = 3
INTERNAL: Final = 13


class ExtProcStream:
    """Answers the messages of one stream. Used only on the loop's thread."""

    def __init__(self, picker: Picker, channel: Channel, credential: bytes | None = None) -> None:
        """`credential`: that of the data plane."""
        self.phase = Phase.BEGUN
        self.held_bytes = 0  # of the body, then of what is read of the response
        self._channel = channel
        self._picker = picker
        self._credential = credential
        self._modes = (messages.NONE, messages.NONE)
        self._headers: dict[bytes, bytes] = {}
        self._metadata = b""
        self._body: list[bytes] = []
        self._is_whole = False  # the end of the body has arrived
        self._passes = False  # pieces of the body are sent on as they come
        self._owed: list[bytes] = []  # sent after the response that names the worker
        self._task: asyncio.Task[None] | None = None  # finds a worker
        self._timer: asyncio.TimerHandle | None = None
        self._answers = messages.REQUEST_HEADERS  # what the response that names the worker answers
        self._choice: Picked | None = None
        self._sent_at = 0.0
        self._has_begun = False  # the first token has arrived
        self._status = 0  # of the response
        self._reader: AnswerReader | None = None
        picker.live.add(self)

    def take(self, data: bytes) -> None:
        """Takes a ProcessingRequest. Raises nothing: what is wrong ends the stream."""
        try:
            request = messages.ProcessingRequest(data)
            if request.modes is not None:
                self._modes = request.modes
            if request.observes:
                self._refuse("observability_mode is not supported: it chooses no worker")
                return
            self._handle(request.kind, request.payload, request.metadata)
        except messages.Malformed as error:
            self._refuse(str(error))
        except Exception:
            log.exception("an ext_proc stream failed")
            self._channel.finish(INTERNAL, "internal error")

    def _refuse(self, text: str) -> None:
        self._picker.counts["malformed"] += 1
        self._channel.finish(INVALID_ARGUMENT, text)

    def _handle(self, kind: int, payload: bytes, metadata: bytes) -> None:
        if kind == messages.RESPONSE_BODY and self.phase is not Phase.BEGUN:  # as most are
            body, is_last = messages.body_of(payload)
            self._response_piece(body, is_last)
        elif kind == messages.REQUEST_HEADERS and self.phase is Phase.BEGUN:
            headers, is_last = messages.headers_of(payload)
            self._head(headers, metadata, is_last)
        elif self.phase is Phase.BEGUN or kind == messages.REQUEST_HEADERS:
            self._refuse("the messages of a stream begin with request_headers, once")
        elif kind == messages.REQUEST_BODY:
            body, is_last = messages.body_of(payload)
            self._piece(body, is_last)
        elif kind == messages.REQUEST_TRAILERS:
            self._trailers()
        elif kind == messages.RESPONSE_HEADERS:
            headers, is_last = messages.headers_of(payload)
            self._response_head(headers, metadata, is_last)
        elif kind == messages.RESPONSE_TRAILERS:
            self._response_trailers()

    # -- the request ---------------------------------------------------------------------------

    def _head(self, headers: dict[bytes, bytes], metadata: bytes, is_last: bool) -> None:
        self._headers, self._metadata = headers, metadata
        mode = self._modes[0]
        self.phase = Phase.BODY
        if is_last:
            self._is_whole = True
            self._choose(messages.REQUEST_HEADERS, None)
        elif mode == messages.FULL_DUPLEX:
            pass  # nothing is answered before the body is whole
        elif mode == messages.BUFFERED:
            self._channel.send(messages.unchanged(messages.REQUEST_HEADERS))
        else:
            self._passes = True
            self._choose(messages.REQUEST_HEADERS, b"")

    def _piece(self, body: bytes, is_last: bool) -> None:
        mode = self._modes[0]
        if mode != messages.FULL_DUPLEX:
            if self.phase is Phase.BODY:  # BUFFERED: the whole body, even if trailers follow
                self._is_whole = True
                known = (body or None) if len(body) <= MOST_BODY_BYTES else b""
                self._choose(messages.REQUEST_BODY, known)
            else:
                self._answer_later(messages.unchanged(messages.REQUEST_BODY))
            return
        if self._is_whole:
            return  # Envoy may repeat the last piece
        self._is_whole = is_last
        if self.phase is Phase.BODY:
            self._keep(body)
            if is_last:
                self._choose(messages.REQUEST_HEADERS, b"".join(self._body) or None)
            elif self.held_bytes > MOST_BODY_BYTES or self._picker.is_full:
                self._passes = True
                self._choose(messages.REQUEST_HEADERS, b"")
        elif self.phase is Phase.CHOOSING:
            self._keep(body)
            if self.held_bytes > MOST_KEPT_BYTES:
                self._answer_refused(_TOO_LARGE)
        elif self._passes:
            self._channel.send(*messages.pieces(messages.REQUEST_BODY, body, is_last))

    def _trailers(self) -> None:
        """Trailers end the body. In FULL_DUPLEX they are answered after it. In BUFFERED, a response
        to them can name no worker, so none is chosen for a request that has them but no body."""
        self._is_whole = True
        if self.phase is Phase.BODY and self._modes[0] == messages.FULL_DUPLEX:
            self._owed.append(messages.unchanged(messages.REQUEST_TRAILERS))
            self._choose(messages.REQUEST_HEADERS, b"".join(self._body) or None)
        else:
            self._answer_later(messages.unchanged(messages.REQUEST_TRAILERS))

    def _answer_later(self, response: bytes) -> None:
        if self.phase is Phase.CHOOSING:
            self._owed.append(response)
        else:
            self._channel.send(response)

    def _keep(self, body: bytes) -> None:
        self._body.append(body)
        self._hold(self.held_bytes + len(body))

    def _drop_body(self) -> None:
        self._body = []
        self._hold(0)

    def _hold(self, size: int) -> None:
        self._picker.held_bytes += size - self.held_bytes
        self.held_bytes = size

    def _choose(self, answers: int, body: bytes | None) -> None:
        """Finds a worker, whose name is in the response to the message of kind `answers`. `body` is
        empty if it is unknown; None: there is none."""
        self.phase = Phase.CHOOSING
        headers = self._headers
        request = RequestToRoute(
            headers.get(b":path", b"/").partition(b"?")[0].decode("latin-1"),
            body,
            b"".join([b"\r\n%b: %b" % each for each in headers.items()]) + b"\r\n",
            self._credential,
            messages.subset_of(self._metadata) if self._metadata else None,
            self._modes == (messages.FULL_DUPLEX, messages.FULL_DUPLEX),
        )
        self._answers = answers
        self._look(request, self._picker.max_wait_s)

    def _look(self, request: RequestToRoute, max_wait_s: float) -> None:
        task = self._picker.pick(request, self._found)
        if task is not None:
            self._task = task
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max_wait_s, self._waited_too_long, request)

    def _found(self, found: Picked | Refused) -> None:
        self._task = None
        self._stop_looking()
        if isinstance(found, Refused):
            self._answer_refused(found)
        else:
            self._chosen(found)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._timer = self._task = None

    def _waited_too_long(self, request: RequestToRoute) -> None:
        """Chooses without the tokens of the prompt if these do not come; else refuses."""
        self._stop_looking()
        if request.awaits_prompt:
            request.awaits_prompt = False
            self._look(request, 0.0)
        else:
            told = refusal_fields(WaitedTooLong(self._picker.max_wait_s))
            self._answer_refused(Refused(*told))

    def _answer_refused(self, refused: Refused) -> None:
        """Answers the client in place of a worker, which ends the stream."""
        self._stop_looking()
        self._picker.refused[str(refused.status)] += 1
        self._end(None)
        headers = _JSON_LATER if refused.status in (429, 503) else _JSON
        body = OpenAiErrorBody.encoded(*refused)
        self._channel.send(messages.immediate(refused.status, body, headers))
        self._channel.finish()

    def _chosen(self, choice: Picked) -> None:
        self._choice = choice
        self._sent_at = monotonic()
        self.phase = Phase.SENT
        headers = {messages.DESTINATION: choice.endpoints, **choice.headers}
        told = [messages.destination(self._answers, headers, choice.removed)]
        if self._modes[0] == messages.FULL_DUPLEX and (self._body or self._passes):
            body = b"".join(self._body) if choice.body is None else choice.body
            # Trailers end the stream in place of the last piece.
            is_last = self._is_whole and not self._owed
            told += messages.pieces(messages.REQUEST_BODY, body, is_last)
        self._channel.send(*told, *self._owed)
        self._owed.clear()
        self._drop_body()
        choice.body = None

    # -- the response --------------------------------------------------------------------------

    def _answering(self) -> None:
        if self.phase is Phase.SENT:
            self.phase = Phase.ANSWERING
        elif self.phase is Phase.BODY or self.phase is Phase.CHOOSING:
            self._stop_looking()
            self._end(None)

    def _response_head(self, headers: dict[bytes, bytes], metadata: bytes, is_last: bool) -> None:
        if self.phase is Phase.ANSWERING:
            self._refuse("a second response_headers")
            return
        self._answering()
        choice = self._choice
        status = headers.get(b":status", b"")
        self._status = int(status) if status.isdigit() and len(status) == 3 else 0
        if choice is not None:
            served = messages.served_of(metadata) if metadata else None
            if served is not None:
                self._picker.follow(choice, served)
            routed = choice.routed
            if routed is not None and self._status == 200 and self._modes[1] != messages.NONE:
                lines = b"\r\ncontent-type: " + headers.get(b"content-type", b"")
                streams = is_stream(lines if b"content-type" in headers else b"", routed.streams)
                self._reader = routed.additions.reader(streams)
        self._channel.send(messages.unchanged(messages.RESPONSE_HEADERS))
        if is_last:
            self._complete()

    def _response_piece(self, body: bytes, is_last: bool) -> None:
        self._answering()
        text, reader = body, self._reader
        if reader is not None:
            text = reader.feed(body) + (reader.end() if is_last else b"")
            self._hold(reader.held_bytes)
            if self._picker.is_full:
                text += reader.rest()  # the rest of the response passes unread
                self._reader = None
                self._hold(0)
        if not self._has_begun and (bool(body) if reader is None else reader.has_token):
            self._begin()
        if self._modes[1] != messages.FULL_DUPLEX:
            self._channel.send(messages.unchanged(messages.RESPONSE_BODY))
        else:
            self._channel.send(*messages.pieces(messages.RESPONSE_BODY, text, is_last))
        if is_last:
            self._complete()

    def _begin(self) -> None:
        """Records the arrival of the first token."""
        self._has_begun = True
        choice = self._choice
        if choice is not None and self._status < 400:
            streams = choice.routed is not None and choice.routed.streams
            choice.use.prefill_complete(monotonic() - self._sent_at if streams else None)

    def _response_trailers(self) -> None:
        self._answering()
        told = []
        if self._reader is not None and self.phase is Phase.ANSWERING:
            rest = self._reader.end()
            if self._modes[1] == messages.FULL_DUPLEX:
                told = messages.pieces(messages.RESPONSE_BODY, rest, False)
        self._channel.send(*told, messages.unchanged(messages.RESPONSE_TRAILERS))
        self._complete()

    # -- the end -------------------------------------------------------------------------------

    def _complete(self) -> None:
        self._end(outcome_of_status(self._status) if self._status else None)

    def closed(self, *, by_reset: bool = False) -> None:
        """Ends the request, because its stream has ended, however. Does nothing if it is over.
        `by_reset`: the data plane has reset the stream, without an end before it."""
        phase, choice, reader = self.phase, self._choice, self._reader
        if phase is Phase.OVER:
            return
        self._stop_looking()
        if phase is Phase.ANSWERING and self._modes[1] == messages.NONE:
            self._complete()  # the rest of the response was not to be sent
        elif (
            phase is Phase.SENT
            and by_reset
            and self._modes[1] == messages.NONE
            and choice is not None
            and choice.routed is not None
        ):
            self._picker.counts["held"] += 1
            if self._picker.counts["held"] == 1:
                log.warning(_HELD)
            self._leave()
        else:
            is_done = phase is Phase.ANSWERING and reader is not None and reader.was_whole()
            self._picker.counts["broken"] += not (is_done or phase is Phase.SENT)
            self._end(OK if is_done else None)

    def _leave(self) -> None:
        self.phase, self._reader = Phase.OVER, None
        self._drop_body()
        self._picker.live.discard(self)

    def _end(self, outcome: str | None) -> None:
        """Ends the reservation, if there is one."""
        if self.phase is Phase.OVER:
            return
        choice, reader, cached = self._choice, self._reader, None
        self._leave()
        if choice is None:
            return
        routed = choice.routed
        if outcome == OK and routed is not None and reader is not None:
            lengths = reader.usage.lengths
            cached = None if routed.is_sent_once else reader.usage.cached_tokens
            if lengths is not None and routed.on_lengths is not None:
                routed.on_lengths(*lengths)
        choice.use.end(outcome, cached)

    def touch(self) -> None:
        """Renews the reservation, so that it does not expire."""
        if self._choice is not None:
            self._choice.use.touch()
