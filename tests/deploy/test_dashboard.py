"""Every panel of the dashboard in deploy/ has data, on a real Prometheus that scrapes a gateway."""

import json
import re
from pathlib import Path
from typing import Any

from tests.deploy.recipe_commands import DEPLOY
from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import Prometheus, running_prometheus
from tests.support.running_service import RunningService, free_port, wait_until

RULES = DEPLOY / "prometheus" / "lean_selector.rules.yml"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "lean_selector.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# What is shown only where it is so: the comparison is left out here.
_ONLY = re.compile(r" (>|==) 0$")


def query_of(expression: str) -> str:
    """An expression as Grafana would send it."""
    text = expression.replace("$__rate_interval", "1m").replace("$job", ".*")
    return _ONLY.sub("", re.sub(r"\$(instance|model)", ".*", text))


def without_data(prometheus: Prometheus) -> list[str]:
    """The titles of panels none of whose queries finds a sample."""
    return [
        panel["title"]
        for panel in PANELS
        if not any(prometheus.query(query_of(target["expr"])) for target in panel["targets"])
    ]


def test_no_panel_is_without_data(tmp_path: Path) -> None:
    ours, its = free_port(), free_port()
    away = f"http://127.0.0.1:{free_port()}"  # a worker that may have any model
    peer_flags = ("--replica-sync-port", str(its), "--use-kv-events", "false")
    with OpenAiWorker() as a, OpenAiWorker() as b, RunningService(*peer_flags):
        flags = ["--session-affinity-ttl-secs", "60", "--state-dir", str(tmp_path / "state")]
        flags += ["--replica-sync-port", str(ours)]
        flags += ["--replica-sync-peers", f"tcp://127.0.0.1:{its}"]
        with (
            RunningGateway(a.url, b.url, away, *flags, knows=2) as gateway,
            running_prometheus(tmp_path, {"lean-selector": gateway.api_port}, RULES) as prometheus,
        ):
            workers = [each["worker_id"] for each in gateway.api("GET", "/workers")]

            missing: list[str] = []

            def is_shown() -> bool:
                assert gateway.chat("a prompt of some length " * 20, session_id="s").status == 200
                body = {"outcome": "refused", "ttft_ms": 5.0, "cached_tokens": 16}
                gateway.api("POST", f"/workers/{workers[0]}/report", body)
                gateway.api("GET", "/nowhere")
                gateway.chat("of a model that nobody has", model="other")
                prompt = {"model_name": "m", "token_ids": list(range(64))}
                gateway.api("POST", "/select_and_reserve", prompt)
                missing[:] = without_data(prometheus)
                return not missing

            try:
                wait_until(is_shown, "every panel has data", 60)
            except AssertionError:
                raise AssertionError(f"panels without data: {missing}") from None
