"""The parts of the client that do no I/O: backoff, the stream reader, the reservation's reports."""

import contextlib
import json
import random
from typing import Any

import httpx
import pytest

from lean_selector.client import service_calls
from lean_selector.client.backoff import Backoff
from lean_selector.client.completions import (
    MAX_EVENT_BYTES,
    CompletionStream,
    MalformedStream,
    completion_body,
    error_text,
)
from lean_selector.client.errors import (
    AlreadyExists,
    ClientError,
    InvalidRequest,
    NotFound,
    NoWorkerAvailable,
    ServiceRefused,
    ServiceUnreachable,
    service_refusal,
)
from lean_selector.client.reservation import Reservation
from lean_selector.client.routing import (
    Ask,
    Flow,
    OpenStream,
    Pause,
    Prompt,
    Release,
    Routing,
    Step,
    Terms,
)
from lean_selector.client.service_calls import Scope, Selected, Worker
from lean_selector.client.transport import ServiceAddress, Timeouts

# -- backoff --------------------------------------------------------------------------------------


def test_waits_double_have_jitter_and_end() -> None:
    backoff, rng = Backoff(max_retries=4, first_s=1.0, longest_s=6.0), random.Random(1)
    waits = [backoff.wait_s(attempt, rng) for attempt in range(5)]
    assert waits[4] is None
    for wait, base in zip(waits[:3], (1, 2, 4), strict=True):
        assert wait is not None
        assert base <= wait <= base + 1
    assert waits[3] == 6.0


def test_retry_after_is_honoured_up_to_the_longest_wait() -> None:
    backoff, rng = Backoff(first_s=1.0, longest_s=30.0), random.Random(1)
    assert backoff.wait_s(0, rng, 7.0) == 7.0
    assert backoff.wait_s(0, rng, 3600.0) == 30.0
    wait = backoff.wait_s(0, rng, 0.0)
    assert wait is not None
    assert wait >= 1.0


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidRequest),
        (422, InvalidRequest),
        (404, NotFound),
        (409, AlreadyExists),
        (503, NoWorkerAvailable),
        (429, NoWorkerAvailable),
        (500, ServiceRefused),
    ],
)
def test_each_status_has_its_class(status: int, kind: type[ServiceRefused]) -> None:
    error = service_refusal(status, "why")
    assert type(error) is kind
    assert str(error) == f"{status}: why"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "no workers"}', "no workers"),
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"message": "busy", "type": "x", "code": 503}', "busy"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b"<h1>gone</h1>", "<h1>gone</h1>"),
        (b"\xff", "\N{REPLACEMENT CHARACTER}"),
        (b"", "no reason given"),
    ],
)
def test_the_words_of_an_error_are_found_in_every_shape(body: bytes, text: str) -> None:
    assert error_text(body) == text


# -- exchanges ------------------------------------------------------------------------------------


def test_an_answer_that_is_not_the_expected_one_is_an_error() -> None:
    address = ServiceAddress("http://selector:8092/")
    call = service_calls.select({})
    assert address.request(call, Timeouts()).url == "http://selector:8092/select"
    with pytest.raises(ServiceRefused, match=r"200: not the expected answer: .*worker_id"):
        address.answer(call, httpx.Response(200, content=b"{}"))
    busy = httpx.Response(503, headers={"retry-after": "7"}, content=b'{"error": "busy"}')
    with pytest.raises(NoWorkerAvailable) as caught:
        address.answer(call, busy)
    assert caught.value.retry_after_s == 7.0
    dated = httpx.Response(503, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"})
    with pytest.raises(NoWorkerAvailable) as caught:
        address.answer(call, dated)
    assert caught.value.retry_after_s is None


def test_only_a_selection_may_take_long() -> None:
    address, timeouts = (
        ServiceAddress("http://s"),
        Timeouts(connect_s=1.0, service_s=2.0, queue_s=None),
    )
    waits = address.request(service_calls.select({}), timeouts).extensions["timeout"]
    prompt = address.request(service_calls.free("r"), timeouts).extensions["timeout"]
    assert (waits["connect"], waits["read"]) == (1.0, None)
    assert (prompt["connect"], prompt["read"], prompt["write"]) == (1.0, 2.0, 2.0)


def test_a_reservation_id_is_escaped_in_the_path() -> None:
    assert service_calls.free("a/b c").path == "/reservations/a%2Fb%20c"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://w:8000", "http://w:8000/v1/completions"),
        ("http://w:8000/", "http://w:8000/v1/completions"),
        ("https://w/prefix/v1/", "https://w/prefix/v1/completions"),
        ("w:8000", "http://w:8000/v1/completions"),
        ("http://v1", "http://v1/v1/completions"),
    ],
)
def test_the_completions_url_follows_from_the_endpoint(endpoint: str, url: str) -> None:
    assert OpenStream(1, endpoint, b"", {}).url == url


