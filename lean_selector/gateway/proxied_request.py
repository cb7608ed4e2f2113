"""One proxied request, from the choice of a worker to the end of the answer.

Anything may happen at any time: the worker refuses the connection, sheds the request, answers 500,
or dies amid its answer; the client goes, or reads slowly; the search for a worker ends after the
client has gone. Whatever happens, the client must get one answer, or see that it broke off, and the
use (the claim on the worker) must end exactly once: a use that stays makes its worker look busy
for ever, and one that ends twice makes the next request's load vanish.

The rule: until the client has received a byte, everything can be taken back, so another worker is
tried. From then on nothing can, and a failure of the worker breaks the client's connection off. So
the first byte is sent late: not when the head of the answer arrives, but with the body, and of a
stream with its first whole event, because vLLM answers 200 and then reports in an event that its
core has died. Nothing in this module waits: the loop calls the methods, each call changes the state
as the table says, and `placing` waits before the request is sent. Pieces are relayed at the
client's pace.

A pair of workers serves some requests (`pair.py` makes their bodies, and tells what is delicate).
The prefill worker gets the request first. Its whole answer is kept, and what it says of its KV
blocks (the params) goes to the decode worker, whose answer is relayed. A decode worker that cannot
fetch these blocks answers 500, for which either may be the cause, so neither is blamed. The same
params are sent again only if nothing was sent: after a refused connection, to one other decode
worker, while the prefill worker still holds the blocks. Otherwise both legs are run anew.

Three other ways were tried. To compare the first read with an error's bytes: an error in two reads
was relayed. To try all workers: a request may be the cause of a failure, and there are requests
that end the process of any engine, so one such request ended five engines. If a request was sent,
and the worker failed (its connection broke, or it answered 500 or 502), at most one other worker
gets it. To retry every request: when many workers fail, retries overload the others, so retries of
all requests have one budget, except those after a refused connection, which cost a worker nothing.

The table has the next state for what happens in each state; where a cell is empty, it cannot
happen. If no other worker may be tried, the request is OVER instead of LOOKING.

    what happens      LOOKING    PREFILLING SENT       SHEDDING   RELAYING
    sent              SENT
    sent to prefill   PREFILLING
    refused           LOOKING
    fail              OVER
    head of an error             SHEDDING   SHEDDING
    head of another              PREFILLING SENT
    first error event                       SHEDDING
    incomplete event                        SENT
    body                         PREFILLING RELAYING   SHEDDING   RELAYING
    end                          LOOKING    OVER       LOOKING    OVER
    lost                         LOOKING    LOOKING    LOOKING    OVER
    lost, was kept               LOOKING    LOOKING
    hung up           OVER       OVER       OVER       OVER       OVER
    timed out         OVER       OVER       OVER       OVER
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum, auto
from time import monotonic
from typing import Final

from lean_selector.core.health.ejections import FAILED, NOT_FREE, OK, REFUSED, outcome_of_status
from lean_selector.gateway.answers import AnswerReader
from lean_selector.gateway.gateway_metrics import Counts
from lean_selector.gateway.genai_metrics import Timing
from lean_selector.gateway.headers import answer_lines, id_line, is_stream, refusal, request_lines
from lean_selector.gateway.pair import HeldBlocks, decode_body, params_of, prefill_body
from lean_selector.gateway.prompt_shapes import Unknown
from lean_selector.gateway.prompts import NO_PARAMS, Routed
from lean_selector.gateway.upstreams import WorkerUse
from lean_selector.http.body import UnboundedBody
from lean_selector.http.client import AnswerHead, ClientConnection
from lean_selector.http.head import Request
from lean_selector.http.streaming import StreamedReply

log = logging.getLogger("lean_selector.gateway")

# An engine whose core has died answers all requests so.
_ERRORS: Final = frozenset({500, 502})
_NOWHERE: Final = frozenset[str]()
_STALE: Final = "stale"  # the same worker is tried again
_LAST_CHUNK: Final = b"0\r\n\r\n"
_MOST_KEPT_BYTES: Final = 8 << 20  # of an answer that is kept; a longer one is a failure
_CHUNKED_LINE: Final = b"transfer-encoding: chunked\r\n"


class State(Enum):
    """What a request is at. The table above has the changes."""

    LOOKING = auto()  # for a worker
    PREFILLING = auto()  # the prefill worker of a pair computes the prompt
    SENT = auto()  # to the worker; the client got nothing of its answer
    SHEDDING = auto()  # the worker answers an error, which is kept, and another is tried after it
    RELAYING = auto()  # the client gets the answer
    OVER = auto()


class ProxiedRequest:
    """A client's request, from its arrival to its end; `reply` is the answer to the client."""

    # Of requests that a pair of workers serves.
    held: HeldBlocks | None = None  # for the decode worker that has the request, or will have it
    doubted: frozenset[str] = _NOWHERE  # endpoints of which one failed it, or another of them
    pair_reason: str = ""  # whether a pair serves it, and why

    is_stale: bool = False  # the kept connection to the worker had just been closed

    def __init__(
        self,
        request: Request,
        request_id: bytes,
        lease_id: str,
        counts: Counts,
        place: "Callable[[ProxiedRequest], asyncio.Task[None] | None]",
        on_failed: Callable[[WorkerUse, str], None],
        on_over: "Callable[[ProxiedRequest], None]",
        token: Callable[[], bytes] | None = None,
    ) -> None:
        """`place` finds a worker and calls `refused`, `fail` or `sent`, at once or in the task that
        it returns. `on_failed(use, outcome)` is called if a worker refuses a connection or fails
        before the client gets an answer. `token` replaces the client's authorization."""
        self.request = request
        self.request_id = request_id  # may be the client's own
        self.lease_id = lease_id  # generated, so it is unique
        self.reply = StreamedReply(self._hung_up, self._pause, self._resume)
        self.routed: Routed | None = None  # set for a completion once its prompt is parsed
        self.use: WorkerUse | None = None  # of a pair: that of the decode worker
        self.used_since = 0.0
        self._sent_at = 0.0
        self._first_token_at = 0.0  # only for a stream
        self.timing: Timing | None = None  # set when the answer is complete
        self.traceparent: str | None = None  # replaces the client's
        self.tried: set[str] = set()  # endpoints that failed or shed it
        self.attempts = 0
        self.why = ""  # why the last attempt failed
        self.unknown = ""  # that its model is not known yet, and which models are
        self.state = State.LOOKING
        self.outcome: str | None = None  # of the last worker
        self.status = 0  # of the answer, once it has begun
        self._counts = counts
        self._place = place
        self._on_failed = on_failed
        self._on_over = on_over
        self._token = token
        self._began = monotonic()
        self._connection: ClientConnection | None = None
        self._head: AnswerHead | None = None
        # Endpoints that failed after it was sent. A kept connection that ends counts until the
        # same worker answers.
        self._failed_at: set[str] = set()
        self._reader: AnswerReader | None = None  # of a completion's answer with status 200
        self._is_chunking = False  # what is read of the answer needs the framing of chunks
        self._is_written = False  # with the framing of its end
        self._waits_for_token = False  # the stream has no part of the answer yet
        # While it arrives: the body of an error, or of a prefill worker's answer.
        self._kept = bytearray()
        self._last_error: tuple[WorkerUse, AnswerHead, bytes] | None = None
        self.placing: asyncio.Task[None] | None = None  # set while a worker is being found

    def begin(self) -> None:
        """Finds a worker. Called once; the request may be over when this returns."""
        self._counts.active += 1
        self._counts.retry_budget.add()
        self._find_worker()

    @property
    def is_over(self) -> bool:
        return self.state is State.OVER

    @property
    def age_s(self) -> float:
        return monotonic() - self._began

    @property
    def _most_failures(self) -> int:
        """At how many workers the request may fail after it was sent."""
        return 1 if self.routed is not None and self.routed.is_sent_once else 2

    @property
    def _may_fail(self) -> bool:
        """Whether another worker is tried if this one answers one of _ERRORS to a completion."""
        return self.routed is not None and len(self._failed_at) + 1 < self._most_failures

    @property
    def asked(self) -> WorkerUse:
        """The use of the worker to which the request is sent now: first the prefill worker of a
        pair, until it has answered."""
        use = self.use
        assert use is not None
        leg = use.leg
        return use if leg is None or leg.is_over else leg

    @property
    def legs(self) -> list[tuple[str, str, float, float]]:
        """Return name, base URL, begin and end of each leg of the pair that serves the request, in
        seconds since the request. A leg that goes on ends now."""
        held, use, began = self.held, self.use, self._began
        if held is None or use is None:
            return []
        name = held.leg.endpoint.text
        found = [("prefill", name, held.sent_at - began, held.answered_at - began)]
        if self._sent_at > held.answered_at:
            found.append(("decode", use.endpoint.text, self._sent_at - began, self.age_s))
        return found

    @property
    def _is_in_vain(self) -> bool:
        """Whether a decode worker answers 200 without a token: it could not fetch the blocks."""
        return self.held is not None and self._reader is not None and not self._reader.has_token

    @property
    def why_unknown(self) -> Unknown | None:
        """Why block hashes of the prompt are unknown; None if all are known or not yet computed."""
        return None if self.routed is None else self.routed.why_not

    # -- choosing and sending ----------------------------------------------------------------------

    def _find_worker(self) -> None:
        self.state, self._head, self._reader = State.LOOKING, None, None
        placing = self._place(self)
        if placing is not None:
            self.placing = placing

    def take_over(self, use: WorkerUse) -> None:
        """Takes over the use (claim on the chosen worker), which this request must end."""
        self.use = use
        self.used_since = monotonic()
        self.is_stale = False
        if use.pair_reason:
            self.pair_reason = use.pair_reason

    def sent(self, connection: ClientConnection) -> None:
        """Sends the request on a connection to the worker."""
        use = self.use
        assert use is not None
        assert self.state is State.LOOKING
        if use.leg is not None:
            use = self.asked
        self.placing = None
        self.attempts += 1
        self._sent_at = monotonic()
        self._connection = connection
        body = self.request.body if self.routed is None else use.body or self.routed.body
        self.state = State.SENT
        if use is not self.use:
            self.state = State.PREFILLING
            body = prefill_body(bytes(body), self.request.path)
        elif self.held is not None:
            body = decode_body(bytes(body), self.held.params)
        head = self._request_head(use, len(body))
        connection.send(head, body, self, self.request.method == b"HEAD")
        if self.reply.is_paused:
            connection.pause()

    def refused(self, reason: str) -> None:
        """Tries another worker, because the chosen worker refused the connection."""
        self.attempts += 1
        self._retry(REFUSED, REFUSED, reason)

    def fail(self, status: int, message: str, code: str | None = None, extra: bytes = b"") -> None:
        """Relays the last error that a worker answered. If no worker did so, sends this error."""
        self.placing = None
        if self._last_error is not None:
            self._pass_error(*self._last_error)
            return
        self.status = status
        self._counts.answers[status] += 1
        self._finish(None)
        self.reply.resolve(refusal(status, message, code, self._own_lines() + extra))

    def time_out(self, limit_s: float) -> None:
        """Answers 504, because no answer has begun in time."""
        use = self.use
        where = "none was free" if use is None else f"{self.asked.endpoint.text} did not answer"
        self._stop()
        self._last_error = None
        self.fail(504, f"no answer in {limit_s:g} s: {where}", "timeout")

    def _stop(self) -> None:
        """Stops the search for a worker. If the request was sent, closes the connection to the
        worker, so that the worker stops computing."""
        placing, self.placing = self.placing, None
        if placing is not None:
            placing.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.drop()

    def _request_head(self, use: WorkerUse, length: int) -> bytes:
        request, routed = self.request, self.routed
        query = b"" if request.query is None else b"?" + request.query
        parts = [
            b"%b %b%b HTTP/1.1\r\n" % (request.method, request.path, query),
            use.endpoint.host_line,
            request_lines(
                request.section,
                without_codings=routed is not None,
                drops_authorization=self._token is not None,
                drops_traceparent=self.traceparent is not None,
            ),
        ]
        if self.traceparent is not None:
            parts.append(b"\r\ntraceparent: " + self.traceparent.encode())
        if self._token is not None:
            parts.append(b"\r\nauthorization: Bearer " + self._token())
        if use.dp_rank is not None:
            parts.append(b"\r\nx-data-parallel-rank: %d" % use.dp_rank)
        if length or request.method in (b"POST", b"PUT", b"PATCH"):
            parts.append(b"\r\ncontent-length: %d" % length)
        parts.append(b"\r\nx-request-id: %b\r\n\r\n" % self.request_id)
        return b"".join(parts)

    # -- the answer --------------------------------------------------------------------------------

    def on_head(self, head: AnswerHead) -> bool:
        self._head, self._reader = head, None
        routed = self.routed
        if self.is_stale:
            self.is_stale = False
            self._failed_at.discard(self.asked.endpoint.text)
        if self.state is State.PREFILLING:
            self._kept = bytearray()
            if head.status != 200:
                self.state = State.SHEDDING
            else:
                assert routed is not None
                self._reader = routed.additions.reader(False)
            return True
        if head.status >= 400 and self._is_shed(head.status):
            self.state, self._kept = State.SHEDDING, bytearray()
            return True
        if routed is not None and head.status == 200:
            self._reader = routed.additions.reader(is_stream(head.lines, routed.streams))
            if self.held is not None:
                self._kept = bytearray()
                self._reader.be_strict()
            return True
        return self.request.headers.is_http10 and head.is_chunked

    def _is_shed(self, status: int) -> bool:
        """Whether another worker is tried after an answer with this status."""
        if status in NOT_FREE:
            return self._most_failures > 1
        return status in _ERRORS and self._may_fail

    def on_body(self, data: bytes, is_last: bool) -> None:
        reader = self._reader
        if self.state is State.RELAYING:
            text = data if reader is None else reader.feed(data)
            if self._waits_for_token and reader is not None and reader.has_token:
                self._prefilled()
            if is_last:
                text = self._framed(text, True)
            elif self._is_chunking and text:  # as `_framed`, without a call
                text = b"%x\r\n%b\r\n" % (len(text), text)
            if text:
                self.reply.write(text)
        elif self.state is State.SENT:
            self._first(data, is_last)
        elif reader is None or self.state is State.PREFILLING:
            # Of a failed stream, only the first event is kept.
            self._kept += data if reader is None else reader.feed(data)
            if len(self._kept) > _MOST_KEPT_BYTES and self._connection is not None:
                what = "error" if reader is None else "answer to a prefill"
                self._connection.fail(f"its {what} has more than {_MOST_KEPT_BYTES} bytes")

    def _first(self, data: bytes, is_last: bool) -> None:
        """Relays the body once it is known not to begin with an error of the engine. After such an
        error, another worker can be tried."""
        reader = self._reader
        if reader is not None:
            data = reader.feed(data)
            if is_last:
                data += reader.rest()
            error = reader.error
            if self.held is not None:  # what a decode worker says before its token may be in vain
                self._kept += data
                data = bytes(self._kept)
                if error is None and not reader.has_token:
                    error = data
                    if not is_last:
                        if len(data) > _MOST_KEPT_BYTES and self._connection is not None:
                            self._connection.fail("its stream has no token")
                        return
            if error is not None and self._may_fail:
                self.state, self._kept = State.SHEDDING, bytearray(error)
                return
        if data or is_last:
            self._relay(data, is_last)

    def _framed(self, text: bytes, is_last: bool) -> bytes:
        """Return what the client gets for `text`, which was read of the answer."""
        if is_last and self._reader is not None:
            text += self._reader.end()
        self._is_written = is_last
        if not self._is_chunking:
            return text
        last = _LAST_CHUNK if is_last else b""
        return b"%x\r\n%b\r\n%b" % (len(text), text, last) if text else last

    def on_end(self) -> None:
        self._connection = None
        if self.state is State.SENT:
            self._first(b"", True)
        if self.state is not State.RELAYING:
            if self.state is State.PREFILLING:
                self._prefill_answered()
            else:
                self._was_shed(bytes(self._kept))
            return
        if not self._is_written and (text := self._framed(b"", True)):
            self.reply.write(text)
        self._finish(FAILED if self._is_in_vain else outcome_of_status(self.status))
        self.reply.finish()

    def on_lost(self, reason: str, is_stale: bool) -> None:
        self._connection = None
        if self.state is State.RELAYING:
            self._counts.broken += 1
            self._note(reason, "its answer ended early")
            reply = self.reply
            self._finish(FAILED)
            reply.break_off()
            return
        self._failed_at.add(self.asked.endpoint.text)
        if is_stale and self._most_failures > 1:
            self._retry(_STALE, None, reason)
        else:
            # As a 500: of /v1/responses, vLLM cuts the stream off in place of it.
            self._retry(FAILED, None if self._is_in_vain else FAILED, reason)

    def _prefill_answered(self) -> None:
        """Takes over what the prefill worker of a pair answered, and goes on to the decode worker.
        Without params, the request needs another choice."""
        leg, reader, routed = self.asked, self._reader, self.routed
        assert reader is not None
        assert routed is not None
        self._kept += reader.end()  # from here on, the prompt's tokens are known
        params = params_of(bytes(self._kept))
        self._kept = bytearray()
        if not params:
            self._note("its answer to a prefill has no usable kv_transfer_params", "no pair")
            routed.bars_pair = NO_PARAMS
            self.run_anew()
            return
        now, cached = monotonic(), reader.usage.cached_tokens
        self.held = HeldBlocks(leg, params, self._sent_at, now, cached)
        self._counts.pair_stages["prefill"].add(now - self._sent_at)
        leg.prefill_complete()
        leg.end(OK, cached)
        if cached is not None:
            self._compare(leg, cached)
        self._find_worker()

    def _was_shed(self, body: bytes) -> None:
        """Tries another worker, because this worker shed the request or failed. Keeps the answer in
        case there is no other worker."""
        asked, head = self.asked, self._head
        assert head is not None
        self._last_error = (asked, head, body)
        outcome = outcome_of_status(head.status)
        if asked is not self.use and not self._is_shed(head.status):
            # What the prefill worker says of the request, the decode worker would say, too.
            self._let_go(asked, outcome)
            self.fail(head.status, "")
            return
        if head.status not in NOT_FREE:
            self._failed_at.add(asked.endpoint.text)
        if head.status == 200:
            outcome = FAILED
        why = f"it answered {head.status}" if head.status != 200 else "its stream has no token"
        how = outcome or "not_free"
        if self.held is not None and outcome == FAILED:  # or the prefill worker is gone
            outcome = None
        self._retry(how, outcome, why)

    def _let_go(self, asked: WorkerUse, outcome: str | None) -> None:
        """Ends the claims on the workers, of which `asked` had this outcome."""
        use, self.use = self.use, None
        assert use is not None
        asked.end(outcome)
        use.end(None)
        if outcome is not None:
            self._on_failed(asked, outcome)

    def _pass_error(self, use: WorkerUse, head: AnswerHead, body: bytes) -> None:
        """Relays the last error that a worker answered, because no other worker will be tried."""
        if self.use is not None:  # chosen, and not sent to
            self.use.end(None)
        self.use, self.status = use, head.status
        self._counts.answers[head.status] += 1
        is_head = self.request.method == b"HEAD"
        parts = [
            head.start,
            answer_lines(head.lines, without_length=not is_head),
            b"\r\n",
            self._own_lines(),
            b"" if is_head else b"content-length: %d\r\n" % len(body),
            self.reply.begin(),
            b"\r\n",
            body,
        ]
        self.reply.write(b"".join(parts))
        self._finish(None)
        self.reply.finish()

    def _relay(self, data: bytes, is_last: bool) -> None:
        """Sends the client the head of the answer, and the first piece of its body."""
        head, use = self._head, self.use
        assert head is not None
        assert use is not None
        self.state, self.status = State.RELAYING, head.status
        counts = self._counts
        counts.answers[head.status] += 1
        counts.first_byte.add(monotonic() - self._began)
        routed = self.routed
        reader = self._reader
        if reader is not None and routed is not None and routed.streams:
            self._waits_for_token = not reader.has_token
            if reader.has_token:
                self._prefilled()
        elif head.status < 400:  # for an error, no prompt was computed
            use.prefill_complete(None)
        is_http10 = self.request.headers.is_http10
        changes = reader is not None and routed is not None and routed.additions.change_answer
        self._is_chunking = reader is not None and (changes or head.is_chunked) and not is_http10
        is_unframed = type(head.body) is UnboundedBody or (head.is_chunked and is_http10)
        parts = [
            head.start,
            answer_lines(head.lines, without_length=changes),
            b"\r\n",
            self._own_lines(),
        ]
        if (changes or head.is_chunked) and not is_http10:
            parts.append(_CHUNKED_LINE)
        parts.append(self.reply.begin(closes=is_unframed or (changes and is_http10)))
        parts.append(b"\r\n")
        self.request.body = b""  # no retry is possible any more
        if self.routed is not None:
            self.routed.body = b""
        parts.append(self._framed(data, is_last) if data or is_last else data)
        self.reply.write(b"".join(parts))

    def _prefilled(self) -> None:
        """Records the arrival of a stream's first token."""
        assert self.use is not None
        self._waits_for_token = False
        self._first_token_at = now = monotonic()
        sent_at, held = self._sent_at, self.held
        if held is not None:
            sent_at = held.sent_at
            self._counts.pair_stages["transfer"].add(now - held.answered_at)
            self._counts.pair_stages["first_token"].add(now - self._began)
        self.use.prefill_complete(now - sent_at)

    def _own_lines(self) -> bytes:
        use = self.use
        lines = id_line(self.request_id)
        if use is None:
            return lines
        lines += b"x-lean-worker: %b\r\n" % use.endpoint.text.encode()
        if self.pair_reason:
            lines += b"x-lean-pd: %b\r\n" % self.pair_reason.encode()
        if self.held is not None:
            lines += b"x-lean-prefill-worker: %b\r\n" % self.held.leg.endpoint.text.encode()
        if use.overlap_tokens is not None:
            lines += b"x-lean-overlap: %d\r\n" % use.overlap_tokens
            if self.why_unknown is not None:
                lines += b"x-lean-prompt: %b\r\n" % self.why_unknown.why.encode()
        return lines

    # -- the end -----------------------------------------------------------------------------------

    def _hung_up(self) -> None:
        """Handles a disconnect of the client, which is no failure after a complete stream."""
        reader = self._reader
        is_whole = self.state is State.RELAYING and reader is not None and reader.was_whole()
        self._counts.hung_up += not is_whole
        self._stop()
        self._finish(OK if is_whole else None)

    def _retry(self, how: str, outcome: str | None, reason: str) -> None:
        """Tries another worker (or the same again, if the connection was stale). Calls `fail` if
        the retry budget is empty. `how` is a metric label; `outcome` goes to outlier detection."""
        asked, counts = self.asked, self._counts
        is_cause = how != _STALE and len(self._failed_at) >= self._most_failures
        # A refused one was not sent.
        may_retry = not is_cause and (how == REFUSED or counts.retry_budget.take())
        if how == _STALE and may_retry:
            # The worker had just closed the idle connection, which is not a failure.
            counts.stale += 1
            if self.held is not None:  # it may have used the params
                self.run_anew()
                return
            self.attempts -= 1
            self.is_stale = True
            self._find_worker()
            return
        spent = "the request may be the cause" if is_cause else "too many requests were retried"
        self._note(reason, "another is tried" if may_retry else spent)
        if self.held is not None and how == FAILED and outcome is None:
            self.doubted |= {asked.endpoint.text, self.held.leg.endpoint.text}  # a new set
        else:
            self.tried.add(asked.endpoint.text)
        self._let_go(asked, outcome)
        self._keep_params(how == REFUSED)
        if not may_retry:
            self.fail(502, f"{self.why}; {spent}", "bad_gateway")
            return
        counts.retries[how] += 1
        self._find_worker()

    def run_anew(self) -> None:
        """Has another pair chosen, because the params must not be sent."""
        if self.use is not None:
            self._let_go(self.use, None)
        self._keep_params(False)
        self._find_worker()

    def _keep_params(self, was_refused: bool) -> None:
        """Drops the params, unless a decode worker refused the connection, which got nothing."""
        held = self.held
        if held is not None:
            if not was_refused or held.were_moved or held.are_old:
                self.held = None
            held.were_moved = True

    def _finish(self, outcome: str | None) -> None:
        """Ends the request and its use (claim on a worker). Must be called only once."""
        assert self.state is not State.OVER
        self.state = State.OVER
        self.outcome = outcome
        self._counts.active -= 1
        held, cached = self.held, None
        if outcome == OK and self.routed is not None and self.status == 200:
            assert self._reader is not None
            usage = self._reader.usage  # the engine's counts, of a complete answer
            lengths = usage.lengths
            if held is None and not self.routed.is_sent_once:  # else may be another engine's
                cached = usage.cached_tokens
            if lengths is not None and self.routed.on_lengths is not None:
                self.routed.on_lengths(*lengths)
            first_s = self._first_token_at - self._began if self._first_token_at else None
            told = cached if held is None else held.cached_tokens
            self.timing = Timing(self.age_s, first_s, lengths, told)
        if self.use is not None:
            self.use.end(outcome, cached)
            if cached is not None:
                self._compare(self.use, cached)
        self._on_over(self)

    def _compare(self, use: WorkerUse, cached: int) -> None:
        """Adds the predicted and the reported number of cached tokens to the metrics."""
        if self.routed is not None and use.overlap_tokens is not None:
            counts = self._counts
            counts.compared_cached_tokens += cached
            counts.compared_predicted_tokens += use.overlap_tokens
            counts.compared_prompt_tokens += self.routed.prompt.isl_tokens

    def _note(self, reason: str, consequence: str) -> None:
        """Counts a failure, which is logged later. Keeps its reason for a later error answer."""
        text, trouble = self.asked.endpoint.text, f"{reason}; {consequence}"
        self.why = f"{text}: {reason}"
        self._counts.troubles[text, trouble] += 1
        log.debug("request %s: worker %s: %s", self.request_id.decode("latin-1"), text, trouble)

    # -- back-pressure -----------------------------------------------------------------------------

    def _pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def _resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()
