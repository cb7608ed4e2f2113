"""One request's way, whatever happens on it and in whatever order, driven by hand.

The connections of the client and of the workers are real ones of ours on transports that remember;
no socket, no loop.
"""

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lean_selector.gateway import proxied_request
from lean_selector.gateway.answers import Additions
from lean_selector.gateway.gateway_metrics import Counts
from lean_selector.gateway.model_request import ModelRequest
from lean_selector.gateway.prompts import Routed
from lean_selector.gateway.proxied_request import ProxiedRequest, State
from lean_selector.gateway.upstreams import WorkerUse
from lean_selector.http.client import ClientConnection, Upstream
from lean_selector.http.connections import Connections
from lean_selector.http.head import Request
from lean_selector.http.response import PendingReply
from lean_selector.http.streaming import StreamingProtocol
from tests.http.test_protocol import Transport

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
FAILED = b'data: {"error": {"message": "it died", "type": "InternalServerError", "code": %d}}\n\n'
FAILED_MESSAGE = b'event: error\ndata: {"type": "error", "error": {"type": "%b"}}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


PARAMS = {
    "do_remote_prefill": True,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}


class BookedUse(WorkerUse):
    """Remembers what it was told."""

    def __init__(self, endpoint: Upstream) -> None:
        super().__init__(endpoint, 1, None, 0)
        self.told: list[str] = []

    def _begun(self, ttft_s: float | None) -> None:
        self.told.append("begun")

    def _touched(self) -> None:
        self.told.append("touched")

    def _freed(self, outcome: str | None, cached_tokens: int | None) -> None:
        self.told.append(f"freed {outcome}")


