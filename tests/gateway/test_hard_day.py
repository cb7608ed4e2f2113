"""The gateway's hard day: clients hang up, and a worker is killed."""

import asyncio

from tests.gateway.running_gateway import RunningGateway
from tests.support.hard_day import Outcome, hard_day, judge
from tests.support.openai_worker import OpenAiWorker


def judge_day(outcome: Outcome) -> None:
    judge(outcome, worker_kills=1)
    assert outcome.stickiness >= 0.6, outcome
    assert outcome.cached_tokens >= 0.5 * outcome.prompt_tokens, outcome


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
