"""What Prometheus and the dashboard show of the gateway: its figures, and each of its alerts."""

import contextlib
import http.client
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.service.test_metrics import OWN_NAME, RULES, expressions
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import Prometheus, parsed, running_prometheus, scrape, value
from tests.support.running_service import free_port, wait_until

TEXT = "Of ships and the sea. " * 40
STARVED = ("--queue-threshold", "4")  # no worker tells what that needs
EVENTS_ALONE = ("--router-predicted-ttl-secs", "0")  # the same prompt is asked again at once
ALERTS = {
    "LeanSelectorGatewayErrors": "failing",
    "LeanSelectorGatewayWorkerPassedOver": "failing",
    "LeanSelectorGatewayRetries": "starved",
    "LeanSelectorGatewayUnrouted": "starved",
    "LeanSelectorGatewayMispredicts": "breaking",
    "LeanSelectorGatewayBreaksAnswers": "breaking",
}


class Fleet:
    """Gateways in trouble, by its name, and a Prometheus that does not wait before it fires."""

    def __init__(self, running: ExitStack, home: Path) -> None:
        failing = running.enter_context(OpenAiWorker(fails=500))
        well = running.enter_context(OpenAiWorker())
        silent = running.enter_context(OpenAiWorker(tells_events=False))
        nobody = f"http://127.0.0.1:{free_port()}"
        self.gateways = {
            "failing": running.enter_context(RunningGateway(failing.url, knows=1)),
            "starved": running.enter_context(RunningGateway(well.url, nobody, *STARVED)),
            "breaking": running.enter_context(RunningGateway(silent.url, *EVENTS_ALONE, knows=1)),
        }
        rules = home / "rules.yml"
        rules.write_text(re.sub(r"\bfor: \d+m", "for: 0s", RULES.read_text()))
        targets = {name: each.api_port for name, each in self.gateways.items()}
        prometheus = running_prometheus(home, targets, rules)
        self.prometheus: Prometheus = running.enter_context(prometheus)

    def ask(self, name: str) -> None:
        gateway = self.gateways[name]
        gateway.ask("POST", "/echo", {})
        gateway.chat(TEXT, stream=True)
        if name != "failing":  # before its answer begins, so another is tried; or within it
            cut = {"break_after": 0 if name == "starved" else 1}
            with contextlib.suppress(http.client.IncompleteRead):
                gateway.chat(TEXT, stream=True, fake=cut)

    def firing(self, alert: str) -> set[str]:
        """The gateways of which it tells."""
        found = self.prometheus.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}')
        ports = {each["metric"]["instance"].rpartition(":")[2] for each in found}
        return {name for name, each in self.gateways.items() if str(each.api_port) in ports}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as running:
        yield Fleet(running, tmp_path_factory.mktemp("prometheus"))


@pytest.mark.parametrize(("alert", "name"), ALERTS.items())
def test_an_alert_fires_for_the_gateway_that_is_in_trouble(
    fleet: Fleet, alert: str, name: str
) -> None:
    def fires() -> bool:
        fleet.ask(name)
        return name in fleet.firing(alert)

    wait_until(fires, f"{alert} fires")


def test_all_alerts_of_the_gateway_are_in_this_test() -> None:
    assert set(re.findall(r"alert: (LeanSelectorGateway\w+)", RULES.read_text())) == set(ALERTS)


def test_every_query_of_the_dashboard_has_a_figure_of_the_gateway(fleet: Fleet) -> None:
    fleet.ask("breaking")
    text = scrape(fleet.gateways["breaking"].api_port)
    names = {each for each in OWN_NAME.findall("\n".join(expressions())) if "_gateway_" in each}
    assert len(names) > 8
    assert names <= {*parsed(text), *re.findall(r"^# TYPE (\S+) ", text, re.M)}


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
