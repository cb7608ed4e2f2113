"""What a request costs the loop on its way through the gateway: tasks, turns and writes."""

import asyncio
import gc
import json
import random
from itertools import count
from time import monotonic
from typing import Any, cast

import pytest

from lean_selector.api.selector_metrics import _outcomes
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.shapes import GATEWAY, WorkerSpec
from lean_selector.core.settings import EjectionSettings
from lean_selector.gateway.engine_answers import _Told
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.gateway_metrics import Counts, RetryBudget
from lean_selector.gateway.handler import GatewayHandler
from lean_selector.gateway.headers import QueueHeaders
from lean_selector.gateway.placing import Chooser, Placing
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings
from lean_selector.gateway.prompts import OFF, Prompts, Routed
from lean_selector.gateway.proxied_request import ProxiedRequest
from lean_selector.gateway.upstreams import Rotation, WorkerUse
from lean_selector.http.client import ClientConnection
from lean_selector.http.connections import Connections
from lean_selector.http.streaming import StreamingProtocol
from tests.http.test_protocol import Transport
from tests.support.driven_selector import teach
from tests.support.gates import NOW, selection_service
from tests.support.on_loop import on_loop

WORKER = "http://w:1"
EVENT = b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[7]}]}\n\n'
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Gateway:
    """A gateway in process, its worker's kept connection and a client's; no socket."""

    def __init__(self, mode: Mode = Mode.OFF, **settings: Any) -> None:
        self.selector = selection_service(books_at=GATEWAY, **settings).selector
        spec = WorkerSpec(
            worker_id=1,
            model_name="m",
            tenant_id="default",
            endpoint=WORKER,
            block_size=16,
            max_num_batched_tokens=16,
        )
        self.selector.upsert_worker(spec, NOW)
        rotation, nothing = Rotation(EjectionSettings(), NOW), cast(Any, None)
        counts = self.counts = Counts()
        fleet = GatewayFleet(self.selector.catalog)
        prompts = Prompts(PromptSettings(mode=mode, ask_from_bytes=1 << 20), fleet, nothing)
        prompts._engines._told[WORKER] = _Told(prompts._engines._clock(), "vllm", {}, (0, 0))
        placing = Placing(
            prompts,
            Chooser(self.selector, rotation),
            rotation,
            fleet,
            counts,
            nothing,
            nothing,
            None,
            503,
            QueueHeaders("x-team", "x-p", None, trusts=True, by_name=True)
            if "queue_threshold" in settings
            else None,
        )
        self.handler = GatewayHandler(
            placing,
            rotation,
            nothing,
            counts,
            silence_s=600.0,
            touch_after_s=100.0,
            token=None,
            access_log=False,
            most_body_bytes=1 << 20,
            pass_through="none",
            selector_port=0,
        )
        self.worker, self.worker_transport = (
            ClientConnection(rotation.endpoint(WORKER)),
            Transport(),
        )
        self.worker.connection_made(self.worker_transport)
        self.worker.upstream.put_aside(self.worker)

    def client(self) -> tuple[StreamingProtocol, Transport]:
        transport = Transport()
        client = StreamingProtocol(self.handler, Connections(lambda call: None))
        client.connection_made(transport)
        return client, transport

    def add_prefill_worker(self, number: int, endpoint: str) -> None:
        spec = WorkerSpec(
            worker_id=number,
            model_name="m",
            tenant_id="default",
            endpoint=endpoint,
            block_size=16,
            worker_role="prefill",
        )
        self.selector.upsert_worker(spec, NOW)

    @property
    def live(self) -> int:
        partitions = self.selector.catalog.partitions.values()
        return sum(len(each.slots.reservations) for each in partitions)


