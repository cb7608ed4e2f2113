"""Spans of the gateway at a collector that takes OTLP over HTTP, and metrics by GenAI's names."""

import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.running_service import wait_until
from tests.support.threaded_server import ThreadedServer, body_of, send

TEXT = "Tell me of the sea. " * 20
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector(ThreadedServer):
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def _take(self, handler: BaseHTTPRequestHandler) -> None:
        assert handler.path == "/v1/traces"
        assert handler.headers["content-type"] == "application/x-protobuf"
        for of_resource in ExportTraceServiceRequest.FromString(body_of(handler)).resource_spans:
            self.services.add(attributes(of_resource.resource)["service.name"])
            for scope in of_resource.scope_spans:
                self.spans += scope.spans
        send(handler, 200)


def attributes(holder: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes
    }


@pytest.fixture(name="collector")
def _collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector:
        yield collector


def test_a_span_has_the_client_s_above_it_and_the_worker_s_below(collector: Collector) -> None:
    flags = ("--otlp-endpoint", collector.url, "--access-log", "true", "--log-format", "json")
    with OpenAiWorker() as worker, RunningGateway(worker.url, *flags, knows=1) as gateway:
        given = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert len(gateway.chat(TEXT, given, stream=True).events()) > 1
        assert gateway.chat(TEXT, fake={"status": 422}).status == 422
        wait_until(lambda: len(collector.spans) == 2, "both spans came")
        good, bad = collector.spans
        assert (good.name, good.trace_id.hex(), good.parent_span_id.hex()) == (
            "chat",
            TRACE,
            PARENT,
        )
        assert [event.name for event in good.events] == ["first token"]
        assert good.start_time_unix_nano < good.events[0].time_unix_nano < good.end_time_unix_nano
        told = attributes(good)
        assert (told["gen_ai.request.model"], told["server.port"]) == ("m", worker.port)
        assert (told["gen_ai.usage.output_tokens"], told["http.response.status_code"]) == (4, 200)
        assert told["gen_ai.usage.input_tokens"] > 400
        assert (attributes(bad)["http.response.status_code"], bad.parent_span_id) == (422, b"")
        assert collector.services == {"lean-selector"}
        asked = [each for each in worker.seen()["requests"] if "chat/completions" in each["line"]]
        below = [each["headers"]["traceparent"] for each in asked]  # and flags, of its SDK
        own = [f"00-{s.trace_id.hex()}-{s.span_id.hex()}-0" for s in (good, bad)]
        assert [each[:-1] for each in below] == own
        lines = [json.loads(line) for line in gateway.log().splitlines()]
        [line] = [each for each in lines if each.get("path") and each["status"] == 200]
        assert (line["model"], line["output_tokens"], line["traceparent"]) == ("m", 4, below[0])
        assert 0 < line["ttft_us"] < line["duration_us"]


def test_each_leg_of_a_pair_has_a_span_below_the_request_s(collector: Collector) -> None:
    with OpenAiWorker(transfers=True) as prefill, OpenAiWorker(transfers=True) as decode:
        urls = ("--prefill", prefill.url, "--decode", decode.url)
        flags = ("--otlp-endpoint", collector.url, "--access-log", "true", "--log-format", "json")
        with RunningGateway(*urls, *flags, knows=2) as gateway:
            assert gateway.chat(TEXT, stream=True).status == 200
            wait_until(lambda: len(collector.spans) == 3, "all spans came")
            (whole,) = (each for each in collector.spans if not each.parent_span_id)
            legs = {each.name: each for each in collector.spans if each is not whole}
            ports = {name: attributes(each)["server.port"] for name, each in legs.items()}
            assert ports == {"prefill": prefill.port, "decode": decode.port}
            assert {each.parent_span_id for each in legs.values()} == {whole.span_id}
            first, second = legs["prefill"], legs["decode"]
            times = [whole.start_time_unix_nano, first.start_time_unix_nano]
            times += [first.end_time_unix_nano, second.start_time_unix_nano]
            times += [second.end_time_unix_nano]
            assert times == sorted(times)
            assert attributes(whole)["lean_selector.pd"] == "pair; uncached"
            lines = [json.loads(line) for line in gateway.log().splitlines()]
            [line] = [each for each in lines if each.get("path") == "/v1/chat/completions"]
            told = (line["pd"], line["worker"], line["prefill_worker"])
            assert told == ("pair; uncached", decode.url, prefill.url)


def test_a_traceparent_is_passed_on_where_no_spans_are_made(
    gateway: RunningGateway, workers: list[OpenAiWorker]
) -> None:
    given = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert gateway.chat(TEXT, given).status == 200
    asked = [each["headers"] for worker in workers for each in worker.seen()["requests"]]
    assert [each["traceparent"] for each in asked if "traceparent" in each] == [*given.values()]


def test_a_collector_that_says_nothing_holds_no_request_and_no_stop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, OpenAiWorker() as worker:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with RunningGateway(worker.url, "--otlp-endpoint", url, knows=1) as gateway:
            assert [gateway.chat(TEXT).status for _ in range(20)] == [200] * 20
            gateway.wait_until_free()