class Placing:
    """A look for a worker, which the test goes on with."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


class OneRequest(RuleBasedStateMachine):
    WORKERS = 3

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.uses: list[BookedUse] = []
        self.placing: Placing | None = None
        self.places = 0
        self.over = 0
        self.worker: ClientConnection | None = None
        self.worker_transport: Transport | None = None
        self.endpoints = [Upstream(f"http://w{n}:1", n, 0.0) for n in range(self.WORKERS)]
        self.client_transport = Transport()
        self.client_is_there = True
        self.client_is_slow = False
        self.pieces = 0
        self.has_head = False
        self.connections = Connections(lambda call: None)
        self.client = StreamingProtocol(self.app, self.connections)
        self.client_transport.protocol = self.client
        self.client.connection_made(self.client_transport)
        self.client.data_received(REQUEST)

    def app(self, request: Request) -> bytes | PendingReply:
        self.errand = ProxiedRequest(
            request,
            b"id",
            "lease",
            self.counts,
            self.address,
            lambda use, outcome: None,
            self.ended,
        )
        self.errand.begin()
        return self.errand.reply

    def address(self, errand: ProxiedRequest) -> Any:
        self.places += 1
        self.placing = Placing()
        return self.placing

    def ended(self, errand: ProxiedRequest) -> None:
        self.over += 1

    @property
    def is_looking(self) -> bool:
        return self.placing is not None and not self.placing.is_cancelled and not self.over

    @property
    def may_end(self) -> bool:
        """Whether something that ends it may happen now."""
        return True

    # -- a worker is looked for --------------------------------------------------------------------

    @precondition(lambda self: self.is_looking)
    @rule(refuses=st.booleans())
    def choose(self, refuses: bool) -> None:
        self.placing = None
        errand = self.errand
        if errand.use is None:
            free = [each for each in self.endpoints if each.text not in errand.tried]
            if not free:
                errand.fail(502, "nobody is left")
                return
            use = BookedUse(free[0])
            self.uses.append(use)
            errand.take_over(use)
        assert errand.use is not None
        if refuses:
            errand.refused("connection refused")
            return
        worker = errand.use.endpoint.kept()
        if worker is None:
            worker = ClientConnection(errand.use.endpoint)
            self.worker_transport = Transport()
            worker.connection_made(self.worker_transport)
        self.worker, self.has_head, self.pieces = worker, False, 0
        errand.sent(worker)

    @precondition(lambda self: self.is_looking and self.may_end)
    @rule()
    def nobody_is_there(self) -> None:
        self.placing = None
        self.errand.fail(503, "no worker")

    # -- the worker --------------------------------------------------------------------------------

    @precondition(lambda self: self.worker is not None)
    @rule(
        piece=st.sampled_from(
            [b"", b"5\r\nhello\r\n", b"5\r\nhe", b"5\r\nhello\r\n3\r\nyou\r\n", b"x\r\n"]
        )
    )
    def answer(self, piece: bytes) -> None:
        worker = cast(ClientConnection, self.worker)
        if worker.is_free or not worker.is_open or self.has_head == (not piece):
            return
        assert self.worker_transport is not None
        if not self.worker_transport.reads:
            return
        data = piece if self.has_head else HEAD + piece
        self.has_head = True
        if piece == b"5\r\nhe":
            worker.data_received(data)
            if not worker.is_free:
                worker.data_received(b"llo\r\n")
        else:
            worker.data_received(data)

    @precondition(lambda self: self.worker is not None and not self.has_head)
    @rule(
        status=st.sampled_from([503, 429]),
        body=st.sampled_from([b"{}", b'{"a":"%b"}' % (b"x" * 70_000)]),
        whole=st.booleans(),
    )
    def shed(self, status: int, body: bytes, whole: bool) -> None:
        worker, transport = cast(ClientConnection, self.worker), self.worker_transport
        if worker.is_free or not worker.is_open or transport is None or not transport.reads:
            return
        answer = b"HTTP/1.1 %d x\r\nretry-after: 9\r\ncontent-length: %d\r\n\r\n%b"
        data = answer % (status, len(body), body)
        worker.data_received(data if whole else data[:-1])
        if not whole:
            worker.connection_lost(None)
            self.worker = None

    @precondition(lambda self: self.worker is not None and self.has_head)
    @rule()
    def end_answer(self) -> None:
        worker = cast(ClientConnection, self.worker)
        if not worker.is_free and worker.is_open:
            worker.data_received(b"0\r\n\r\n")

    @precondition(lambda self: self.worker is not None)
    @rule(lost=st.booleans())
    def worker_dies(self, lost: bool) -> None:
        worker = cast(ClientConnection, self.worker)
        self.worker = None
        worker.connection_lost(OSError("reset") if lost else None)

    @precondition(lambda self: self.worker is not None)
    @rule()
    def worker_is_silent_for_too_long(self) -> None:
        for endpoint in self.endpoints:
            endpoint.sweep(endpoint.now + 1_000.0, 600.0)

    # -- the client --------------------------------------------------------------------------------

    @precondition(lambda self: self.client_is_there and self.may_end)
    @rule(half=st.booleans())
    def hang_up(self, half: bool) -> None:
        self.client_is_there = False
        if half:
            self.client.eof_received()
        self.client.connection_lost(None)

    @precondition(lambda self: self.client_is_there)
    @rule()
    def slow_down_or_go_on(self) -> None:
        self.client_is_slow = not self.client_is_slow
        if self.client_is_slow:
            self.client.pause_writing()
        else:
            self.client.resume_writing()

    @precondition(lambda self: self.client_is_there and not self.over and self.may_end)
    @rule()
    def is_turned_away(self) -> None:
        self.client.turn_away("too much is held")
        if self.client_transport.state == "aborted":
            self.client_is_there = False
            self.client.connection_lost(None)

    @precondition(lambda self: self.client_is_there and not self.over and self.may_end)
    @rule()
    def takes_too_long(self) -> None:
        if not self.errand.reply.begun:
            self.errand.time_out(5.0)

    @rule()
    def others_were_retried(self) -> None:
        while self.counts.retry_budget.take():
            pass

    @rule()
    def time_passes(self) -> None:
        if self.errand.use is not None:
            self.errand.use.touch()

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def each_lease_is_ended_once_and_all_but_the_last_before_the_next(self) -> None:
        for use in self.uses:
            ends = [each for each in use.told if each.startswith("freed")]
            assert len(ends) <= 1
            assert use.is_over == bool(ends)
            if use is not self.uses[-1] or self.over or self.errand.use is not use:
                assert ends

    @invariant()
    def it_is_over_once_and_then_nothing_is_under_way(self) -> None:
        assert self.over <= 1
        assert self.counts.active == 1 - self.over
        if self.over:
            assert all(use.is_over for use in self.uses)
            assert self.placing is None or self.placing.is_cancelled
            assert all(each.is_free for endpoint in self.endpoints for each in endpoint.open)

    @invariant()
    def a_client_who_is_gone_ends_it(self) -> None:
        if not self.client_is_there:
            assert self.over

    @invariant()
    def somebody_is_at_it(self) -> None:
        """Nobody waits for ever: a worker is asked or looked for, or it is over."""
        if not self.over:
            busy = [
                each for endpoint in self.endpoints for each in endpoint.open if not each.is_free
            ]
            assert self.is_looking or len(busy) == 1

    @invariant()
    def a_worker_waits_for_a_slow_client(self) -> None:
        if self.client_is_slow and self.client_is_there and not self.over:
            for endpoint in self.endpoints:
                assert not any(each.waits for each in endpoint.open)

    @invariant()
    def the_client_gets_one_answer(self) -> None:
        written = b"".join(self.client_transport.writes)
        assert written.count(b"HTTP/1.1 ") <= 1
        if self.over and self.client_is_there and self.client_transport.state == "open":
            assert written.endswith((b"0\r\n\r\n", b"}", b"x" * 100))

    @invariant()
    def it_fails_at_two_workers_at_most(self) -> None:
        assert sum("freed failed" in use.told for use in self.uses) <= 2

    @invariant()
    def a_begun_answer_is_told_once(self) -> None:
        for use in self.uses:
            assert use.told.count("begun") <= 1


OneRequest.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestOneRequest = OneRequest.TestCase


class OnePair(OneRequest):
    """The same with workers that only prefill: the last three."""

    WORKERS = 6

    def __init__(self) -> None:
        self.legs: list[tuple[BookedUse, BookedUse]] = []  # of the prefill and the decode worker
        self.answers = 0  # with params, of prefill workers
        self.sent: list[int] = []  # params
        super().__init__()

    @property
    def may_end(self) -> bool:
        return bool(self.legs)

    def address(self, errand: ProxiedRequest) -> Any:
        if errand.routed is None:
            errand.routed = Routed("m", "default", cast(Any, None), b"{}", None, streams=False)
        return super().address(errand)

    @precondition(lambda self: self.is_looking)
    @rule(refuses=st.booleans(), pairs=st.booleans(), ages=st.booleans())
    def choose(self, refuses: bool, pairs: bool = True, ages: bool = False) -> None:
        self.placing = None
        errand = self.errand
        if ages and errand.held is not None:
            errand.held.answered_at -= 21.0
        if errand.use is None:
            free = [each for each in self.endpoints if each.text not in errand.tried]
            if not free or free[0] in self.endpoints[3:] or errand.attempts >= 5:
                errand.fail(502, "nobody is left")
                return
            use = BookedUse(free[0])
            self.uses.append(use)
            assert errand.routed is not None
            if pairs and errand.held is None and not errand.routed.bars_pair:
                use.leg = BookedUse(free[-1])
                self.legs.append((use.leg, use))
            errand.take_over(use)
        if errand.held is not None and errand.held.are_old:
            errand.run_anew()
        elif refuses:
            errand.refused("connection refused")
        else:
            self.go()

    def at(self) -> State:
        return self.errand.state

    def go(self) -> None:
        endpoint = self.errand.asked.endpoint
        worker = None if self.errand.is_stale else endpoint.kept()
        if worker is None:
            worker = ClientConnection(endpoint)
            worker.connection_made(Transport())
        self.worker, self.has_head, self.pieces = worker, False, 0
        self.worker_transport = cast(Transport, worker._transport)
        self.worker_transport.take()
        self.errand.sent(worker)
        body = json.loads(self.worker_transport.take().partition(b"\r\n\r\n")[2])
        if self.errand.state is State.SENT and "kv_transfer_params" in body:
            self.sent.append(int(body["kv_transfer_params"]["remote_request_id"]))

    @precondition(lambda self: self.is_looking and self.errand.use is None)
    @rule(refuses=st.booleans(), then=st.sampled_from([None, 500, "refuses", "lost", "ages"]))
    def prefill_and_go_on(self, refuses: bool, then: object) -> None:
        """What is often only tried after much else."""
        self.choose(False)
        if self.at() is State.PREFILLING:
            self.prefill(True)
            if then is not None and self.is_looking:
                self.choose(then == "refuses", ages=then == "ages")
            if then == 500 and self.at() is State.SENT:
                self.answers_an_error(500)
            if then == "lost" and self.at() is State.SENT:
                self.worker_dies(True)

    @precondition(lambda self: self.errand.state is State.PREFILLING and not self.has_head)
    @rule(has_params=st.booleans())
    def prefill(self, has_params: bool) -> None:
        told: dict[str, Any] = {"usage": {"prompt_tokens": 9}}
        if has_params:
            self.answers += 1
            told["kv_transfer_params"] = {**PARAMS, "remote_request_id": str(self.answers)}
        text = json.dumps(told).encode()
        worker = cast(ClientConnection, self.worker)
        worker.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))

    @precondition(lambda self: self.worker is not None and not self.has_head)
    @rule(status=st.sampled_from([400, 500]))
    def answers_an_error(self, status: int) -> None:
        worker = cast(ClientConnection, self.worker)
        if not worker.is_free and worker.is_open:
            worker.data_received(b"HTTP/1.1 %d x\r\ncontent-length: 2\r\n\r\n{}" % status)

    @invariant()
    def params_are_sent_once(self) -> None:
        assert len(set(self.sent)) == len(self.sent)

    @invariant()
    def a_leg_ends_once_and_not_after_its_decode_worker_s_use(self) -> None:
        for leg, use in self.legs:
            ends = [each for each in leg.told if each.startswith("freed")]
            assert len(ends) == leg.is_over
            assert leg.is_over or not use.is_over
            assert leg.is_over == (self.errand.use is not use or self.errand.asked is use)

    @invariant()
    def it_fails_at_two_workers_at_most(self) -> None:
        uses = [*self.uses, *(leg for leg, _ in self.legs)]
        assert sum("freed failed" in use.told for use in uses) <= 2


OnePair.TestCase.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
TestOnePair = OnePair.TestCase


class Errand:
    """A request that came in, whose workers a test chooses."""

    def __init__(self, routed: Routed | None = None) -> None:
        self.judged: list[str] = []
        self._routed = routed
        self.client = StreamingProtocol(self._app, Connections(lambda _: None))
        self.transport = Transport()
        self.client.connection_made(self.transport)
        self.client.data_received(REQUEST)

    def _app(self, request: Request) -> PendingReply:
        judge: Any = lambda use, outcome: self.judged.append(outcome)  # noqa: E731
        given = (request, b"id", "lease", Counts(), self._place, judge, lambda _: None)
        self.of = ProxiedRequest(*given)
        self.of.begin()
        return self.of.reply

    def _place(self, proxied: ProxiedRequest) -> Any:
        proxied.routed = self._routed
        return Placing()

    def sent_to_pair(
        self, prefill: int, decode: int
    ) -> tuple[BookedUse, ClientConnection, Transport]:
        """A pair of workers is chosen, and it goes to the prefill worker."""
        leg = BookedUse(Upstream(f"http://w{prefill}:1", prefill, 0.0))
        self.use(decode).leg = leg
        return leg, *self.sent(leg)

    def use(self, number: int) -> BookedUse:
        """A worker of this number is chosen."""
        use = BookedUse(Upstream(f"http://w{number}:1", number, 0.0))
        self.of.take_over(use)
        return use

    def sent(self, use: BookedUse, requests: int = 0) -> tuple[ClientConnection, Transport]:
        """It is sent, on a connection that had so many requests before."""
        worker, transport = ClientConnection(use.endpoint), Transport()
        worker.connection_made(transport)
        worker.requests = requests
        self.of.sent(worker)
        return worker, transport

    def sent_to(self, number: int) -> tuple[BookedUse, ClientConnection, Transport]:
        """It goes to a worker of this number."""
        use = self.use(number)
        return use, *self.sent(use)


# -- the table of states ---------------------------------------------------------------------------


def cells() -> list[tuple[str, State, State]]:
    """(what happens, state, next state) of the table in the module's docstring."""
    text = Path(proxied_request.__file__).with_name("proxied_request.py").read_text()
    table = text[text.index("    what happens") :].partition('\n"""')[0]
    header, *rows = table.splitlines()  # not of `__doc__`, which a compiled module lacks
    columns = [(header.index(each.name), each) for each in State if each is not State.OVER]
    first = columns[0][0]
    return [
        (row[:first].strip(), state, State[name])
        for row in rows
        for at, state in columns
        if (name := row[at : at + 11].strip())
    ]


