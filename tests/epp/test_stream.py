"""One ext_proc stream: its table of states, and what it answers in every body mode."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lean_selector.epp import stream
from lean_selector.epp.picking import Picked, Refused, RequestToRoute
from lean_selector.epp.stream import ExtProcStream, Phase
from lean_selector.gateway.answers import Additions
from tests.epp.envoy_messages import pb
from tests.support.on_loop import on_loop

NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = range(5)
SSE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


class Use:
    def __init__(self) -> None:
        self.told: list[str] = []

    def prefill_complete(self, ttft_s: float | None = None) -> None:
        self.told.append("began" if ttft_s is None else "first token")

    def end(self, outcome: str | None, cached_tokens: int | None = None) -> None:
        self.told.append(f"ended {outcome}")

    def touch(self) -> None:
        self.told.append("touched")


class Driver:
    """A stream between a data plane, which is this, and a picker that answers when it is told."""

    def __init__(self, request_mode: int = DUPLEX, response_mode: int = DUPLEX) -> None:
        self.sent: list[Any] = []
        self.status: tuple[int, str] | None = None
        self.asked: list[RequestToRoute] = []
        self.use = Use()
        self.lengths: list[tuple[int, int]] = []
        self.is_cancelled = False
        self.later: Callable[[Picked | Refused], None] | None = None
        self.answers_at_once: Picked | Refused | None = None
        self.new_body: bytes | None = None
        self.picker = cast(
            Any,
            SimpleNamespace(
                counts=Counter(),
                refused=Counter(),
                live=set(),
                held_bytes=0,
                is_full=False,
                max_wait_s=1e6,
                queue_headers=None,
                pick=self._pick,
                follow=lambda choice, served: self.use.told.append(f"moved to {served.decode()}"),
            ),
        )
        self.modes = (request_mode, response_mode)
        self.of = ExtProcStream(self.picker, self)

    # the channel
    def send(self, *told: bytes) -> None:
        assert self.status is None, "nothing follows the end"
        self.sent += map(pb.ProcessingResponse.FromString, told)

    def finish(self, status: int = 0, text: str = "") -> None:
        self.status = status, text
        self.of.closed()

    # the picker
    def _pick(self, request: RequestToRoute, tell: Callable[[Picked | Refused], None]) -> Any:
        self.asked.append(request)
        if self.answers_at_once is not None:
            tell(self.answers_at_once)
            return None
        self.later = tell
        return SimpleNamespace(cancel=lambda: setattr(self, "is_cancelled", True))

    def chosen(self, streams: bool = True) -> Picked:
        routed: Any = SimpleNamespace(
            streams=streams,
            additions=Additions(),
            is_sent_once=False,
            on_lengths=lambda *lengths: self.lengths.append(lengths),
        )
        choice = Picked(b"10.0.0.1:8000", cast(Any, self.use), routed)
        choice.body = self.new_body
        return choice

    def choose(self) -> None:
        assert self.later is not None
        self.later(self.chosen())

    # the data plane
    def tell(self, **fields: Any) -> "Driver":
        request = pb.ProcessingRequest(**fields)
        if not self.of._metadata and self.of.phase is Phase.BEGUN:
            request.protocol_config.request_body_mode = self.modes[0]
            request.protocol_config.response_body_mode = self.modes[1]
        self.of.take(request.SerializeToString())
        return self

    def head(self, is_last: bool = False, **headers: str) -> "Driver":
        return self.tell(request_headers=http_headers({":path": "/v1/x?q", **headers}, is_last))

    def piece(self, body: bytes, is_last: bool = False) -> "Driver":
        return self.tell(request_body=pb.HttpBody(body=body, end_of_stream=is_last))

    def response(self, is_last: bool = False, status: str = "200") -> "Driver":
        told = {":status": status, "content-type": "text/event-stream"}
        return self.tell(response_headers=http_headers(told, is_last))

    def answer(self, body: bytes, is_last: bool = False) -> "Driver":
        return self.tell(response_body=pb.HttpBody(body=body, end_of_stream=is_last))

    def kinds(self) -> list[str]:
        return [each.WhichOneof("response") for each in self.sent]

    def passed(self, kind: str) -> tuple[bytes, list[bool]]:
        told = [
            getattr(each, kind).response.body_mutation.streamed_response
            for each in self.sent
            if each.WhichOneof("response") == kind
        ]
        return b"".join(each.body for each in told), [each.end_of_stream for each in told]


def http_headers(headers: dict[str, str], is_last: bool) -> Any:
    told = pb.HttpHeaders(end_of_stream=is_last)
    for name, text in headers.items():
        told.headers.headers.add(key=name, raw_value=text.encode())
    return told


TRAILERS = {"request_trailers": pb.HttpTrailers()}
RESPONSE_TRAILERS = {"response_trailers": pb.HttpTrailers()}


# -- the table of states ---------------------------------------------------------------------------


# The next state for what happens in each state. Where a cell is empty, the data plane broke the
# protocol, and the stream is refused. Requests without a body, and all requests in STREAMED and
# NONE, go from BEGUN to CHOOSING (`head, no body`).
TABLE = """
    what happens          BEGUN     BODY      CHOOSING   SENT       ANSWERING  OVER
    head                  BODY
    head, no body         CHOOSING
    piece                           BODY      CHOOSING   SENT       ANSWERING  OVER
    last piece                      CHOOSING  CHOOSING   SENT       ANSWERING  OVER
    trailers                        CHOOSING  CHOOSING   SENT       ANSWERING  OVER
    chosen                                    SENT
    refused                                   OVER
    response head                   OVER      OVER       ANSWERING             OVER
    response piece                  OVER      OVER       ANSWERING  ANSWERING  OVER
    last response piece             OVER      OVER       OVER       OVER       OVER
    response trailers               OVER      OVER       OVER       OVER       OVER
    closed                OVER      OVER      OVER       OVER       OVER       OVER