def request(size: int = 2_000, more: bytes = b"") -> bytes:
    text = random.Random(size).randbytes(size // 2).hex()
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": "m", "messages": messages, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
    return head % (more, len(body)) + body


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.LEARN])
@pytest.mark.parametrize("queue", [{}, {"queue_threshold": 1.0}])
def test_a_request_goes_to_its_worker_in_the_turn_that_read_it_and_each_read_is_one_write(
    mode: Mode, queue: dict[str, float]
) -> None:
    """There is no loop here: nothing could be put off, and no task be made."""
    gateway = Gateway(mode, **queue)
    for _ in range(2):
        client, transport = gateway.client()
        client.data_received(request())
        assert (len(gateway.worker_transport.writes), gateway.live) == (1, 1)
        gateway.worker_transport.take()
        chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
        for read in (ANSWER + chunk, chunk + chunk, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"):
            transport.take()
            gateway.worker.data_received(read)
            assert len(transport.writes) == 1
        assert transport.take().endswith(b"\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        assert (gateway.live, len(gateway.handler._under_way)) == (0, 0)
        assert gateway.worker.is_free


@pytest.mark.parametrize(
    ("last", "hung_up"),
    [
        (EVENT, 1),
        (b"data: [DONE]\n\n", 0),
        (b'data: {"type":"message_stop"}\n\n', 0),
        (b'data: {"type":"response.incomplete"}\n\n', 0),  # vLLM at max_output_tokens
    ],
)
def test_a_client_that_closes_at_the_last_event_has_had_its_answer(
    last: bytes, hung_up: int
) -> None:
    """OpenAI's own client does."""
    gateway = Gateway()
    client, _ = gateway.client()
    client.data_received(request())
    gateway.worker.data_received(ANSWER)
    for event in (EVENT, last):
        gateway.worker.data_received(b"%x\r\n%b\r\n" % (len(event), event))
    client.connection_lost(None)
    assert (gateway.live, gateway.counts.hung_up) == (0, hung_up)


@on_loop
async def test_a_client_that_hangs_up_before_its_task_ran_leaves_the_queue() -> None:
    gateway = Gateway(queue_threshold=0.1)
    first, _ = gateway.client()
    first.data_received(request())
    second, _ = gateway.client()
    second.data_received(request())
    (parked,) = (each.queue for each in gateway.selector.catalog.partitions.values())
    assert (len(parked), gateway.live) == (1, 1)
    second.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (len(parked), gateway.live, len(gateway.handler._under_way)) == (0, 1, 1)
    first.connection_lost(None)
    gc.collect()
    assert gateway.live == 0


@on_loop
async def test_who_waits_at_the_gateway_is_told_apart_by_the_headers() -> None:
    gateway = Gateway(queue_threshold=0.1, queue_fairness="on")
    clients = []
    for who, how in ((b"a", b"high"), (b"a", b"high"), (b"a", b"low"), (b"b", b"normal")):
        client, _ = gateway.client()
        client.data_received(request(more=b"x-team: %b\r\nx-p: %b\r\n" % (who, how)))
        clients.append(client)
    (partition,) = gateway.selector.catalog.partitions.values()
    went = []
    for _ in range(2):
        (name,) = partition.slots.reservations
        gateway.selector.reservations.free(name, NOW)
        went.append(len(partition.queue))
    assert went == [2, 1]
    (left,) = partition.queue.in_order()
    assert (left.request.fairness_id, left.request.strict_priority) == ("a", -1)
    for client in clients:
        client.connection_lost(None)


@on_loop
async def test_what_waits_and_would_come_too_late_is_a_504_of_its_own() -> None:
    gateway = Gateway(queue_threshold=0.1)
    (partition,) = gateway.selector.catalog.partitions.values()
    (load,) = partition.slots.ranks.values()
    teach(partition, load, 1.0)
    more = b"x-request-timeout-secs: 5\r\n"
    first, transport = gateway.client()
    first.data_received(request(more=more))  # it does not wait, so nobody judges it
    assert (gateway.live, transport.writes) == (1, [])
    second, transport = gateway.client()
    second.data_received(request(more=more))
    assert transport.take().startswith(b"HTTP/1.1 504 ")
    assert (gateway.live, len(partition.queue), gateway.counts.answers[504]) == (1, 0, 1)
    meter = gateway.handler.placing.chooser.meter
    assert (meter.by_status(), meter.shed) == ({"200": 1, "504": 1}, 0)
    samples = dict(filter(None, _outcomes([meter], 503)))
    assert samples['{route="gateway",outcome="too_late"}'] == 1
    third, _ = gateway.client()
    third.data_received(request(more=b"x-request-timeout-secs: 500000\r\n"))
    assert len(partition.queue) == 1
    for client in (first, second, third):
        client.connection_lost(None)


def chosen(chooser: Chooser, number: int) -> int | None:
    """The worker that the next request is given, whose prompt nobody has."""
    prompt = Prompt(160, number.to_bytes(8, "big") * 10, 10, number.to_bytes(8, "big"), bytes)
    routed = Routed("m", "default", prompt, b"", why_not=OFF, streams=True)
    steps = chooser.choose(routed, f"r{number}", frozenset())
    with pytest.raises(StopIteration) as end:
        steps.send(None)
    use: WorkerUse = end.value.value
    return use.worker_id


def test_a_worker_that_came_back_is_given_a_share_that_grows() -> None:
    selector = selection_service(books_at=GATEWAY).selector
    for worker_id in (1, 2, 3):
        spec = WorkerSpec(
            worker_id=worker_id,
            model_name="m",
            tenant_id="default",
            endpoint=f"http://w:{worker_id}",
            block_size=16,
        )
        selector.upsert_worker(spec, NOW)
    (partition,) = selector.catalog.partitions.values()
    chooser, numbers = (
        Chooser(selector, Rotation(EjectionSettings(), NOW), slow_start_s=1e6),
        count(),
    )
    key = (1, 0)
    for _ in range(3):
        partition.record_outcome([key], "failed", NOW)
    served = [chosen(chooser, next(numbers)) for _ in range(12)]
    assert 1 not in served
    partition.settle_health(NOW + 30.0)
    assert partition.health.returned == {key: NOW + 30.0}
    for share in (0.0, 0.25, 0.5):
        partition.health.returned[key] = monotonic() - share * 1e6
        served += [chosen(chooser, next(numbers)) for _ in range(9)]
        others = (len(served) - served.count(1)) / 2
        assert abs(served.count(1) - (1 + share * others)) <= 1.0
    partition.health.returned[key] = monotonic() - 1e6
    served += [chosen(chooser, next(numbers)) for _ in range(9)]
    assert (served.count(1), partition.health.returned) == (len(served) // 3, {})


class Spans:
    """Counts them; begun, each has a name."""

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.both_ended = asyncio.Event()

    def begin(self, proxied: ProxiedRequest) -> None:
        self.begun += 1
        proxied.traceparent = f"span-{self.begun}"

    def end(self, proxied: ProxiedRequest) -> None:
        self.ended += 1
        if self.ended == 2:
            self.both_ended.set()


@on_loop
async def test_a_request_that_is_sent_again_has_one_span_and_takes_of_the_budget() -> None:
    async def resolve(host: str, port: int) -> Any:
        raise OSError("it is gone for good")

    gateway, spans = Gateway(), Spans()
    gateway.handler.spans = spans
    gateway.handler.placing.resolve = resolve
    client, transport = gateway.client()
    for _ in range(2):
        gateway.worker_transport.take()
        client.data_received(request())
        assert b"\r\ntraceparent: span-" in b"".join(gateway.worker_transport.writes)
        if spans.begun == 1:
            gateway.worker.data_received(ANSWER + b"1\r\n\n\r\n0\r\n\r\n")
            transport.take()
    gateway.worker.connection_lost(None)  # it had been kept
    assert (gateway.counts.stale, spans.begun, gateway.live) == (1, 2, 1)
    await spans.both_ended.wait()
    assert (transport.take()[:12], spans.begun, gateway.live) == (b"HTTP/1.1 502", 2, 0)
    left = RetryBudget.FIRST + 2 * RetryBudget.SHARE - 1
    assert abs(gateway.counts.retry_budget._left - left) < 1e-9


@pytest.mark.parametrize(
    ("answer", "is_believed"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n{}", True),  # and it breaks
        *(
            (b"HTTP/1.1 %d x\r\ncontent-length: 2\r\n\r\n{}" % status, False)
            for status in (400, 404, 429, 500, 501, 503)
        ),
        (b"", False),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", False),
    ],
)
@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_prompt_that_no_worker_computed_is_not_believed_cached(
    answer: bytes, is_believed: bool, hangs_up: bool
) -> None:
    gateway = Gateway(Mode.LEARN, ttl_s=100.0)
    client, _ = gateway.client()
    body = json.dumps({"model": "m", "prompt": list(range(64))}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    client.data_received(head % len(body) + body)
    (partition,) = gateway.selector.catalog.partitions.values()
    assert partition.index.total_blocks == 4
    if answer:
        gateway.worker.data_received(answer)
    if hangs_up:
        client.connection_lost(None)
    elif not gateway.worker.is_free:
        gateway.worker.connection_lost(OSError("reset"))
    assert gateway.live == 0
    assert partition.index.total_blocks == 4 * is_believed


def test_a_pair_counts_as_two_of_the_five_workers_that_a_request_may_try() -> None:
    gateway, asked = Gateway(), []
    for number in range(2, 8):
        gateway.add_prefill_worker(number, f"http://w:{number}")
        worker = ClientConnection(gateway.handler.rotation.endpoint(f"http://w:{number}"))
        worker.connection_made(Transport())
        worker.upstream.put_aside(worker)
        asked.append(worker)
    client, transport = gateway.client()
    client.data_received(request())
    for _ in range(4):
        (busy,) = (each for each in asked if not each.is_free)
        assert transport.writes == []
        busy.data_received(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")
    # A fifth prefill worker would leave none for the decode.
    assert all(each.is_free for each in asked)
    assert transport.take().startswith(b"HTTP/1.1 503 Busy\r\n")
    assert (gateway.live, gateway.worker_transport.writes) == (0, [])


@pytest.mark.parametrize("fallback", ["refuse", "local"])
def test_a_prefill_worker_without_a_url_leaves_nothing_at_its_partner(fallback: str) -> None:
    gateway = Gateway(pd_fallback=fallback)
    gateway.add_prefill_worker(2, "tcp://w:2")
    client, transport = gateway.client()
    client.data_received(request())
    is_sent = fallback == "local"
    assert gateway.counts.unrouted["no_url"] == is_sent
    assert bool(gateway.worker_transport.writes) == is_sent
    if not is_sent:
        assert transport.take().startswith(b"HTTP/1.1 503 ")
    client.connection_lost(None)
    assert (gateway.live, gateway.worker.upstream.users) == (0, 0)
