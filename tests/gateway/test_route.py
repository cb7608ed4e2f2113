"""POST /route in process: what it books, what it answers, and what it does when clients leave."""

import asyncio
import json
from time import monotonic
from typing import Any, cast

import pytest

from lean_selector.api.gate import Gate
from lean_selector.api.replies import LaterReply
from lean_selector.core.errors import BadRequest, Unavailable, UnknownModel
from lean_selector.core.hashing import any_local_hashes, sequence_hashes_bytes
from lean_selector.core.load.shapes import BusyThreshold, ReservationSpec
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.shapes import ROUTE, WorkerSpec
from lean_selector.gateway import route
from lean_selector.gateway.access_logs import LogEnds
from lean_selector.gateway.headers import QueueHeaders
from lean_selector.gateway.model_request import MEDIA
from lean_selector.gateway.prompt_shapes import Unknown
from lean_selector.gateway.prompts import Routed
from lean_selector.gateway.route import RouteHandler
from lean_selector.http.head import Request, block_of
from lean_selector.tasks import Steps
from tests.support.gates import NOW, selection_service
from tests.support.on_loop import on_loop, until

PATH = "/route/v1/chat/completions"
Headers = dict[str, str]


class Scripted:
    """Prompts of so many tokens, once they may go on."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.fault: Exception | None = None
        self.worker_ids: frozenset[int] | None = None
        self.why_not: Unknown | None = None
        self.output_tokens = 0
        self.bars_pair = ""
        self.gate = asyncio.Event()
        self.gate.set()

    def read(self, path: str, body: bytes, *, forwards: bool) -> Steps[Routed]:
        assert not forwards
        self.asked.append((path, body))
        if not self.gate.is_set():
            yield self.gate.wait()
        if self.fault is not None:
            raise self.fault
        tokens = b"".join(n.to_bytes(4, "little") for n in range(40))
        local = any_local_hashes(tokens, 16, 1337, None, False)
        prompt = Prompt(40, local, 2, local[:8], sequence_hashes_bytes(local))
        return Routed(
            "m",
            "default",
            prompt,
            body,
            why_not=self.why_not,
            streams=False,
            output_tokens=self.output_tokens,
            worker_ids=self.worker_ids,
            bars_pair=self.bars_pair,
        )


class GatewayHandler:
    """The door of a selector, and a gateway's side of it."""

    def __init__(self, **settings: Any) -> None:
        loop = asyncio.get_running_loop()
        self.service = selection_service(loop.call_later, books_at=ROUTE, **settings)
        self.selector = self.service.selector
        self.prompts = Scripted()
        self.ends = LogEnds(self.selector, lambda: NOW)
        self.door = RouteHandler(
            cast(Any, self.prompts),
            self.service,
            self.ends,
            QueueHeaders("x-team", "x-lean-priority", None, trusts=True, by_name=False),
            lambda: NOW,
        )
        self.gate = Gate(self.door.routes())

    def log_tells_the_end(self, reservation_id: str) -> None:
        self.ends.take(b"lean-end reservation=%b" % reservation_id.encode())

    def worker(
        self, worker_id: int, endpoint: str = "http://10.0.0.7:8000/base", **more: Any
    ) -> None:
        spec = WorkerSpec(
            worker_id=worker_id,
            model_name="m",
            tenant_id="default",
            endpoint=endpoint,
            block_size=16,
            **more,
        )
        self.selector.upsert_worker(spec, NOW)

    def begin(self, *, path: str = PATH, body: bytes = b"{}", **headers: str) -> LaterReply:
        answer = self.gate(asked(path, body, headers))
        assert isinstance(answer, LaterReply)
        return answer

    async def ask(self, **named: Any) -> tuple[int, Headers, bytes]:
        pending = self.begin(**named)
        await until(lambda: pending.response is not None)
        assert pending.response is not None
        return parted(bytes(pending.response))

    async def parks(self, count: int) -> None:
        """So many were asked for their prompts, and what has no answer is parked."""
        await until(lambda: len(self.prompts.asked) == count and not self.door._under_way)

    @property
    def live(self) -> set[str]:
        partitions = self.selector.catalog.partitions.values()
        return {each for partition in partitions for each in partition.slots.reservations}


def asked(path: str, body: bytes, headers: dict[str, str]) -> Request:
    fields = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
    lines = b"".join(b"%b: %b\r\n" % each for each in fields.items())
    block = block_of(fields, False, False)
    return Request(b"POST", path.encode(), None, body, block, b"1.1\r\n%b\r\n" % lines)


def parted(response: bytes) -> tuple[int, Headers, bytes]:
    head, _, body = response.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")[1:]
    return int(head[9:12]), dict(line.split(": ", 1) for line in lines), body