EVENT = b'data: {"choices":[{}]}\n\n'


class Driven:
    """A request in a state, to which something happens."""

    def __init__(self, state: State) -> None:
        self.errand = Errand(Routed("m", "default", cast(Any, None), b"{}", None, streams=True))
        self.worker: ClientConnection | None = None
        if state is State.PREFILLING:
            _, self.worker, _ = self.errand.sent_to_pair(0, 1)
        elif state is not State.LOOKING:
            _, self.worker, _ = self.errand.sent_to(0)
        if state is State.SHEDDING:
            self.worker_sends(b"HTTP/1.1 503 x\r\ntransfer-encoding: chunked\r\n\r\n")
        if state is State.RELAYING:
            self.worker_sends(HEAD + self.chunk(EVENT))
        assert self.of.state is state

    @property
    def of(self) -> ProxiedRequest:
        return self.errand.of

    def chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def worker_sends(self, data: bytes) -> None:
        assert self.worker is not None
        self.worker.data_received(data)

    def take(self) -> None:
        self.of.take_over(BookedUse(Upstream("http://w9:1", 9, 0.0)))

    def happens(self, what: str) -> None:
        begins = self.of.state in (State.SENT, State.PREFILLING)
        head = HEAD if begins else b""
        if what == "sent":
            self.errand.sent_to(0)
        elif what == "sent to prefill":
            self.errand.sent_to_pair(0, 1)
        elif what == "refused":
            self.take()
            self.of.refused("connection refused")
        elif what == "fail":
            self.of.fail(503, "no worker")
        elif what == "head of an error":
            self.worker_sends(b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n")
        elif what == "head of another":
            self.worker_sends(HEAD)
        elif what == "first error event":
            self.worker_sends(HEAD + self.chunk(FAILED % 500))
        elif what == "incomplete event":
            self.worker_sends(HEAD + self.chunk(EVENT[:-1]))
        elif what == "body":
            self.worker_sends(head + self.chunk(EVENT))
        elif what == "end":
            self.worker_sends(head + b"0\r\n\r\n")
        elif what == "lost":
            assert self.worker is not None
            self.worker.connection_lost(None)
        elif what == "lost, was kept":
            self.of.on_lost("closed", True)
        elif what == "hung up":
            self.errand.client.connection_lost(None)
        else:
            assert what == "timed out"
            self.of.time_out(5.0)


@pytest.mark.parametrize(("what", "state", "told"), cells())
def test_the_state_changes_as_the_table_says(what: str, state: State, told: State) -> None:
    driven = Driven(state)
    driven.happens(what)
    assert driven.of.state is told
    if told is State.LOOKING and (what, state) not in FREE:
        driven = Driven(state)
        while driven.of._counts.retry_budget.take():
            pass
        driven.happens(what)
        assert driven.of.state is State.OVER


# Where another worker is tried, or the next of a pair, at no cost of the budget of retries.
FREE = {("refused", State.LOOKING), ("end", State.PREFILLING)}


def test_the_table_has_every_state_and_every_change_of_it() -> None:
    changes = {(state, told) for _, state, told in cells()}
    assert {each for change in changes for each in change} == set(State)
    assert (State.RELAYING, State.LOOKING) not in changes
    assert len(cells()) == 33


def test_the_last_that_shed_a_request_is_heard_when_no_other_can_be_tried() -> None:
    errand = Errand()
    transport = errand.transport
    for number, status in enumerate((503, 429)):
        use, worker, _ = errand.sent_to(number)
        answer = b"HTTP/1.1 %d Busy\r\nretry-after: %d\r\ntransfer-encoding: chunked\r\n\r\n"
        worker.data_received(answer % (status, number) + b"4\r\nbusy\r\n0\r\n\r\n")
        assert use.told == ["freed None"]
        assert transport.writes == []
        assert worker.is_free
        assert worker.is_open
    errand.of.fail(502, "none is left")
    head, _, body = b"".join(transport.writes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 Busy\r\nretry-after: 1\r\n")
    assert {b"x-lean-worker: http://w1:1", b"content-length: 4"} <= set(head.split(b"\r\n"))
    assert b"transfer-encoding" not in head
    assert (body, errand.judged, errand.of.status) == (b"busy", [], 429)


@pytest.mark.parametrize("length", [65_537, 3 << 20])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_kept_error_is_passed_on_whole(length: int, is_chunked: bool) -> None:
    errand, body = Errand(), b"x" * length
    _, worker, _ = errand.sent_to(0)
    if is_chunked:
        worker.data_received(b"HTTP/1.1 503 Busy\r\ntransfer-encoding: chunked\r\n\r\n")
        worker.data_received(b"%x\r\n%b\r\n0\r\n\r\n" % (length, body))
    else:
        worker.data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % length + body)
    errand.of.fail(502, "none is left")
    head, _, given = b"".join(errand.transport.writes).partition(b"\r\n\r\n")
    assert b"content-length: %d" % length in head.split(b"\r\n")
    assert given == body


def test_an_error_that_is_too_long_to_be_kept_is_no_answer() -> None:
    errand = Errand()
    use, worker, transport = errand.sent_to(0)
    worker.data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % (1 << 30))
    pieces = 0
    while not use.is_over:
        worker.data_received(b"x" * 65_536)
        pieces += 1
    assert (pieces, use.told, transport.state) == (129, ["freed failed"], "aborted")
    errand.of.fail(502, "none is left")
    assert b"".join(errand.transport.writes).startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 9, 40, -1, "size"])
