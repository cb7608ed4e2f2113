"""How requests through the gateway count."""

from typing import Any

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import parsed, scrape, value


def test_requests_through_the_gateway_count_like_those_of_the_routes() -> None:
    flags = ("--active-decode-blocks-threshold", "0.5")
    with OpenAiWorker(blocks=100) as worker, RunningGateway(worker.url, *flags, knows=1) as gateway:
        for _ in range(3):
            assert gateway.chat("short", stream=True).status == 200
        assert gateway.chat("short", model="other").status == 404
        gateway.api("POST", "/busy_threshold", {"model": "m", "active_decode_blocks_threshold": 0})
        body = {"model_name": "m", "token_ids": list(range(64)), "reservation_id": "r"}
        gateway.api("POST", "/select_and_reserve", body)
        assert gateway.chat("short").status == 503
        found = parsed(scrape(gateway.api_port))

        def outcome(**labels: Any) -> float:
            return value(found, "lean_selector_selections_total", **labels)

        told = {name: outcome(route="gateway", outcome=name) for name in ("placed", "shed")}
        assert told == {"placed": 3, "shed": 1}
        assert outcome(route="gateway", outcome="unknown_model") == 1
        assert outcome(route="gateway", outcome="no_worker") == 0
        assert value(found, "dynamo_tasks_issued_total", route="gateway") == 5
        assert value(found, "dynamo_tasks_rejected_total", route="gateway") == 1
        took = "lean_selector_http_request_duration_seconds_count"
        assert value(found, took, route="gateway") == 5
        assert value(found, "lean_selector_worker_ttft_reports_total") == 3
        assert value(found, "lean_selector_worker_ttft_seconds_total") > 0
