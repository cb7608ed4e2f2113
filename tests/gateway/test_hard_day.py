"""The gateway's hard day: clients hang up, a worker is killed, the selector is killed."""

import asyncio

from tests.gateway.running_gateway import RunningGateway
from tests.hard_day import Absence, Outcome, hard_day, judge
from tests.openai_worker import OpenAiWorker
from tests.running_service import RunningService, wait_until


def judge_day(outcome: Outcome) -> None:
    judge(outcome, worker_kills=1)
    assert outcome.stickiness >= 0.6, outcome
    assert outcome.cached_tokens >= 0.5 * outcome.prompt_tokens, outcome


def wait_until_both_are_known(selector: RunningService) -> None:
    wait_until(lambda: len(selector.get("/ready")[1].get("workers", [])) == 2, "both are known")


def judge_afterwards(url: str) -> None:
    outcome = asyncio.run(hard_day(url, requests=100, hang_ups=0.0, seed=1))
    assert outcome.complete == outcome.asked == 100, outcome
    assert outcome.stickiness >= 0.6, outcome


def test_clients_hang_up_and_a_worker_is_killed_and_nobody_who_stays_notices() -> None:
    with (
        OpenAiWorker() as first,
        OpenAiWorker() as second,
        RunningGateway(first.url, second.url, knows=2) as gateway,
    ):
        at = {0.3: first.kill, 0.5: first.start}
        outcome = asyncio.run(hard_day(gateway.url, at=at, pause_s=0.01))
        judge_day(outcome)
        judge_afterwards(gateway.url)
        gateway.wait_until_free()
        for worker in (first, second):
            worker.wait_until_idle()
        assert gateway.metric("lean_selector_gateway_active_requests") == 0
        assert gateway.metric("lean_selector_gateway_retries_total") > 0


def test_the_selector_beside_is_killed_too_and_nobody_who_stays_notices() -> None:
    with OpenAiWorker() as first, OpenAiWorker() as second:
        discover = [f"--discover=url:{each.url}" for each in (first, second)]
        selector = RunningService(*discover, "--worker-health-interval-secs", "0.2")
        with selector:
            where = f"http://127.0.0.1:{selector.port}"
            with RunningGateway("--selector", where, first.url, second.url) as gateway:
                absence = Absence(selector, lambda: wait_until_both_are_known(selector))
                wait_until_both_are_known(selector)
                at = {
                    0.2: first.kill,
                    0.35: first.start,
                    0.5: absence.begin,
                    0.7: absence.end,
                }
                outcome = asyncio.run(
                    hard_day(gateway.url, at=at, pause_s=0.01, is_chosen=absence.is_over)
                )
                judge_day(outcome)
                judge_afterwards(gateway.url)

                def is_free() -> bool:
                    loads = [row for each in selector.get("/loads")[1] for row in each["loads"]]
                    return len(loads) == 2 and not any(row["active_requests"] for row in loads)

                wait_until(is_free, "no load is left")
                assert gateway.metric("lean_selector_gateway_unrouted_total") > 0
