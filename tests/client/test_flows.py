"""What a router does, with a driver that is told what comes of each step: with no I/O.

Both kinds of router do the same, so what is retried, avoided, booked and released is proved here;
tests/client/test_router.py shows that either kind carries it out.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpx
import pytest

from lean_selector.client import KvRouter, KvRouterConfig, calls, drivers
from lean_selector.client.calls import Call, Scope, Selected, Worker
from lean_selector.client.client_settings import Backoff, Timeouts
from lean_selector.client.drivers import Driver, Reservation
from lean_selector.client.errors import (
    AlreadyExists,
    ClientClosed,
    ClientError,
    InvalidRequest,
    ModelNotNamed,
    NotFound,
    NoWorkerAvailable,
    ServiceRefused,
    ServiceUnreachable,
    WorkerError,
    WorkerRefused,
    WorkerStreamBroken,
    WorkerUnreachable,
    WrongBlockSize,
    service_refusal,
)
from lean_selector.client.router import FRESH_S, outcome_of
from lean_selector.client.transport import (
    OpenStream,
    ServiceConnection,
    WorkerConnections,
    answer_of,
)
from lean_selector.core.selection.shapes import Overlap
from tests.client.fake_worker import FakeWorker
from tests.support.on_loop import on_loop, until
from tests.support.threaded_server import ThreadedServer, body_of

TOKENS = list(range(1, 11))  # two full blocks of four, and a partial one
UNREACHABLE = ServiceUnreachable("s", "refused", never_sent=True)
LOST = ServiceUnreachable("s", "reset")


@dataclass(frozen=True)
class Ask:
    call: Call[Any]
    books: Reservation | None = None


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Release:
    reservation: Reservation
    is_awaited: bool = False


Step = Ask | Pause | Release | OpenStream
Work = Coroutine[Any, Any, Any]


class Told(Driver):
    """A driver that writes down each step, and is sent what comes of those that wait."""

    def __init__(self) -> None:
        super().__init__(ServiceConnection("http://s", Timeouts()), Timeouts())
        self.steps: list[Step] = []

    async def ask(self, call: Call[Any]) -> Any:
        return await self._awaited(Ask(call))

    async def book(self, call: Call[Any], reservation: Reservation) -> Any:
        return await self._awaited(Ask(call, reservation))

    async def pause(self, seconds: float) -> Any:
        return await self._awaited(Pause(seconds))

    async def open(self, step: OpenStream) -> Any:
        return await self._awaited(step)

    async def release_now(self, reservation: Reservation) -> Any:
        return await self._awaited(Release(reservation, is_awaited=True))

    def release(self, reservation: Reservation) -> None:
        self.steps.append(Release(reservation))

    def release_from_anywhere(self, reservation: Reservation) -> None: ...

    def _awaited(self, step: Step) -> "Outcome":
        self.steps.append(step)
        return Outcome()


class Outcome:
    def __await__(self) -> Generator[None, Any, Any]:
        return (yield)


driver = Told()


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    driver.steps.clear()


def router(config: KvRouterConfig | None = None, **settings: Any) -> KvRouter:
    given = {"block_size": 4, "model_name": "m", **settings}
    made = KvRouter("http://s", kv_router_config=config, **given)
    made._driver = driver
    return made


def selected(worker_id: int = 1, block_size: int = 4, ranks: int = 1) -> Selected:
    overlap = Overlap(0, 0, {str(rank): 8 * rank for rank in range(ranks)}, 0, 0)
    return Selected(worker_id, ranks - 1, "http://w", block_size, overlap, 10)


def begin(work: Work) -> None:
    driver.steps.clear()
    work.send(None)


def answered(work: Work, outcome: object) -> None:
    if isinstance(outcome, BaseException):
        work.throw(outcome)
    else:
        work.send(outcome)


def play(work: Work, *outcomes: object) -> list[Step]:
    """The steps of work that meets these outcomes; its error, if it ends with one, is raised."""
    begin(work)
    for outcome in outcomes:
        try:
            answered(work, outcome)
        except StopIteration:
            return list(driver.steps)
    steps = list(driver.steps)
    with contextlib.suppress(ClientError):  # it is always brought to its end
        work.throw(service_refusal(400, "the play is over"))
    return steps


def failed(work: Work, answer: Callable[[Step], object]) -> tuple[list[Step], ClientError]:
    """All steps of work whose every step is answered so, and the error that ends it."""
    begin(work)
    try:
        while True:
            answered(work, answer(driver.steps[-1]))
    except ClientError as error:
        return list(driver.steps), error


def result(work: Work, *outcomes: object) -> Any:
    try:
        begin(work)
        for outcome in outcomes:
            work.send(outcome)
    except StopIteration as end:
        return end.value
    raise AssertionError("it goes on")


def entering(reserved: AbstractAsyncContextManager[Any]) -> Work:
    async def enter() -> Any:
        return await reserved.__aenter__()

    return enter()


def fields_of(step: Step) -> Mapping[str, object]:
    assert isinstance(step, Ask)
    assert isinstance(step.call.body, dict)
    return step.call.body


def kinds(steps: list[Step]) -> list[type]:
    return [type(step) for step in steps]


def pauses(steps: list[Step]) -> list[float]:
    return [step.seconds for step in steps if isinstance(step, Pause)]


def busy(retry_after_s: float | None = None) -> ServiceRefused:
    return service_refusal(503, "busy", retry_after_s)


# -- one call, and how long to wait before the next ------------------------------------------------


def test_waits_double_have_jitter_and_end_and_honour_retry_after_up_to_the_longest() -> None:
    backoff = Backoff(max_retries=4, first_s=1.0, longest_s=6.0)
    waits = [backoff.wait_s(attempt) for attempt in range(5)]
    assert waits[4] is None
    for wait, base in zip(waits[:3], (1, 2, 4), strict=True):
        assert wait is not None
        assert base <= wait <= base + 1
    assert waits[3] == backoff.wait_s(0, 3600.0) == 6.0
    assert backoff.wait_s(0, 5.0) == 5.0
    assert (backoff.wait_s(0, 0.0) or 0.0) >= 1.0


def test_an_answer_that_is_not_the_expected_one_is_an_error() -> None:
    service = ServiceConnection("http://selector:8092/", Timeouts())
    call = calls.select({})
    assert service.request(call).url == "http://selector:8092/select"
    with pytest.raises(ServiceRefused, match=r"200: .*worker_id"):
        answer_of(call, httpx.Response(200, content=b"{}"))


@pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None)])
def test_a_busy_service_says_when_to_come_back(said: str, seconds: float | None) -> None:
    answer = httpx.Response(503, headers={"retry-after": said}, content=b'{"error": "busy"}')
    with pytest.raises(NoWorkerAvailable) as caught:
        answer_of(calls.select({}), answer)
    assert (caught.value.status, caught.value.error) == (503, "busy")
    assert caught.value.retry_after_s == seconds


def test_only_a_selection_may_take_long() -> None:
    timeouts = Timeouts(connect_s=1.0, service_s=2.0, queue_s=None)
    service = ServiceConnection("http://s", timeouts)
    waits = service.request(calls.select({})).extensions["timeout"]
    prompt = service.request(calls.free("r")).extensions["timeout"]
    assert (waits["connect"], waits["read"]) == (1.0, None)
    assert (prompt["connect"], prompt["read"], prompt["write"]) == (1.0, 2.0, 2.0)


@pytest.mark.parametrize("endpoint", ["unix:", "localhost:8092", ""])
def test_an_endpoint_is_a_url_or_a_unix_socket(endpoint: str) -> None:
    with pytest.raises(ValueError, match="unix:"):
        ServiceConnection(endpoint, Timeouts())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((400, InvalidRequest), (422, InvalidRequest), (404, NotFound), (409, AlreadyExists)),
        *((503, NoWorkerAvailable), (429, NoWorkerAvailable), (500, ServiceRefused)),
    ],
)
def test_each_status_has_its_class(status: int, kind: type[ServiceRefused]) -> None:
    error = service_refusal(status, "why")
    assert (type(error), str(error)) == (kind, f"{status}: why")


# -- what a reservation reports --------------------------------------------------------------------


def reports(reservation: Reservation) -> list[tuple[str, object]]:
    """The route and the decay of each report that is due."""
    found = []
    while (call := reservation.next_report()) is not None:
        body = json.loads(call.json() or b"{}")
        found.append((call.path.rpartition("/")[2], body.get("decay_fraction")))
        reservation.reports += 1
    return found


def test_a_report_follows_from_what_the_service_does_not_know() -> None:
    reservation = Reservation(10, reservation_id="r")
    reservation.block_size = 4
    assert reports(reservation) == []
    reservation.output_tokens = 1
    assert reports(reservation) == [("prefill_complete", None)]
    reservation.output_tokens = 11  # 21 tokens are five blocks, the prompt's two among them
    assert reports(reservation) == [("output_block", None)] * 3
    reservation.output_tokens = 5  # never goes back
    assert reports(reservation) == []
    reservation.output_tokens = 99
    reservation.ended = True
    assert reports(reservation) == []


@pytest.mark.parametrize("tracks", [True, False])
def test_output_blocks_are_reported_unless_the_config_says_otherwise(tracks: bool) -> None:
    config = KvRouterConfig(router_track_output_blocks=tracks)
    stream = result(router(config=config).generate(TOKENS, "m"), selected(), None)
    reservation = stream._reservation
    reservation.output_tokens = 2
    assert (
        reports(reservation) == [("prefill_complete", None), ("output_block", None)][: 1 + tracks]
    )


def test_the_weight_of_a_request_fades_to_nothing() -> None:
    reservation = Reservation(0, reservation_id="r", expected_output_tokens=8)
    reservation.block_size = 4
    reservation.output_tokens = 12
    assert [decay for _, decay in reports(reservation)] == [None, 0.5, 0.0, 0.0]


def test_reports_give_up_where_the_next_one_makes_up_for_them() -> None:
    reservation = Reservation(4)
    reservation.output_tokens = 1
    steps = play(driver._reported(reservation), *[LOST, None] * 20)
    assert kinds(steps) == [Ask, Pause, Ask, Pause, Ask]
    assert kinds(play(driver._reported(reservation), service_refusal(404, "not found"))) == [Ask]
    assert reservation.next_report() is not None


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_release_looks_twice_when_the_booking_may_still_arrive(ambiguous: bool) -> None:
    reservation = Reservation(4, reservation_id="r")
    reservation.ambiguous = ambiguous
    missing = service_refusal(404, "not found")
    steps = play(driver._freed(reservation), missing, None, missing)
    assert kinds(steps) == ([Ask, Pause, Ask] if ambiguous else [Ask])


def test_a_release_outlasts_a_restart_of_the_service_and_then_gives_up() -> None:
    steps = play(driver._freed(Reservation(4)), *[LOST, None] * 20)
    assert 5.0 < sum(pauses(steps)) < 10.0
    assert isinstance(steps[-1], Ask)


# -- what is asked of the service ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "fields"),
    [
        ({}, {}),
        ({"worker_id": 2}, {"allowed_worker_ids": [2]}),
        ({"worker_id": 2, "dp_rank": 1}, {"pinned_worker": {"worker_id": 2, "dp_rank": 1}}),
        (
            {"router_config_override": {"router_temperature": 0.0}},
            {"router_config_override": {"overlap_score_weight": 2.0, "router_temperature": 0.0}},
        ),
        *(
            ({name: value}, {name: value})
            for name, value in {
                "expected_output_tokens": 8,
                "priority_jump": 1.5,
                "strict_priority": 2,
                "fairness_id": "a",
                "routing_constraints": {"required_taints": ["gold"]},
                "disaggregate": "auto",
                "prefill_allowed_worker_ids": [3],
            }.items()
        ),
    ],
)
def test_what_a_request_asks_for_goes_with_its_prompt(
    terms: dict[str, Any], fields: dict[str, object]
) -> None:
    config = KvRouterConfig(overlap_score_weight=2.0, router_temperature=0.5, use_kv_events=True)
    sent = dict(fields_of(play(entering(router(config=config).reserve(TOKENS, **terms)))[0]))
    assert sent.pop("reservation_id") == sent.pop("selection_id")
    assert [len(sent.pop(name)) for name in ("block_hashes", "sequence_hashes")] == [16, 16]  # type: ignore[arg-type]
    override = {"overlap_score_weight": 2.0, "router_temperature": 0.5}
    prompt = {"model_name": "m", "tenant_id": "default", "isl_tokens": 10}
    assert sent == {**prompt, "router_config_override": override, **fields}


def test_a_prompt_that_cannot_be_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="token ids"):
        begin(router().best_worker([-1]))
    with pytest.raises(ValueError, match="dp_rank needs worker_id"):
        begin(router().generate(TOKENS, "m", dp_rank=1))


def test_overlap_is_that_of_the_chosen_rank() -> None:
    assert result(router().best_worker(TOKENS), selected(7, ranks=2)) == (7, 1, 2)


def test_a_busy_service_is_asked_again_after_what_it_says() -> None:
    first, pause, again = play(entering(router().reserve(TOKENS)), busy(retry_after_s=9.0), None)
    assert pause == Pause(9.0)
    assert fields_of(first)["reservation_id"] != fields_of(again)["reservation_id"]


class Scripted(ServiceConnection):
    """A service that ends each booking so, and knows no reservation."""

    def __init__(self, error: ClientError) -> None:
        super().__init__("http://s", Timeouts())
        self.methods: list[str] = []
        self._error = error

    async def exchange(self, call: Call[Any]) -> Any:
        self.methods.append(call.method)
        raise self._error if call.method == "POST" else service_refusal(404, "not found")


@pytest.mark.parametrize(
    ("error", "methods"),
    [
        (LOST, ["POST", "DELETE", "DELETE"]),  # it may still arrive
        (UNREACHABLE, ["POST"]),
        (service_refusal(400, "no"), ["POST"]),
    ],
)
@on_loop
async def test_a_booking_whose_answer_is_lost_is_freed_before_that_is_said(
    monkeypatch: pytest.MonkeyPatch, error: ClientError, methods: list[str]
) -> None:
    service = Scripted(error)
    real = Driver(service, Timeouts())
    monkeypatch.setattr(real, "pause", lambda _: asyncio.sleep(0))
    with pytest.raises(type(error)):
        await real.book(calls.select_and_reserve("r", {}), Reservation(1, reservation_id="r"))
    assert service.methods == methods
    await real.close()


@on_loop
async def test_a_booking_that_is_cancelled_on_its_way_is_freed_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unanswered(Scripted):
        async def exchange(self, call: Call[Any]) -> Any:
            if call.method == "POST":
                self.methods.append(call.method)
                await asyncio.Event().wait()
            return await super().exchange(call)

    service = Unanswered(LOST)
    real = Driver(service, Timeouts())
    monkeypatch.setattr(real, "pause", lambda _: asyncio.sleep(0))
    monkeypatch.setattr(drivers, "RESERVE_GRACE_S", 0.0)
    call = calls.select_and_reserve("r", {})
    booking = asyncio.create_task(real.book(call, Reservation(1, reservation_id="r")))
    await until(lambda: service.methods != [], "it is sent")
    booking.cancel()
    await asyncio.wait({booking})
    await real.close()
    assert service.methods == ["POST", "DELETE", "DELETE"]


@on_loop
async def test_nothing_is_booked_while_the_driver_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Scripted(UNREACHABLE)
    real = Driver(service, Timeouts())
    is_released = asyncio.Event()
    monkeypatch.setattr(service, "exchange", lambda _: is_released.wait())
    real.release(Reservation(1))
    closing = asyncio.create_task(real.close())
    await asyncio.sleep(0)
    with pytest.raises(ClientClosed):
        await real.book(calls.select_and_reserve("r", {}), Reservation(1, reservation_id="r"))
    is_released.set()
    await closing


@on_loop
async def test_a_worker_that_is_connected_to_after_the_close_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, is_asked, is_closed = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    look_up = loop.getaddrinfo

    async def late(*asked: Any, **how: Any) -> Any:
        is_asked.set()
        await is_closed.wait()
        return await look_up(*asked, **how)

    monkeypatch.setattr(loop, "getaddrinfo", late)
    real = Driver(ServiceConnection("http://s", Timeouts()), Timeouts())
    with FakeWorker() as worker:
        body = b'{"fake": {"stall_after": 0}}'
        step = OpenStream(1, f"http://localhost:{worker.port}", body, {})
        opening = asyncio.create_task(real.open(step))
        await is_asked.wait()
        await real.close()
        is_closed.set()
        with pytest.raises(ClientClosed):
            await opening
        await until(lambda: worker.hung_up == 1, "the worker need not go on")


@on_loop
async def test_of_a_workers_error_no_more_is_read_than_a_message_has() -> None:
    sent: list[int] = []

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        body_of(handler)
        handler.send_response(500)
        handler.send_header("content-length", str(1 << 40))
        handler.end_headers()
        with contextlib.suppress(OSError):
            for at in range(1 << 10):
                handler.wfile.write(bytes(1 << 16))
                sent.append(at)
        handler.close_connection = True

    workers = WorkerConnections(Timeouts())
    with ThreadedServer(refuse) as worker:
        with pytest.raises(WorkerRefused):
            await workers.open(OpenStream(1, worker.url, b"{}", {}))
        assert len(sent) < 1 << 10
    await workers.close()


def test_a_stream_that_is_closed_has_no_more_chunks() -> None:
    stream = result(router().generate(TOKENS, "m"), selected(), None)
    stream._take(b'data: {"choices":[{"index":0,"text":"a"}]}\n\n' * 2)
    play(stream.aclose(), None)
    stream._reservation.ended = True
    with pytest.raises(StopAsyncIteration):
        result(anext(stream), None)


def test_what_a_service_refuses_for_good_is_not_asked_again() -> None:
    with pytest.raises(InvalidRequest):
        play(entering(router().reserve(TOKENS)), service_refusal(400, "no"))


@pytest.mark.parametrize("error", [UNREACHABLE, busy()])
def test_a_service_that_does_not_help_is_asked_a_few_times_with_growing_pauses(
    error: ClientError,
) -> None:
    for work in (router().generate(TOKENS, "m"), entering(router().reserve(TOKENS))):
        steps, raised = failed(work, lambda step: error if isinstance(step, Ask) else None)
        assert raised is error
        assert len(pauses(steps)) == 5
        assert pauses(steps) == sorted(pauses(steps))
    for asked_once in (router().best_worker(TOKENS), router().get_potential_loads(TOKENS)):
        assert failed(asked_once, lambda _: error)[0][1:] == []


# -- which model, which blocks ---------------------------------------------------------------------

BASE = Worker(1, "base", "schedulable", 16, True)


def test_discovery_asks_once_it_has_found_workers() -> None:
    knows_nothing = router(block_size=None, model_name=None)
    assert play(knows_nothing._scope("m"), [])
    found = [BASE, Worker(2, "half", "incomplete")]
    scope = result(knows_nothing._scope("an adapter of it"), found)
    assert scope == Scope("base", "default", 16, True)
    assert result(knows_nothing._scope("an adapter of it")) == scope  # nothing is asked
    assert result(knows_nothing._scope()) == scope
    fields = calls.prompt_fields([1] * 17, scope, None, None)
    assert fields["isl_tokens"] == 17
    assert len(fields["block_hashes"]) == 8  # type: ignore[arg-type] # bytes of one hash


def test_what_the_selector_serves_is_asked_again_after_a_while_and_for_a_new_model() -> None:
    asks = router(block_size=None, model_name=None)
    assert result(asks._scope("base"), [BASE]).block_size == 16
    other = Worker(2, "other", "schedulable", 8)
    assert result(asks._scope("other"), [BASE, other]) == Scope("other", "default", 8)
    assert result(asks._scope("base")).block_size == 16
    asks._looked_at -= FRESH_S
    changed = Worker(1, "base", "schedulable", 32)
    assert result(asks._scope("base"), [changed]) == Scope("base", "default", 32)


@pytest.mark.parametrize("books", [True, False])
def test_a_block_size_that_changed_is_asked_for_once_more_and_the_call_repeated(
    books: bool,
) -> None:
    asks = router(block_size=None)
    work = asks.best_worker(TOKENS, request_id="r" if books else None)
    first, second = [Worker(1, "m", "schedulable", size) for size in (4, 8)]
    found: list[object] = [[first], selected(block_size=8)]
    found += [None] if books else []  # what was booked is released
    found += [[second], selected(block_size=8)]
    assert result(work, *found)[0] == 1
    with pytest.raises(WrongBlockSize):  # no third try
        result(asks.best_worker(TOKENS), *(selected(block_size=16), [second]) * 2)


def test_with_several_models_the_router_must_know_which() -> None:
    found = [BASE, Worker(2, "other", "schedulable", 8)]
    other = Scope("other", "default", 8)
    asks = router(block_size=None, model_name=None)
    with pytest.raises(ModelNotNamed, match=r"base, other"):
        result(asks._scope(), found)
    assert result(router(block_size=None, model_name=None)._scope("other"), found) == other
    assert result(router(block_size=None, model_name="other")._scope("m"), found) == other


def test_another_block_size_than_the_workers_is_an_error_and_leaves_no_booking() -> None:
    with pytest.raises(WrongBlockSize, match=r"4.*16"):
        result(router(model_name=None)._scope(), [BASE])
    work = router().best_worker(TOKENS, request_id="r")
    begin(work)
    work.send(selected(block_size=16))
    released = driver.steps[-1]
    assert isinstance(released, Release)
    assert released.is_awaited  # the id is free again when that is said
    with pytest.raises(WrongBlockSize):
        work.send(None)


# -- the worker's stream ---------------------------------------------------------------------------


def test_the_worker_is_sent_what_its_engine_understands() -> None:
    work = router().generate(
        TOKENS,
        "adapter",
        {"max_tokens": 1, "ignore_eos": True, "stop_token_ids_hidden": [2], "stop": None},
        {"temperature": 0.7, "top_p": 0.9},
        {"logprobs": 1},
        extra_args={"temperature": 0.5},
        lora_name="adapter",
        cache_salt="s",
    )
    _, stream = play(work, selected())
    assert isinstance(stream, OpenStream)
    assert json.loads(stream.body) == {
        "model": "adapter",
        "prompt": TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": "dynamo-cache-salt:s",
        "max_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [2],
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": 1,
    }
    assert "x-data-parallel-rank" not in stream.headers


def test_a_worker_with_several_ranks_is_told_the_chosen_one() -> None:
    _, stream = play(router().generate(TOKENS, "m"), selected(ranks=2))
    assert isinstance(stream, OpenStream)
    assert stream.headers["x-data-parallel-rank"] == "1"


def refused_by(worker_id: int, status: int) -> WorkerRefused:
    return WorkerRefused(worker_id, "http://w", status, "no")


@pytest.mark.parametrize(
    "error",
    [WorkerUnreachable(3, "http://w", "reset"), *(refused_by(3, at) for at in (429, 503, 529))],
)
def test_a_worker_that_does_not_take_a_request_is_avoided(error: WorkerError) -> None:
    found = [Worker(number, "m", "schedulable") for number in (1, 2, 3)]
    found.append(Worker(4, "m", "incomplete"))
    steps = play(router().generate(TOKENS, "m"), selected(3), error, found)
    assert kinds(steps) == [Ask, OpenStream, Release, Ask, Ask]
    assert fields_of(steps[-1])["allowed_worker_ids"] == [1, 2]


@pytest.mark.parametrize("pinned", [None, 3])
def test_when_no_worker_is_left_all_are_tried_again_after_a_pause(pinned: int | None) -> None:
    def answer(step: Step) -> object:
        if isinstance(step, OpenStream):
            return refused_by(3, 503)
        if isinstance(step, Ask):
            return selected(3) if step.books else [Worker(3, "m", "schedulable")]
        return None

    work = router(backoff=Backoff(max_retries=2, first_s=1.0)).generate(
        TOKENS, "m", worker_id=pinned
    )
    steps, error = failed(work, answer)
    assert isinstance(error, WorkerRefused)
    first, second = pauses(steps)
    assert 1.0 <= first <= 2.0
    assert 2.0 <= second <= 3.0
    booked = [step for step in steps if isinstance(step, Ask) and step.books]
    assert len(booked) == kinds(steps).count(Release) == 3


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        *((refused_by(1, status), None) for status in (429, 503, 529)),  # it only sheds load
        (refused_by(1, 400), "ok"),
        (refused_by(1, 502), "failed"),
        (WorkerUnreachable(1, "http://w", "refused", never_connected=True), "refused"),
        (WorkerUnreachable(1, "http://w", "reset"), "failed"),
        (WorkerStreamBroken(1, "http://w", "it broke"), "failed"),
        (KeyboardInterrupt(), None),
    ],
)
def test_what_an_error_tells_of_its_worker(error: BaseException, outcome: str | None) -> None:
    assert outcome_of(error) == outcome


# -- settings --------------------------------------------------------------------------------------


def test_settings_that_belong_to_the_service_are_taken_and_other_names_refused() -> None:
    assert KvRouterConfig(router_ttl_secs=1.0).override({}) is None
    with pytest.raises(TypeError, match="router_temprature"):
        KvRouterConfig(router_temprature=1.0)


@pytest.mark.parametrize(
    ("block_size", "error"), [(4.0, TypeError), (True, TypeError), (0, ValueError)]
)
def test_a_block_size_is_a_positive_integer(block_size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^block_size"):
        KvRouter("http://127.0.0.1:1", block_size)