@pytest.mark.parametrize(
    ("event", "is_retried"),
    [
        *((FAILED % 500, True), (FAILED % 502, True), (FAILED % 400, False)),
        *((FAILED_MESSAGE % b"api_error", True), (FAILED_MESSAGE % b"not_found_error", False)),
    ],
)
def test_a_stream_that_begins_with_an_error_of_the_engine_is_asked_for_once_more(
    event: bytes, is_retried: bool, cut: int | str, is_read: bool
) -> None:
    """In however many reads the event comes."""
    additions = Additions()
    if is_read:
        told = b'{"model":"m","messages":[],"stream":true}'
        additions.ask_for_ids(ModelRequest("/v1/chat/completions", told), lambda *ids: None)
    sent = Routed("m", "default", cast(Any, None), b"{}", None, streams=True, additions=additions)
    errand = Errand(sent)
    for number in range(1 + is_retried):
        assert errand.transport.take() == b""
        use, worker, _ = errand.sent_to(number)
        worker.data_received(HEAD)
        if isinstance(cut, str):
            pieces = [b"%x\r\n" % len(event), event + b"\r\n"]
        else:
            parts = [event[:cut], event[cut:]]
            pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part]
        for piece in pieces:
            worker.data_received(piece)
        worker.data_received(b"0\r\n\r\n")
        assert use.told[-1] == ("freed failed" if is_retried and not number else "freed ok")
    _, _, body = errand.transport.take().partition(b"\r\n\r\n")
    assert body == b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)


