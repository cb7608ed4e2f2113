"""Workers that answer, and fail what they are asked: who is avoided for it, and who is not."""

import http.client
import itertools
import json
from contextlib import ExitStack

import pytest

from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import wait_until

TEXT = "The quick brown fox jumps over the lazy dog. " * 10


class Fleet:
    """A worker that is well, and one that answers everything with a status."""

    def __init__(self, running: ExitStack, status: int) -> None:
        self.well = running.enter_context(OpenAiWorker())
        self.failing = running.enter_context(OpenAiWorker(fails=status))
        urls = (self.well.url, self.failing.url)
        gateway = RunningGateway(*urls, "--pass-through", "all", knows=2)
        self.gateway = running.enter_context(gateway)
        self._prompts = itertools.count()

    def chat(self) -> tuple[int, str]:
        """One that nobody asked before: its status, and who answered."""
        answer = self.gateway.chat(f"{next(self._prompts)} {TEXT}")
        return answer.status, answer.headers["x-lean-worker"]

    def reported(self, outcome: str) -> float:
        """To the selector, of either worker."""
        samples = parsed(scrape(self.gateway.api_port))
        name = "lean_selector_worker_reports_total"
        return value(samples, name, outcome=outcome) if samples.get(name) else 0.0


def test_who_answers_500_to_everything_is_ejected_and_the_other_serves() -> None:
    with ExitStack() as running:
        fleet = Fleet(running, 500)
        gateway = fleet.gateway
        wait_until(lambda: fleet.chat() == (500, fleet.failing.url), "it is asked, and fails")
        wait_until(
            lambda: fleet.chat()[0] == 200 and fleet.reported("failed") >= 3, "it is reported"
        )
        answers = {fleet.chat() for _ in range(10)}
        assert answers == {(200, fleet.well.url)}
        # What nobody chose a worker for passes it over, too.
        turns = [gateway.ask("POST", "/echo", {}).headers["x-lean-worker"] for _ in range(4)]
        assert set(turns) == {fleet.well.url}


@pytest.mark.parametrize("status", [503, 429])
def test_a_worker_that_is_full_is_not_held_against_and_another_serves(status: int) -> None:
    with ExitStack() as running:
        fleet = Fleet(running, status)

        def is_tried_elsewhere() -> bool:
            assert fleet.chat() == (200, fleet.well.url)
            return fleet.gateway.metric("lean_selector_gateway_retries_total") >= 1

        wait_until(is_tried_elsewhere, "the full worker is chosen, and another answers")
        assert fleet.reported("failed") == 0
        assert fleet.gateway.metric("lean_selector_gateway_worker_well") == 2
        assert fleet.gateway.load() == 0
        fleet.well.kill()
        answer = fleet.gateway.chat("Once more: " + TEXT)
        assert (answer.status, answer.headers["x-lean-worker"]) == (status, fleet.failing.url)
        assert answer.json()["error"]["code"] == status  # in the worker's own words


def test_a_killed_worker_is_one_line_of_the_log_and_each_request_has_its_own() -> None:
    with ExitStack() as running:
        worker = running.enter_context(OpenAiWorker())
        flags = ("--access-log", "true", "--log-format", "json")
        gateway = running.enter_context(RunningGateway(worker.url, *flags, knows=1))
        clients = []
        for number in range(8):
            body = json.dumps(
                {"model": "m", "prompt": TEXT, "stream": True, "fake": {"stall_after": 2}}
            )
            client = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
            running.callback(client.close)
            client.request("POST", "/v1/completions", body, {"x-request-id": f"r{number}"})
            clients.append(client.getresponse())
        worker.kill()
        for answer in clients:
            with pytest.raises(http.client.HTTPException):
                answer.read()
        wait_until(lambda: "cut short" in gateway.log(), "the line is there")
        lines = [json.loads(line) for line in gateway.log().splitlines()]
        troubles = [line for line in lines if line.get("requests")]
        assert [(each["worker"], each["requests"]) for each in troubles] == [(worker.url, 8)]
        ended = [line for line in lines if line.get("worker_failure")]
        assert {each["request_id"] for each in ended} == {f"r{number}" for number in range(8)}
