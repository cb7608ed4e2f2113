"""Workers that answer, and fail what they are asked: who is avoided for it, and who is not."""

import http.client
import itertools
import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from lean_selector.gateway.gateway_metrics import RetryBudget
from tests.gateway.running_gateway import RunningGateway
from tests.support.openai_worker import OpenAiWorker
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import wait_until

TEXT = "The quick brown fox jumps over the lazy dog. " * 10


def test_a_worker_that_fails_everything_is_ejected_and_the_other_serves() -> None:
    with OpenAiWorker() as well, OpenAiWorker(fails=502) as failing:
        urls, prompts = (well.url, failing.url), itertools.count()
        with RunningGateway(*urls, "--pass-through", "all", knows=2) as gateway:

            def chat() -> tuple[int, str]:
                """One that nobody asked before: its status, and who answered."""
                answer = gateway.chat(f"{next(prompts)} {TEXT}")
                return answer.status, answer.headers["x-lean-worker"]

            def is_reported() -> bool:
                assert chat() == (200, well.url)
                samples = parsed(scrape(gateway.api_port))
                name = "lean_selector_worker_reports_total"
                return bool(samples.get(name)) and value(samples, name, outcome="failed") >= 3

            wait_until(is_reported, "it is asked, and fails")
            retries = gateway.metric("lean_selector_gateway_retries_total")
            assert retries >= 3
            assert {chat() for _ in range(10)} == {(200, well.url)}
            assert gateway.metric("lean_selector_gateway_retries_total") == retries
            # What nobody chose a worker for passes it over, too.
            turns = [gateway.ask("POST", "/echo", {}).headers["x-lean-worker"] for _ in range(4)]
            assert set(turns) == {well.url}


@pytest.mark.parametrize("by", ["the API", "discovery"])
def test_a_draining_worker_finishes_its_answers_and_is_asked_nothing_new(
    by: str, tmp_path: Path
) -> None:
    with ExitStack() as running:
        workers = [running.enter_context(OpenAiWorker(tokens_per_s=20.0)) for _ in range(2)]
        urls = [each.url for each in workers]
        listed = tmp_path / "workers.json"
        listed.write_text(json.dumps([{"endpoint": url} for url in urls]))
        found = ("--discover", f"file:{listed}", "--discover-interval-secs", "0.1")
        flags = (*found, "--discover-grace-secs", "0", "--pass-through", "all")
        gateway = running.enter_context(RunningGateway(*flags, knows=2))
        answer = gateway.begin(running, TEXT, max_tokens=20).getresponse()
        busy = answer.headers["x-lean-worker"]
        left = [url for url in urls if url != busy]
        if by == "the API":
            [worker_id] = [
                w["worker_id"] for w in gateway.api("GET", "/workers") if w["endpoint"] == busy
            ]
            patched = gateway.api("PATCH", f"/workers/{worker_id}", {"lifecycle": "draining"})
            assert patched["lifecycle"] == "draining"
        else:
            (tmp_path / "new").write_text(json.dumps([{"endpoint": url} for url in left]))
            (tmp_path / "new").rename(listed)
            wait_until(lambda: len(gateway.api("GET", "/workers")) == 1, "it is let go of")
        served = [gateway.chat(f"{number} {TEXT}") for number in range(6)]
        served += [gateway.ask("POST", "/echo", {}) for _ in range(4)]
        assert [each.headers["x-lean-worker"] for each in served] == left * 10
        assert answer.read().endswith(b"data: [DONE]\n\n")
        gateway.wait_until_free()


def test_a_fifth_of_the_requests_may_be_retried_and_some_to_begin_with() -> None:
    budget = RetryBudget()
    assert sum(budget.take() for _ in range(1_000)) == RetryBudget.FIRST
    for _ in range(100):
        budget.add()
    assert sum(budget.take() for _ in range(1_000)) in (19, 20)
    assert budget.denied >= 1_900


def test_a_killed_worker_is_one_line_of_the_log_and_each_request_has_its_own() -> None:
    with ExitStack() as running:
        worker = running.enter_context(OpenAiWorker())
        flags = ("--access-log", "true", "--log-format", "json")
        gateway = running.enter_context(RunningGateway(worker.url, *flags, knows=1))
        clients = [
            gateway.begin(running, TEXT, f"r{number}", fake={"stall_after": 2}).getresponse()
            for number in range(8)
        ]
        worker.kill()
        for answer in clients:
            with pytest.raises(http.client.HTTPException):
                answer.read()
        wait_until(lambda: '"requests":' in gateway.log(), "the line is there")
        lines = [json.loads(line) for line in gateway.log().splitlines()]
        troubles = [line for line in lines if line.get("requests")]
        assert [(each["worker"], each["requests"]) for each in troubles] == [(worker.url, 8)]
        ended = [line for line in lines if line.get("worker_failure")]
        assert {each["request_id"] for each in ended} == {f"r{number}" for number in range(8)}