"""


def cells() -> dict[tuple[str, Phase], Phase]:
    """(what happens, state): the next state."""
    header, *rows = TABLE.strip("\n").splitlines()
    columns = [(header.index(f" {each.name}") + 1, each) for each in Phase]
    first = columns[0][0]
    return {
        (row[:first].strip(), state): Phase[name]
        for row in rows
        for at, state in columns
        if (name := row[at : at + 10].strip())
    }


EVENTS: dict[str, Callable[[Driver], object]] = {
    "head": lambda driver: driver.head(),
    "head, no body": lambda driver: driver.head(is_last=True),
    "piece": lambda driver: driver.piece(b"x"),
    "last piece": lambda driver: driver.piece(b"x", is_last=True),
    "trailers": lambda driver: driver.tell(**TRAILERS),
    "chosen": lambda driver: driver.choose(),
    "refused": lambda driver: driver.later and driver.later(Refused(503, "nobody")),
    "response head": lambda driver: driver.response(),
    "response piece": lambda driver: driver.answer(b"x"),
    "last response piece": lambda driver: driver.answer(b"x", is_last=True),
    "response trailers": lambda driver: driver.tell(**RESPONSE_TRAILERS),
    "closed": lambda driver: driver.of.closed(),
}
OF_THE_PICKER = {"chosen", "refused"}
CHANGES = [(what, state) for what in EVENTS for state in Phase]


def in_state(state: Phase) -> Driver:
    driver = Driver()
    if state is Phase.BEGUN:
        return driver
    driver.head()
    if state is Phase.BODY:
        return driver
    driver.piece(b"{}", is_last=True)
    if state is Phase.CHOOSING:
        return driver
    driver.choose()
    if state is Phase.SENT:
        return driver
    driver.response()
    if state is Phase.OVER:
        driver.answer(b"x", is_last=True)
    return driver


@pytest.mark.parametrize(("what", "state"), CHANGES)
@on_loop
async def test_the_state_changes_as_the_table_says(what: str, state: Phase) -> None:
    if what in OF_THE_PICKER and state is not Phase.CHOOSING:
        assert (what, state) not in cells()
        return
    driver = in_state(state)
    assert driver.of.phase is state
    EVENTS[what](driver)
    told = cells().get((what, state))
    if told is None:
        assert driver.status is not None
        assert driver.status[0] == stream.INVALID_ARGUMENT
        assert driver.picker.counts["malformed"] == 1
        told = Phase.OVER
    assert driver.of.phase is told
    assert (driver.of in driver.picker.live) == (told is not Phase.OVER)
    driver.of.closed()
    assert driver.picker.held_bytes == 0
    ended = [each for each in driver.use.told if each.startswith("ended")]
    had_worker = Phase.SENT in (state, told) or state is Phase.ANSWERING or state is Phase.OVER
    assert len(ended) == had_worker


def test_the_table_has_every_state_and_event() -> None:
    assert {state for _, state in cells()} | set(cells().values()) == set(Phase)
    assert {what for what, _ in cells()} == EVENTS.keys()


# -- what is answered ------------------------------------------------------------------------------


@on_loop
async def test_duplex_answers_nothing_before_the_body_is_whole_then_headers_and_pieces() -> None:
    driver = Driver()
    driver.head(False, **{"x-whose": "me"}).piece(b"a" * 70_000).piece(b"b" * 70_000)
    assert driver.sent == []
    driver.piece(b"", is_last=True).piece(b"", is_last=True)  # Envoy repeats the last one
    assert driver.asked[0].path == "/v1/x"
    assert b"\r\nx-whose: me\r\n" in driver.asked[0].section
    assert driver.asked[0].body == b"a" * 70_000 + b"b" * 70_000
    assert driver.asked[0].forwards
    driver.choose()
    assert driver.kinds()[0] == "request_headers"
    body, ends = driver.passed("request_body")
    assert body == driver.asked[0].body
    assert ends == [False, False, True]
    assert driver.picker.held_bytes == 0


@on_loop
async def test_duplex_sends_the_body_that_the_picker_made() -> None:
    driver = Driver()
    driver.new_body = b'{"more":1}'
    driver.head().piece(b"{}", is_last=True)
    driver.choose()
    assert driver.passed("request_body") == (b'{"more":1}', [True])


@on_loop
async def test_duplex_lets_trailers_end_the_body() -> None:
    driver = Driver()
    driver.head().piece(b"{}").tell(**TRAILERS)
    driver.choose()
    assert driver.kinds() == ["request_headers", "request_body", "request_trailers"]
    assert driver.passed("request_body") == (b"{}", [False])


@on_loop
async def test_an_empty_body_ends_where_it_has_to() -> None:
    driver = Driver()
    driver.head().piece(b"", is_last=True)
    assert driver.asked[0].body is None
    driver.choose()
    assert driver.passed("request_body") == (b"", [True])


@on_loop
async def test_without_a_body_the_headers_are_answered_alone() -> None:
    for mode in range(5):
        driver = Driver(mode)
        driver.head(is_last=True)
        assert driver.asked[0].body is None
        driver.choose()
        assert driver.kinds() == ["request_headers"]
        assert driver.sent[0].request_headers.response.clear_route_cache


@on_loop
async def test_buffered_names_the_worker_in_the_answer_to_the_body() -> None:
    driver = Driver(BUFFERED, NONE)
    driver.head()
    assert driver.kinds() == ["request_headers"]
    assert not driver.sent[0].request_headers.HasField("response")
    driver.piece(b"{}", is_last=True)
    assert driver.asked[0].body == b"{}"
    assert not driver.asked[0].forwards
    driver.choose()
    driver.tell(**TRAILERS)
    assert driver.kinds() == ["request_headers", "request_body", "request_trailers"]
    told = driver.sent[1].request_body.response
    assert told.clear_route_cache
    assert not told.HasField("body_mutation")
    assert told.header_mutation.set_headers[0].header.raw_value == b"10.0.0.1:8000"


@on_loop
async def test_trailers_without_a_body_name_no_worker_in_buffered() -> None:
    driver = Driver(BUFFERED, NONE)
    driver.head().tell(**TRAILERS)
    assert driver.kinds() == ["request_headers", "request_trailers"]
    assert driver.asked == []
    driver.response().of.closed()
    assert not driver.picker.live


@pytest.mark.parametrize("mode", [STREAMED, PARTIAL, NONE])
@on_loop
async def test_where_the_body_comes_later_the_head_names_the_worker(mode: int) -> None:
    driver = Driver(mode, NONE)
    driver.head()
    assert driver.asked[0].body == b""
    driver.piece(b"ab")  # while it is chosen
    assert driver.sent == []
    driver.choose()
    driver.piece(b"", is_last=True)
    assert driver.kinds() == ["request_headers", "request_body", "request_body"]
    assert driver.passed("request_body") == (b"", [False, False])


@on_loop
async def test_a_body_above_the_bound_is_let_through_by_load() -> None:
    driver = Driver()
    driver.answers_at_once = driver.chosen()
    driver.head()
    mib = b"x" * (1 << 20)
    for _ in range(10):
        driver.piece(mib)
    driver.piece(b"end", is_last=True)
    assert [each.body for each in driver.asked] == [b""]
    body, ends = driver.passed("request_body")
    assert body == mib * 10 + b"end"
    assert ends.count(True) == 1
    assert ends[-1]
    assert driver.picker.held_bytes == 0


@on_loop
async def test_a_body_does_not_grow_without_bound_while_it_waits() -> None:
    driver = Driver()
    driver.head()
    for _ in range(17):
        driver.piece(b"x" * (1 << 20))
    assert driver.sent[-1].immediate_response.status.code == 413
    assert driver.is_cancelled
    assert driver.status == (0, "")
    assert driver.picker.held_bytes == 0


@on_loop
async def test_bodies_do_not_wait_where_too_much_is_held() -> None:
    driver = Driver()
    driver.picker.is_full = True
    driver.head().piece(b"{")
    assert [each.body for each in driver.asked] == [b""]


@on_loop
async def test_responses_are_not_read_where_too_much_is_held() -> None:
    driver = in_state(Phase.SENT)
    driver.response()
    event = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
    driver.answer(event + event[:9])
    assert driver.picker.held_bytes == 9
    driver.picker.is_full = True
    driver.answer(event[9:20])
    assert driver.picker.held_bytes == 0
    driver.answer(event[20:], is_last=True)
    assert driver.passed("response_body") == (event + event, [False, False, True])
    assert driver.use.told == ["first token", "ended ok"]


@on_loop
async def test_a_refusal_answers_the_client_and_ends_the_stream() -> None:
    driver = Driver()
    driver.answers_at_once = Refused(503, 'no "worker"', "no_worker")
    driver.head().piece(b"{}", is_last=True)
    told = driver.sent[0].immediate_response
    assert told.status.code == 503
    assert b'\\"worker\\"' in bytes(told.body, "utf8") if isinstance(told.body, str) else told.body
    headers = {each.header.key: each.header.raw_value for each in told.headers.set_headers}
    assert headers == {"content-type": b"application/json", "retry-after": b"1"}
    assert driver.status == (0, "")
    assert driver.picker.refused == {"503": 1}


@on_loop
async def test_who_waits_too_long_is_answered_429() -> None:
    driver = Driver()
    driver.head().piece(b"{}", is_last=True)
    request = driver.asked[0]
    driver.of._waited_too_long(request)  # for the tokens of its prompt: it does without
    assert driver.is_cancelled
    assert driver.asked[1] is request
    assert not request.awaits_prompt
    assert driver.sent == []
    driver.of._waited_too_long(request)  # for a worker, or an engine that says nothing
    assert driver.sent[0].immediate_response.status.code == 429
    assert driver.is_cancelled


# -- the life of a request -------------------------------------------------------------------------


@on_loop
async def test_a_head_is_no_first_token_and_usage_is_read() -> None:
    driver = in_state(Phase.SENT)
    driver.response()
    assert driver.use.told == []
    driver.answer(SSE[:10])
    assert driver.use.told == []
    driver.answer(SSE[10:])
    assert driver.use.told == ["first token"]
    driver.answer(USAGE).answer(b"", is_last=True)
    assert driver.use.told == ["first token", "ended ok"]
    assert driver.lengths == [(9, 2)]
    body, ends = driver.passed("response_body")
    assert body == SSE + USAGE
    assert ends.count(True) == 1
    assert ends[-1]
    assert all(each.response_body.HasField("response") for each in driver.sent
               if each.WhichOneof("response") == "response_body")  # fmt: skip


@on_loop
async def test_response_trailers_end_the_request_after_what_was_held() -> None:
    driver = in_state(Phase.ANSWERING)
    driver.answer(b'data: {"cho')
    driver.tell(**RESPONSE_TRAILERS)
    assert driver.kinds()[-2:] == ["response_body", "response_trailers"]
    assert driver.passed("response_body") == (b'data: {"cho', [False])
    assert driver.use.told[-1] == "ended ok"


@pytest.mark.parametrize("mode", [STREAMED, BUFFERED, PARTIAL])
@on_loop
async def test_bodies_of_responses_pass_unchanged_in_other_modes(mode: int) -> None:
    driver = Driver(BUFFERED, mode)
    driver.head().piece(b"{}", is_last=True)
    driver.choose()
    driver.response().answer(SSE).answer(USAGE, is_last=True)
    assert driver.kinds()[-2:] == ["response_body", "response_body"]
    assert not driver.sent[-1].response_body.HasField("response")
    assert driver.use.told == ["first token", "ended ok"]


@pytest.mark.parametrize(
    ("status", "outcome"), [("200", "ok"), ("500", "failed"), ("503", "None"), ("404", "ok")]
)
@on_loop
async def test_without_bodies_the_head_tells_the_outcome(status: str, outcome: str) -> None:
    driver = Driver(BUFFERED, NONE)
    driver.head().piece(b"{}", is_last=True)
    driver.choose()
    driver.response(status=status)
    assert driver.use.told == []
    driver.of.closed()
    assert driver.use.told == [f"ended {outcome}"]


@on_loop
async def test_a_broken_stream_tells_nothing_of_its_worker_unless_it_was_done() -> None:
    driver = in_state(Phase.ANSWERING)
    driver.answer(SSE)
    driver.of.closed()
    assert driver.use.told == ["first token", "ended None"]
    assert driver.picker.counts["broken"] == 1
    driver = in_state(Phase.ANSWERING)
    driver.answer(SSE + USAGE)
    driver.of.closed()  # OpenAI's client leaves after [DONE]
    assert driver.use.told == ["first token", "ended ok"]


@on_loop
async def test_only_where_nothing_of_the_response_is_sent_the_reservation_stays() -> None:
    driver = Driver(DUPLEX, NONE)
    driver.head().piece(b"{}", is_last=True)
    driver.choose()
    driver.of.closed(by_reset=True)
    assert driver.use.told == []
    assert driver.picker.counts["held"] == 1
    assert not driver.picker.live
    for modes, by_reset in (((DUPLEX, NONE), False), ((DUPLEX, DUPLEX), True)):
        driver = Driver(*modes)
        driver.head().piece(b"{}", is_last=True)
        driver.choose()
        driver.of.closed(by_reset=by_reset)
        assert driver.use.told == ["ended None"]


@on_loop
async def test_the_reservation_follows_the_worker_that_has_answered() -> None:
    driver = in_state(Phase.SENT)
    request = pb.ProcessingRequest(response_headers=http_headers({":status": "200"}, False))
    request.metadata_context.filter_metadata["envoy.lb"].update(
        {"x-gateway-destination-endpoint-served": "10.0.0.2:8000"}
    )
    driver.of.take(request.SerializeToString())
    assert driver.use.told == ["moved to 10.0.0.2:8000"]


@on_loop
async def test_a_response_of_the_data_plane_itself_ends_the_search() -> None:
    driver = in_state(Phase.CHOOSING)
    driver.response(status="504")
    assert driver.is_cancelled
    assert driver.kinds() == ["response_headers"]
    assert driver.status is None


@on_loop
async def test_what_only_observes_is_refused_and_so_is_garbage() -> None:
    driver = Driver()
    driver.tell(observability_mode=True, request_headers=http_headers({}, False))
    assert driver.status is not None
    assert "observability_mode" in driver.status[1]
    driver = Driver()
    driver.of.take(b"\xff" * 50)
    assert driver.status is not None
    assert driver.status[0] == stream.INVALID_ARGUMENT


@on_loop
async def test_a_failure_of_ours_ends_one_stream(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver()
    driver.picker.pick = lambda *_: 1 / 0
    driver.head(is_last=True)
    assert driver.status is not None
    assert driver.status[0] == stream.INTERNAL
    assert driver.of.phase is Phase.OVER
