"""Thresholds above which requests are shed: the routes and flags of the request-rejection document.

What makes a rank busy, and what becomes of those who wait, is proved in `core/`.
"""

from typing import Any

import pytest

from lean_selector.api.gate import Gate
from tests.support.asked import prompt as any_prompt
from tests.support.asked import worker as any_worker
from tests.support.gates import InProcess, selection_service, selector

MODEL = "Qwen/Qwen3-0.6B"
SHED = {
    "error": "All workers are busy, please retry later",
    "message": "Service temporarily unavailable: All workers are busy, please retry later",
    "type": "service_unavailable",
    "code": 503,
}
NOT_FOUND = "Model 'nope' not found. Thresholds can only be set for discovered models."


def worker(worker_id: int = 1, **fields: object) -> dict[str, object]:
    sizes = {"total_kv_blocks": 100, "max_num_batched_tokens": 1000}
    return any_worker(worker_id, model_name=MODEL, **sizes, **fields)


def prompt(**fields: Any) -> dict[str, object]:
    return any_prompt(model_name=MODEL, **fields)


def set_threshold(service: InProcess, **limits: object) -> Any:
    names = {
        "blocks": "active_decode_blocks_threshold",
        "tokens": "active_prefill_tokens_threshold",
        "frac": "active_prefill_tokens_threshold_frac",
    }
    body = {"model": MODEL, **{names.get(name, name): value for name, value in limits.items()}}
    status, answer = service.post("/busy_threshold", body)
    assert status == 200
    return answer


@pytest.fixture
def nothing() -> InProcess:
    return selector()


@pytest.fixture
def service(nothing: InProcess) -> InProcess:
    assert nothing.post("/workers", worker())[0] == 201
    return nothing


# -- /busy_threshold -------------------------------------------------------------------------------


def test_thresholds_are_set_and_listed_as_the_document_prints_them(service: InProcess) -> None:
    entry = {
        "model": "Qwen/Qwen3-0.6B",
        "active_decode_blocks_threshold": 0.85,
        "active_prefill_tokens_threshold": 10000,
    }
    assert service.post("/busy_threshold", entry) == (200, entry)
    assert service.get("/busy_threshold") == (200, {"thresholds": [entry]})
    # Null and absent leave a threshold as it is.
    changed = {**entry, "active_prefill_tokens_threshold_frac": 2.0}
    assert set_threshold(service, tokens=None, frac=2) == changed


def test_every_model_with_a_worker_is_listed_and_each_tenant_of_it(nothing: InProcess) -> None:
    assert nothing.get("/busy_threshold") == (200, {"thresholds": []})
    for each in (worker(1), worker(2, tenant_id="b")):
        assert nothing.post("/workers", each)[0] == 201
    off = {
        "model": MODEL,
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": None,
    }
    assert nothing.get("/busy_threshold")[1]["thresholds"] == [{**off, "tenant_id": "b"}, off]
    assert set_threshold(nothing, tokens=5, routing_group="b")["tenant_id"] == "b"
    rows = nothing.get("/busy_threshold")[1]["thresholds"]
    assert [row["active_prefill_tokens_threshold"] for row in rows] == [5, None]
    both = {"model": MODEL, "tenant_id": "b", "routing_group": "c"}
    assert nothing.post("/busy_threshold", both)[0] == 400


BLOCKS, TOKENS = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        *((BLOCKS, value, 400) for value in (1.01, -0.5)),
        *((TOKENS, value, 422) for value in (-1, 2**64, 1.5)),
        (f"{TOKENS}_frac", -0.1, 400),
        (BLOCKS, "0.5", 422),
        ("model", None, 422),
    ],
)
def test_a_bad_threshold_is_refused_by_name_and_changes_nothing(
    service: InProcess, field: str, value: object, status: int
) -> None:
    set_threshold(service, blocks=0.5)
    before = service.get("/busy_threshold")
    answer = service.post("/busy_threshold", {"model": MODEL, TOKENS: 3, field: value})
    assert answer[0] == status
    assert field in answer[1]["error"]
    assert service.get("/busy_threshold") == before


def test_a_model_without_a_worker_has_no_threshold_and_the_range_is_judged_before(
    service: InProcess,
) -> None:
    assert service.post("/busy_threshold", {"model": "nope"}) == (404, {"error": NOT_FOUND})
    assert service.post("/busy_threshold", {"model": "nope", BLOCKS: 2})[0] == 400


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?model=nope", 404),
        (f"?model={MODEL}&tenant_id=other", 404),
        (f"?model={MODEL}&model={MODEL}", 400),
        (f"?model={MODEL}&tenant_id=a&routing_group=b", 400),
        (f"?model={MODEL}&tenant_id=default", 200),
    ],
)
def test_delete_names_one_model_that_has_a_worker(
    service: InProcess, query: str, status: int
) -> None:
    assert service.request("DELETE", f"/busy_threshold{query}")[0] == status


# -- rejection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [503, 429, 529])
def test_a_shed_request_is_answered_in_the_words_of_the_document(status: int) -> None:
    service = InProcess(Gate(selection_service().routes(), overload_status=status))
    assert service.post("/workers", worker())[0] == 201
    set_threshold(service, tokens=0)
    service.reserve("a", 1, 1, model_name=MODEL)
    got, lines, body = service.with_headers("POST", "/select", prompt())
    assert (got, lines["content-type"], lines["retry-after"]) == (status, "application/json", "1")
    assert body == {**SHED, "code": status}


def test_only_selections_are_shed_and_what_is_shed_books_nothing(service: InProcess) -> None:
    set_threshold(service, tokens=0)
    service.book("a", model_name=MODEL)  # it is not busy by itself
    before = service.get("/loads")
    assert service.post("/select", prompt()) == (503, SHED)
    assert service.post("/select_and_reserve", prompt(reservation_id="shed")) == (503, SHED)
    assert service.get("/loads") == before
    assert service.end("shed") == 404
    service.reserve("b", 1, 1, model_name=MODEL)  # a decision already made
    assert service.post("/potential_loads", prompt())[0] == 200
    assert service.post("/overlap_scores", prompt())[0] == 200
    for path in ("/loads", "/workers", "/ready", "/health", "/dump", "/busy_threshold"):
        assert service.get(path)[0] == 200
    assert service.post("/reservations/a/output_block", {})[0] == 200
    assert service.request("POST", "/reservations/a/prefill_complete")[0] == 200
    assert service.end("a") == 200
