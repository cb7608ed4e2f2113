"""Who can be chosen, by the records of the workers and what is held against them."""

from lean_selector.tools.check_judgements import (
    Finding,
    Level,
    WorkerRecord,
    can_be_chosen,
    judge_workers,
)
from lean_selector.wire.selection_bodies import RankHealthRow, WorkerHealthDetail

from .selector_answers import rank_health

REFUSED = "3 requests in a row failed, the last: connection refused"


def worker(
    worker_id: int,
    *ranks: RankHealthRow,
    block_size: int = 16,
    tenant_id: str = "default",
    size: int = 1,
) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        model_name="m",
        lifecycle="schedulable",
        tenant_id=tenant_id,
        block_size=block_size,
        data_parallel_size=size,
        health=WorkerHealthDetail("in_service", [*ranks]),
    )


def out(dp_rank: int = 0, returns_in_s: float | None = 29.3) -> RankHealthRow:
    return rank_health(dp_rank, "ejected", REFUSED, returns_in_s)


def judged(*workers: WorkerRecord) -> list[Finding]:
    return list(judge_workers([*workers]))


def test_an_ejected_worker_is_named_with_its_reason_and_does_not_count() -> None:
    workers = worker(1, out()), worker(2), worker(3)
    [finding] = judged(*workers)
    assert (finding.level, finding.subject) == (Level.WARNING, "worker 1")
    assert finding.what == f"ejected, for 29 s more: {REFUSED}"
    assert can_be_chosen([*workers]) == 2


def test_who_was_ejected_by_polls_is_out_until_one_succeeds() -> None:
    [finding] = judged(worker(1, out(returns_in_s=None)), worker(2))
    assert finding.what.startswith("ejected, until a poll of it succeeds: ")


def test_a_worker_that_has_other_ranks_left_can_be_chosen_and_the_rank_is_named() -> None:
    workers = worker(1, out(1), size=2), worker(2, out(0), out(2), size=3)
    first, second = judged(*workers)
    assert first.what.startswith("rank 1 is ejected, ")
    assert second.what.startswith("ranks 0, 2 are ejected, ")
    assert can_be_chosen([*workers]) == 2


def test_where_all_of_a_model_are_ejected_that_is_an_error_and_they_are_tried() -> None:
    workers = worker(1, out()), worker(2, out()), worker(3, tenant_id="other")
    found = judged(*workers)
    assert [(finding.level, finding.subject) for finding in found] == [
        (Level.ERROR, "model m"),
        (Level.WARNING, "worker 1"),
        (Level.WARNING, "worker 2"),
    ]
    assert "all its workers (tenant default) are ejected, and tried all the same" in found[0].what
    assert can_be_chosen([*workers]) == 3


def test_a_rank_on_probation_is_a_note_and_what_only_failed_is_nothing() -> None:
    probation = rank_health(0, "probation", REFUSED)
    workers = worker(1, probation), worker(2, rank_health(0, "in_service"))
    [finding] = judged(*workers)
    assert (finding.level, finding.subject) == (Level.NOTE, "worker 1")
    assert finding.what.startswith("rank 0 is on probation, ")
    assert finding.what.endswith(REFUSED)
    assert can_be_chosen([*workers]) == 2


def test_a_worker_that_lacks_something_does_not_count_whatever_else_it_is() -> None:
    incomplete = worker(1, out())
    incomplete.lifecycle, incomplete.not_schedulable_reasons = (
        "incomplete",
        ["endpoint is required"],
    )
    [finding] = judged(incomplete, worker(2))
    assert (finding.level, finding.subject) == (Level.ERROR, "worker 1")
    assert finding.what == "cannot be chosen: endpoint is required"
    assert can_be_chosen([incomplete, worker(2)]) == 1


def test_block_sizes_of_a_model_that_differ_are_an_error_and_of_two_tenants_are_none() -> None:
    [finding] = judged(worker(1), worker(2, block_size=32))
    assert (finding.level, finding.subject) == (Level.ERROR, "model m")
    assert finding.what == "its workers (tenant default) have blocks of [16, 32] tokens"
    assert judged(worker(1), worker(2, block_size=32, tenant_id="other")) == []
