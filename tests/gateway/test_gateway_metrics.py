"""How requests through the gateway count."""

from typing import Any

from lean_selector.gateway.genai_metrics import GenAiMetrics, Timing
from lean_selector.http.client import Upstream
from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import parsed, scrape, value


def test_requests_through_the_gateway_count_like_those_of_the_routes_and_by_model_and_worker() -> (
    None
):
    """The latter by the names of OpenTelemetry's conventions."""
    flags = ("--active-decode-blocks-threshold", "0.5")
    with OpenAiWorker(blocks=100) as worker, RunningGateway(worker.url, *flags, knows=1) as gateway:
        for streams in (True, True, False):
            assert gateway.chat("short", stream=streams).status == 200
        said = [{"role": "user", "content": "short"}]
        body = {"model": "m", "max_tokens": 4, "messages": said}
        assert gateway.ask("POST", "/v1/messages", body).status == 200
        assert gateway.chat("short", model="other").status == 404
        gateway.api("POST", "/busy_threshold", {"model": "m", "active_decode_blocks_threshold": 0})
        body = {"model_name": "m", "token_ids": list(range(64)), "reservation_id": "r"}
        gateway.api("POST", "/select_and_reserve", body)
        assert gateway.chat("short").status == 503
        found = parsed(scrape(gateway.api_port))

        def outcome(**labels: Any) -> float:
            return value(found, "lean_selector_selections_total", **labels)

        told = {name: outcome(route="gateway", outcome=name) for name in ("placed", "shed")}
        assert told == {"placed": 4, "shed": 1}
        assert outcome(route="gateway", outcome="unknown_model") == 1
        assert outcome(route="gateway", outcome="no_worker") == 0
        assert value(found, "dynamo_tasks_issued_total", route="gateway") == 6
        assert value(found, "dynamo_tasks_rejected_total", route="gateway") == 1
        took = "lean_selector_http_request_duration_seconds_count"
        assert value(found, took, route="gateway") == 6
        assert value(found, "lean_selector_worker_ttft_reports_total") == 2
        assert value(found, "lean_selector_worker_ttft_seconds_total") > 0

        def of(name: str, provider: str = "openai", **more: str) -> float:
            where = {"gen_ai_request_model": "m", "server_port": str(worker.port)}
            how = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": provider}
            return value(found, name, **where, **how, **more)

        assert of("gen_ai_server_time_to_first_token_seconds_count") == 2
        assert of("gen_ai_server_time_per_output_token_seconds_count") == 2
        assert of("gen_ai_server_request_duration_seconds_count") == 3
        assert of("gen_ai_client_token_usage_sum", gen_ai_token_type="output") == 12
        assert of("lean_selector_gateway_cached_share_count") == 3
        assert of("gen_ai_server_request_duration_seconds_count", "anthropic") == 1


def test_paths_of_one_operation_are_one_series() -> None:
    """Two with the same labels are no exposition."""
    metrics, timing = GenAiMetrics(), Timing(0.5, None, (8, 2), None)
    for path in (b"/v1/chat/completions", b"/v1/responses", b"/v1/messages"):
        metrics.add(path, "m", Upstream("http://w:1"), timing)
    text = "".join(part for family in metrics.families() for part in family.text())
    name = "gen_ai_server_request_duration_seconds_count"
    providers = {"openai": 2.0, "anthropic": 1.0}
    assert {
        each: value(parsed(text), name, gen_ai_provider_name=each) for each in providers
    } == providers
