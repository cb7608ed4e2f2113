"""`"explain": true`: the figures behind a choice, as they are shown.

That they give the cost and the chances of the draw is proved in `core/selection/test_explain.py`.
"""

from typing import Any

import pytest

from tests.support.asked import prompt as any_prompt
from tests.support.gates import InProcess, answer_of, selector


def prompt(**fields: object) -> dict[str, object]:
    return any_prompt(11, 12, 13, 14, **{"explain": True, **fields})


def explanation(service: InProcess, **fields: object) -> Any:
    status, answer = service.post("/select", prompt(**fields))
    assert status == 200, answer
    return answer["explain"]


@pytest.fixture
def service() -> InProcess:
    return selector()


def test_without_it_the_answer_is_as_documented(service: InProcess) -> None:
    service.add_worker(1)
    for explain in (False, None):
        assert "explain" not in service.post("/select", prompt(explain=explain))[1]
    assert service.post("/select", prompt(explain="yes"))[0] == 422


def test_a_request_names_its_own_policy(service: InProcess) -> None:
    service.add_worker(1)
    (row,) = explanation(service)["ranks"]
    assert "evicted_blocks" not in row
    override = {"policy": "latency", "prefill_load_scale": 7.0}
    (row,) = explanation(service, router_config_override=override)["ranks"]
    assert (row["burden_blocks"], row["evicted_blocks"]) == (30.0 * 4, 15.0 * 4)
    assert row["cost"] == 2.5 * 30.0 * 4 + 4
    refused = prompt(router_config_override={"policy": "fastest"})
    status, answer = service.post("/select", refused)
    assert status == 422
    assert "policy" in str(answer)


@pytest.mark.parametrize(
    ("narrowed", "filtered"),
    [
        pytest.param({"allowed_worker_ids": [1]}, "not_allowed", id="not allowed"),
        pytest.param(
            {"pinned_worker": {"worker_id": 1, "dp_rank": 0}}, "not_pinned", id="not pinned"
        ),
        pytest.param({"routing_constraints": {"required_taints": ["t"]}}, "taint", id="taint"),
        pytest.param({}, "busy", id="busy"),
    ],
)
def test_who_was_no_candidate_is_told_why(
    service: InProcess, narrowed: dict[str, object], filtered: str
) -> None:
    service.add_worker(1, taints=["t"])
    service.add_worker(2, data_parallel_size=2)
    if filtered == "busy":
        for dp_rank in (0, 1):
            service.reserve(str(dp_rank), 2, 5, dp_rank=dp_rank)
        body = {"model": "default", "active_prefill_tokens_threshold": 4}
        assert service.post("/busy_threshold", body)[0] == 200
    why = explanation(service, **narrowed)
    assert [row["filtered"] for row in why["ranks"]] == [None, filtered, filtered]
    assert [row["cost"] is None for row in why["ranks"]] == [False, True, True]
    assert why["drawn"] == "only_candidate"


def test_a_waiting_request_is_explained_when_it_goes() -> None:
    service = selector(queue_threshold=0.5)
    service.add_worker(1, max_num_batched_tokens=64)
    assert service.post("/select_and_reserve", prompt(reservation_id="first"))[0] == 200
    parked = service.later("/select", prompt())
    assert service.end("first") == 200
    why = answer_of(parked)[1]["explain"]
    assert (why["drawn"], why["ranks"][0]["active_requests"]) == ("only_candidate", 0)
