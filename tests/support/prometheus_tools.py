"""promtool and prometheus for tests, from Debian's package `prometheus`; and scrapes, parsed."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadtest.child_service import ChildService
from tests.support.programs import program
from tests.support.running_service import DEADLINE_S, free_port, wait_until

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def promtool(*words: str, text: str | None = None) -> str:
    """What it printed; fails the test when it finds fault."""
    done = subprocess.run(
        [program("promtool", "prometheus"), *words],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def scrape(port: int, token: str | None = None) -> str:
    url = f"http://127.0.0.1:{port}/metrics"
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    asked = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(asked, timeout=DEADLINE_S) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    assert isinstance(text, str)
    return text


def parsed(text: str) -> Samples:
    """Values by sample name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in found.setdefault(sample.name, {}), "a sample twice"
            found[sample.name][labels] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels; fails when there is none."""
    wanted = set(labels.items())
    values = [number for found, number in samples[name].items() if wanted <= found]
    assert values, f"no sample of {name} with {labels}"
    return sum(values)


class Prometheus:
    """A real one, to ask."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Samples of an instant query, each with `metric` and `value`."""
        result = self.get("/api/v1/query", query=expression)["result"]
        assert isinstance(result, list)
        return result

    def number(self, expression: str) -> float | None:
        """The one value of an expression, None when it has no result."""
        result = self.query(expression)
        return float(result[0]["value"][1]) if len(result) == 1 else None


@contextmanager
def running_prometheus(home: Path, targets: dict[str, int], rules: Path) -> Iterator[Prometheus]:
    """Scrapes the ports of `targets`, by job, five times a second."""
    port = free_port()
    config = {
        "global": {
            "scrape_interval": "200ms",
            "scrape_timeout": "200ms",
            "evaluation_interval": "200ms",
        },
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
            for job, target in targets.items()
        ],
    }
    (home / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        program("prometheus", "prometheus"),
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    prometheus = Prometheus(port)
    with ChildService(command, port, health="/-/ready"):
        wait_until(
            lambda: len(prometheus.query("up == 1")) == len(targets),
            "prometheus scrapes every target",
        )
        yield prometheus