# -- the engine's stream --------------------------------------------------------------------------


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def test_a_stream_cut_anywhere_gives_the_same_chunks() -> None:
    text = (
        b": a comment\n\nevent: message\n"
        + event(choices=[{"index": 0, "text": "a\u00e9", "token_ids": [1, 2]}])
        + event(choices=[{"index": 1, "text": "", "finish_reason": "stop"}], usage=None)
        + event(choices=[], usage={"completion_tokens": 5})
        + b"data: [DONE]\n\n"
    )
    expected = [
        {"index": 0, "text": "a\u00e9", "token_ids": [1, 2]},
        {"index": 1, "text": "", "finish_reason": "stop"},
        {"usage": {"completion_tokens": 5}},
    ]
    for cut in range(len(text)):
        stream = CompletionStream()
        assert [*stream.feed(text[:cut]), *stream.feed(text[cut:])] == expected
        assert (stream.state, stream.output_tokens) == ("done", 5)


def test_tokens_are_counted_by_ids_then_usage_then_text() -> None:
    stream = CompletionStream()
    list(stream.feed(event(choices=[{"text": "ab", "token_ids": [1, 2, 3]}])))
    assert stream.output_tokens == 3
    list(stream.feed(event(choices=[{"text": "c"}])))
    assert stream.output_tokens == 4
    chunks = list(stream.feed(event(choices=[{"text": "d"}], usage={"completion_tokens": 9})))
    assert chunks == [{"index": 0, "text": "d", "usage": {"completion_tokens": 9}}]
    assert stream.output_tokens == 9
    list(stream.feed(event(usage={"completion_tokens": None})))
    assert stream.output_tokens == 9


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"data: {\n", "no completion", id="cut json"),
        pytest.param(b'data: {"choices": 1}\n', "no completion", id="wrong shape"),
        pytest.param(b'data: "\xff"\n', "no completion", id="not utf-8"),
        pytest.param(event(error={"message": "oom"}), "the engine reports oom", id="an error"),
        pytest.param(b"x" * (MAX_EVENT_BYTES + 1), "an event of more", id="endless line"),
    ],
)
def test_what_is_no_stream_of_completions_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedStream, match=reason):
        list(CompletionStream().feed(data))


# -- reports --------------------------------------------------------------------------------------


def paths(reservation: Reservation) -> list[str]:
    found = []
    while (call := reservation.next_report()) is not None:
        found.append(call.path.rpartition("/")[2])
        reservation.reported()
    return found


def test_a_report_follows_from_what_the_service_does_not_know() -> None:
    reservation = Reservation(10, reservation_id="r")
    reservation.track_output(4)
    assert paths(reservation) == []
    reservation.output(1)
    assert paths(reservation) == ["prefill_complete"]
    reservation.output(11)  # 21 tokens are five blocks, the prompt's two among them
    assert paths(reservation) == ["output_block"] * 3
    reservation.output(5)  # never goes back
    assert paths(reservation) == []
    reservation.output(99)
    reservation.ended = True
    assert paths(reservation) == []


def test_without_a_block_size_only_prefill_is_reported() -> None:
    reservation = Reservation(10)
    reservation.output(100)
    assert paths(reservation) == ["prefill_complete"]


def test_the_weight_of_a_request_fades_to_nothing() -> None:
    reservation = Reservation(0, reservation_id="r", expected_output_tokens=8)
    reservation.track_output(4)
    reservation.output(12)
    reservation.reported()
    bodies = []
    while (call := reservation.next_report()) is not None:
        bodies.append(json.loads(call.json() or b""))
        reservation.reported()
    assert [body["decay_fraction"] for body in bodies] == [0.5, 0.0, 0.0]


def test_nothing_is_read_behind_the_end_of_a_stream() -> None:
    stream = CompletionStream()
    token = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    assert len(list(stream.feed(token + b"data: [DONE]\n\n" + token + b"data: what"))) == 1
    assert list(stream.feed(b" is this\n\n" + token)) == []
    assert (stream.state, stream.output_tokens) == ("done", 1)


# -- flows, driven by hand ------------------------------------------------------------------------


def routing(**fields: Any) -> Routing:
    settings: dict[str, Any] = {"block_size": 4, "model_name": "m", "backoff": Backoff(), **fields}
    return Routing(
        None,
        settings["block_size"],
        settings["model_name"],
        "default",
        None,
        settings["backoff"],
        random.Random(1),
    )


def selected(worker_id: int = 1) -> Selected:
    overlap = service_calls.Overlap(0, 0, {"0": 0}, 0, 0)
    return Selected(worker_id, 0, "http://w", 4, overlap, 10)