def test_a_failed_stream_is_what_is_heard_when_no_other_worker_can_be_tried() -> None:
    errand = Errand(Routed("m", "default", cast(Any, None), b"{}", None, streams=True))
    _, worker, _ = errand.sent_to(0)
    event = FAILED % 500
    worker.data_received(HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
    errand.of.fail(502, "none is left")
    head, _, body = errand.transport.take().partition(b"\r\n\r\n")
    assert (head[:12], body) == (b"HTTP/1.1 200", event)


def test_a_request_s_body_is_let_go_of_when_its_answer_begins() -> None:
    sent = Routed("m", "default", cast(Any, None), b"{}", why_not=None, streams=True)
    errand = Errand(sent)
    _, worker, worker_transport = errand.sent_to(0)
    assert b"".join(worker_transport.writes).endswith(b"\r\n\r\n{}")
    worker.data_received(HEAD)
    assert (errand.of.request.body, sent.body) == (b"{}", b"{}")
    event = b'data: {"choices":[{}]}\n\n'
    worker.data_received(b"%x\r\n%b\r\n" % (len(event), event))
    assert (errand.of.request.body, sent.body) == (b"", b"")


def broken(worker: ClientConnection) -> None:
    worker.data_received(HEAD)
    worker.connection_lost(OSError("reset"))


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_request_whose_connections_break_is_sent_to_two_workers(is_routed: bool) -> None:
    """By a worker that has accepted it, before or after the head of its answer."""
    routed = Routed("m", "default", cast(Any, None), b"{}", None, streams=True)
    errand = Errand(routed if is_routed else None)
    first, worker, _ = errand.sent_to(0)
    worker.connection_lost(OSError("reset"))
    assert (first.told, errand.transport.writes) == (["freed failed"], [])
    errand.use(1)
    errand.of.refused("connection refused")
    second, worker, _ = errand.sent_to(2)
    broken(worker)
    assert (second.told, errand.of.is_over) == (["freed failed"], True)
    assert b"".join(errand.transport.writes).startswith(b"HTTP/1.1 502 ")
    assert errand.judged == ["failed", "refused", "failed"]


def test_a_kept_connection_that_ends_counts_until_the_same_worker_answers() -> None:
    """Its process may have ended because of the request: it then refuses the next connection."""
    for answers in (False, True):
        errand = Errand(Routed("m", "default", cast(Any, None), b"{}", None, streams=True))
        for number in range(2):
            use = errand.use(number)
            worker, _ = errand.sent(use, requests=1)
            worker.connection_lost(None)
            assert use.told == []
            if answers:
                worker, _ = errand.sent(use)
                worker.data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n")
            else:
                errand.of.refused("connection refused")
        assert errand.of.is_over is not answers


def test_an_error_that_was_kept_is_heard_if_the_next_worker_s_connection_breaks() -> None:
    errand = Errand(Routed("m", "default", cast(Any, None), b"{}", None, streams=True))
    _, worker, _ = errand.sent_to(0)
    worker.data_received(b"HTTP/1.1 500 Died\r\ncontent-length: 4\r\n\r\ndied")
    assert errand.transport.writes == []
    broken(errand.sent_to(1)[1])
    head, _, body = errand.transport.take().partition(b"\r\n\r\n")
    assert (head[:12], body) == (b"HTTP/1.1 500", b"died")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 503 x", b"HTTP/1.1 500 x", FAILED % 500])
def test_a_request_that_names_other_engines_is_sent_once(answer: bytes) -> None:
    told = Routed("m", "default", cast(Any, None), b"{}", None, streams=True, is_sent_once=True)
    errand = Errand(told)
    errand.use(0)
    errand.of.refused("connection refused")  # nothing was sent
    worker, _ = errand.sent(errand.use(1), requests=1)
    if answer.startswith(b"data"):
        worker.data_received(HEAD + b"%x\r\n%b\r\n0\r\n\r\n" % (len(answer), answer))
    elif answer:
        worker.data_received(answer + b"\r\ncontent-length: 0\r\n\r\n")
    else:
        worker.connection_lost(None)
    assert errand.of.is_over
    status = {b"": b"502", b"HTT": answer[9:12], b"dat": b"200"}[answer[:3]]
    assert b"".join(errand.transport.writes).startswith(b"HTTP/1.1 " + status)