def answer_of(pending: LaterReply) -> tuple[int, Headers, bytes] | None:
    return None if pending.response is None else parted(bytes(pending.response))


def error(body: bytes) -> Any:
    return json.loads(body)["error"]


@on_loop
async def test_the_worker_is_named_in_headers_and_booked_under_the_gateways_id() -> None:
    door = GatewayHandler()
    door.worker(7, data_parallel_start_rank=3)
    status, headers, body = await door.ask(body=b'{"a": 1}', x_reservation_id="gw-1")
    assert (status, body) == (200, b"")
    headers.pop("date", None)
    assert headers == {
        "content-length": "0",
        "x-gateway-destination-endpoint": "10.0.0.7:8000",
        "x-worker-id": "7",
        "x-data-parallel-rank": "3",
        "x-reservation-id": "gw-1",
        "x-overlap-tokens": "0",
    }
    assert door.live == {"gw-1"}
    assert door.prompts.asked == [("/v1/chat/completions", b'{"a": 1}')]


@on_loop
async def test_a_caller_that_accepts_json_is_told_the_selection_too() -> None:
    door = crowded()
    pending = [door.begin(accept="application/json", x_reservation_id=name) for name in ("a", "b")]
    await door.parks(2)  # one of them is answered from the queue
    door.selector.reservations.free("a", NOW)
    for name, answer in zip(("a", "b"), map(answer_of, pending), strict=True):
        assert answer is not None
        status, headers, body = answer
        assert (status, headers["x-worker-id"]) == (200, "7")
        told = json.loads(body)
        assert (told["reservation_id"], told["worker_id"], told["block_size"]) == (name, 7, 16)
        assert told["endpoint"] == "http://10.0.0.7:8000"


@pytest.mark.parametrize("path", ["/route/v1/completions", "/route/x", "/route/"])
@on_loop
async def test_every_path_has_its_prompt_and_an_id_of_ours_where_the_gateway_has_none(
    path: str,
) -> None:
    door = GatewayHandler()
    door.worker(7)
    door.prompts.why_not = MEDIA
    status, headers, _ = await door.ask(path=path)
    assert (status, headers["x-lean-prompt"]) == (200, "media")
    assert door.live == {headers["x-reservation-id"]}
    assert door.prompts.asked[0][0] == path.removeprefix("/route")


@on_loop
async def test_an_endpoint_without_a_port_or_a_scheme_has_the_usual() -> None:
    door = GatewayHandler()
    for endpoint, where in (
        ("http://[fd00::7]", "[fd00::7]:80"),
        ("https://h/", "h:443"),
        ("worker-1:8000", "worker-1:8000"),
    ):
        door.worker(7, endpoint)
        assert (await door.ask())[1]["x-gateway-destination-endpoint"] == where


@on_loop
async def test_a_worker_that_speaks_no_http_is_told_so_and_not_booked() -> None:
    door = GatewayHandler()
    door.worker(7, "grpc://w:1")
    status, headers, body = await door.ask(x_reservation_id="a")
    assert (status, headers["retry-after"]) == (503, "1")
    assert "`grpc://w:1` is not an http:// or https:// URL" in error(body)["message"]
    assert door.live == set()