def play(flow: Flow[Any], *outcomes: object) -> list[Step]:
    """The steps of a flow that meets these outcomes; its error, if it ends with one, is raised."""
    steps = [next(flow)]
    for outcome in outcomes:
        try:
            if isinstance(outcome, BaseException):
                steps.append(flow.throw(outcome))
            else:
                steps.append(flow.send(outcome))
        except StopIteration:
            return steps
    with contextlib.suppress(ClientError):  # a flow is always brought to its end
        flow.throw(service_refusal(400, "the play is over"))
    return steps


def busy(retry_after_s: float | None = None) -> ServiceRefused:
    return service_refusal(503, "busy", retry_after_s)


def test_a_busy_service_is_asked_again_after_what_it_says() -> None:
    flow = routing().place(Prompt([1] * 8), Terms())
    steps = play(flow, busy(retry_after_s=9.0), None)
    assert isinstance(steps[1], Pause)
    assert steps[1].seconds == 9.0
    first, again = steps[0], steps[2]
    assert isinstance(first, Ask)
    assert isinstance(again, Ask)
    assert first.books is not None
    assert again.books is not None
    assert first.books.id != again.books.id


def test_a_booking_whose_answer_is_lost_is_released_and_tried_under_another_id() -> None:
    lost = ServiceUnreachable("s", "reset")
    steps = play(routing().place(Prompt([1] * 8), Terms()), lost, None, None)
    assert [type(step) for step in steps] == [Ask, Release, Pause, Ask]
    assert isinstance(steps[1], Release)
    assert steps[1].reservation.ambiguous


def test_a_booking_that_was_never_sent_needs_no_release() -> None:
    refused = ServiceUnreachable("s", "refused", never_sent=True)
    steps = play(routing().place(Prompt([1] * 8), Terms()), refused, None)
    assert [type(step) for step in steps] == [Ask, Pause, Ask]


def test_other_refusals_are_not_tried_again() -> None:
    flow = routing().place(Prompt([1] * 8), Terms())
    next(flow)
    with pytest.raises(InvalidRequest):
        flow.throw(service_refusal(400, "no"))


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_release_looks_twice_when_the_booking_may_still_arrive(ambiguous: bool) -> None:
    reservation = Reservation(4, reservation_id="r")
    reservation.ambiguous = ambiguous
    missing = service_refusal(404, "not found")
    steps = play(routing().release(reservation), missing, None, missing)
    assert [type(step) for step in steps] == ([Ask, Pause, Ask] if ambiguous else [Ask])


def test_a_release_outlasts_a_restart_of_the_service_and_then_gives_up() -> None:
    lost: list[object] = [ServiceUnreachable("s", "refused"), None]
    steps = play(routing().release(Reservation(4)), *lost * 20)
    pauses = [step.seconds for step in steps if isinstance(step, Pause)]
    assert 5.0 < sum(pauses) < 10.0
    assert isinstance(steps[-1], Ask)


def test_reports_give_up_where_the_next_one_makes_up_for_them() -> None:
    reservation = Reservation(4)
    reservation.output(1)
    lost: list[object] = [ServiceUnreachable("s", "refused"), None]
    steps = play(routing().report(reservation), *lost * 20)
    assert [type(step) for step in steps] == [Ask, Pause, Ask, Pause, Ask]
    steps = play(routing().report(reservation), service_refusal(404, "not found"))
    assert len(steps) == 1
    assert reservation.next_report() is not None


def test_discovery_asks_once_it_has_found_workers() -> None:
    knows_nothing = routing(block_size=None, model_name=None)
    flow = knows_nothing.scope("m")
    assert play(flow, [])
    worker = Worker(1, "base", "schedulable", 16, True)
    for _ in range(2):
        flow = knows_nothing.scope("m")
        try:
            next(flow)
            flow.send([worker, Worker(2, "half", "incomplete")])
        except StopIteration as end:
            scope = end.value
        assert scope == Scope("base", "default", 16, True)
    assert isinstance(scope, Scope)
    fields = service_calls.prompt_fields([1] * 17, scope, None, None)
    assert fields["isl_tokens"] == 17
    assert len(fields["block_hashes"]) == 8  # type: ignore[arg-type] # bytes of one hash


def test_an_empty_salt_is_no_salt() -> None:
    assert "cache_salt" not in json.loads(completion_body([1], "m", cache_salt=""))


def test_every_error_of_the_client_is_a_client_error() -> None:
    import lean_selector.client as client

    errors = [kind for kind in vars(client).values() if isinstance(kind, type)]
    raised = [kind for kind in errors if issubclass(kind, Exception)]
    assert len(raised) == 14
    assert all(issubclass(kind, ClientError) for kind in raised)