@on_loop
async def test_only_workers_that_have_the_adapter_are_asked_and_the_answer_is_booked() -> None:
    door = GatewayHandler()
    for worker_id in (1, 2, 3):
        door.worker(worker_id)
    door.prompts.worker_ids, door.prompts.output_tokens = frozenset({2}), 100
    assert {(await door.ask())[1]["x-worker-id"] for _ in range(9)} == {"2"}
    (partition,) = door.selector.catalog.partitions.values()
    assert partition.slots.ranks[2, 0].active_decode_blocks == 2 + 9 * (100 // 16)


@on_loop
async def test_what_is_shed_is_told_to_come_back_in_a_form_that_clients_of_openai_read() -> None:
    door = GatewayHandler()
    door.worker(7, total_kv_blocks=1)
    assert (await door.ask())[0] == 200
    door.selector.change_threshold(("m", "default"), BusyThreshold(active_decode_blocks=0.1), NOW)
    status, headers, body = await door.ask()
    assert (status, headers["retry-after"], headers["content-type"]) == (
        429,
        "1",
        "application/json",
    )
    assert error(body) == {
        "message": "All workers are busy, please retry later",
        "type": "rate_limit_error",
        "param": None,
        "code": None,
    }
    (partition,) = door.selector.catalog.partitions.values()
    assert partition.shed[ROUTE] == door.gate.meters[0].shed == 1


@on_loop
async def test_who_is_shed_from_the_queue_is_told_to_come_back_as_who_is_shed_at_once() -> None:
    """Not with a 503, for which gateways balance by themselves: unbooked, onto what is full."""
    door = crowded(queue_max_wait_s=0.01)
    assert (await door.ask(x_reservation_id="first"))[0] == 200
    status, headers, body = await door.ask(x_reservation_id="second")
    assert (status, headers["retry-after"]) == (429, "1")
    assert error(body)["message"] == "no worker became free within 0.01 seconds"
    assert error(body)["type"] == "rate_limit_error"
    assert door.live == {"first"}


@on_loop
async def test_errors_say_whose_they_are_and_book_nothing() -> None:
    door = GatewayHandler()
    status, headers, body = await door.ask()
    assert (status, headers["retry-after"], error(body)["type"]) == (503, "1", "server_error")
    door.worker(7)
    door.prompts.fault = BadRequest("messages: required")
    status, _, body = await door.ask()
    assert (status, error(body)["message"]) == (400, "messages: required")
    assert error(body)["type"] == "invalid_request_error"
    # No worker is known for it here: a gateway that balances by itself may know one.
    door.prompts.fault = UnknownModel("other")
    status, _, body = await door.ask()
    assert (status, error(body)["code"]) == (503, "model_not_found")
    assert door.gate.meters[0].unknown_models == 1
    door.prompts.fault = RuntimeError("a bug")
    status, _, body = await door.ask()
    assert (status, error(body)["message"]) == (500, "internal error")
    assert door.live == set()


@on_loop
async def test_a_body_that_is_too_large_and_a_bad_id_are_refused_at_once() -> None:
    door = GatewayHandler()
    large = asked(PATH, b"", {})
    large.body_too_large = True
    answer = door.gate(large)
    assert isinstance(answer, bytes)
    assert parted(answer)[0] == 413
    for bad in ("", "a b", 'a"b', "é", "x" * 257, "r#prefill"):
        answer = door.gate(asked(PATH, b"{}", {"x-reservation-id": bad}))
        assert isinstance(answer, bytes)
        status, _, body = parted(answer)
        assert (status, "x-reservation-id" in error(body)["message"]) == (400, True)
    assert door.prompts.asked == []


@on_loop
async def test_whoever_hangs_up_while_the_tokens_are_asked_for_books_nothing() -> None:
    door = GatewayHandler()
    door.worker(7)
    door.prompts.gate.clear()
    pending = door.begin(x_reservation_id="gone")
    staying = door.begin(x_reservation_id="stays")
    await until(lambda: len(door.prompts.asked) == 2)
    pending.hang_up()
    door.prompts.gate.set()
    await until(lambda: staying.response is not None)
    assert door.live == {"stays"}


@on_loop
async def test_an_end_that_the_log_tells_before_the_booking_is_not_booked() -> None:
    door = GatewayHandler()
    door.worker(7)
    door.log_tells_the_end("over")
    status, _, body = await door.ask(x_reservation_id="over")
    assert (status, error(body)["message"]) == (409, "reservation over has ended already")
    assert door.live == set()
    assert (await door.ask(x_reservation_id="over"))[0] == 200  # of an id that is used twice


def crowded(endpoint: str = "http://10.0.0.7:8000", **settings: Any) -> GatewayHandler:
    """One rank that is full after one request: who comes then is parked."""
    door = GatewayHandler(queue_threshold=0.1, **settings)
    door.worker(7, endpoint, max_num_batched_tokens=16)
    return door


@on_loop
async def test_a_waiting_request_hears_that_its_worker_speaks_no_http_and_others_go_on() -> None:
    door = crowded("grpc://w:1")
    prompt = Prompt(40, b"12345678", 1, b"87654321", b"87654321")
    spec = ReservationSpec("first", 7, 0, None, True, 40, None, None)
    partition = door.selector.catalog.ready_partition("m", "default")
    door.selector.reservations.book(partition, spec, prompt, NOW)
    pending = [door.begin(x_reservation_id=each) for each in ("second", "third")]
    await door.parks(2)
    assert [answer_of(each) for each in pending] == [None, None]
    door.selector.reservations.free("first", NOW)
    door.selector.admit_waiting(NOW)
    for answer in map(answer_of, pending):
        assert answer is not None
        assert (answer[0], "grpc://w:1" in error(answer[2])["message"]) == (503, True)
    assert door.live == set()


@on_loop
async def test_what_goes_wrong_with_one_that_waited_ends_nobodys_turn() -> None:
    door = crowded()
    assert (await door.ask(x_reservation_id="first"))[0] == 200
    pending = [door.begin(x_reservation_id=each) for each in ("second", "third")]
    await door.parks(3)

    door.ends.has_ended = lambda reservation_id: bool(1 / 0)  # type: ignore[method-assign]
    door.selector.reservations.free("first", NOW)  # raises nothing
    assert door.live == set()
    for answer in map(answer_of, pending):
        assert answer is not None
        assert answer[0] == 500


@on_loop
async def test_a_waiting_request_is_answered_when_there_is_room() -> None:
    door = crowded()
    assert (await door.ask(x_reservation_id="first"))[0] == 200
    door.prompts.why_not = MEDIA
    pending = door.begin(x_reservation_id="second")
    await door.parks(2)
    assert answer_of(pending) is None
    door.selector.reservations.free("first", NOW)
    answer = answer_of(pending)
    assert answer is not None
    status, headers, _ = answer
    assert (status, headers["x-reservation-id"]) == (200, "second")
    assert headers["x-lean-prompt"] == "media"
    assert door.live == {"second"}


@on_loop
async def test_a_waiting_request_whose_end_is_told_or_that_is_left_keeps_no_booking() -> None:
    door = crowded()
    assert (await door.ask(x_reservation_id="first"))[0] == 200
    ended, left = (door.begin(x_reservation_id=each) for each in ("ended", "left"))
    await door.parks(3)
    door.log_tells_the_end("ended")
    left.hang_up()
    door.selector.reservations.free("first", NOW)
    assert ended.response is not None
    assert parted(bytes(ended.response))[0] == 409
    assert (door.live, left.response) == (set(), None)


@on_loop
async def test_what_is_queued_at_the_stop_is_told_so() -> None:
    door = crowded()
    assert (await door.ask(x_reservation_id="first"))[0] == 200
    pending = door.begin()
    await door.parks(2)
    door.selector.refuse_waiting(Unavailable("stopping"))
    assert pending.response is not None
    status, headers, body = parted(bytes(pending.response))
    assert (status, headers["retry-after"], error(body)["message"]) == (503, "1", "stopping")


@on_loop
async def test_closing_gives_up_what_is_under_way() -> None:
    door = GatewayHandler()
    door.worker(7)
    door.prompts.gate.clear()
    pending = door.begin()
    await until(lambda: door.prompts.asked)
    await door.door.close()
    assert (pending.response, door.live) == (None, set())


@on_loop
async def test_headers_tell_whose_request_waits_and_how_urgent_it_is() -> None:
    door = GatewayHandler(queue_threshold=0.0)
    door.worker(7, max_num_batched_tokens=16)
    assert (await door.ask())[0] == 200
    pending = door.begin(x_team="b", x_lean_priority="low", x_request_timeout_secs="30")
    (partition,) = door.selector.catalog.partitions.values()
    await until(lambda: len(partition.queue) == 1)
    (waiting,) = partition.queue.in_order()
    assert waiting.request.fairness_id == "b"
    assert waiting.request.strict_priority == -1
    assert waiting.request.deadline is not None
    assert 0.0 < waiting.request.deadline - monotonic() <= 30.0
    assert pending.on_disconnect is not None
    pending.on_disconnect()


OF_PREFILL = {
    "x-prefiller-host-port": "10.0.0.8:8000",
    "x-prefill-worker-id": "2",
    "x-prefill-data-parallel-rank": "0",
}


@on_loop
async def test_a_pair_is_named_and_its_leg_goes_with_the_reservation_or_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(route, "_ASSUMED_TOKENS_PER_S", 1e-6)
    gateway = GatewayHandler()
    gateway.worker(1, worker_role="decode")
    gateway.worker(2, "http://10.0.0.8:8000", worker_role="prefill")
    status, headers, _ = await gateway.ask(x_reservation_id="r")
    assert (status, headers["x-lean-pd"]) == (200, "pair; uncached")
    assert headers["x-gateway-destination-endpoint"] == "10.0.0.7:8000"
    assert {name: headers[name] for name in OF_PREFILL} == OF_PREFILL
    assert gateway.live == {"r", "r#prefill"}
    gateway.selector.reservations.free("r", NOW)
    assert gateway.live == set()
    monkeypatch.setattr(route, "_ASSUMED_TOKENS_PER_S", 1e6)
    assert (await gateway.ask(x_reservation_id="r"))[1]["x-lean-pd"].startswith("pair")
    await until(lambda: gateway.live == {"r"})
    gateway.selector.reservations.free("r", NOW)
    gateway.prompts.bars_pair = "several_prompts"
    status, headers, _ = await gateway.ask()
    assert (status, OF_PREFILL.keys() & headers.keys()) == (200, set())


@on_loop
async def test_without_a_prefill_worker_the_gateway_must_not_take_any_worker() -> None:
    gateway = GatewayHandler()
    gateway.worker(1, worker_role="decode")
    status, headers, body = await gateway.ask()
    assert (status, headers["retry-after"]) == (429, "1")
    assert b"no_prefill_worker" in body
