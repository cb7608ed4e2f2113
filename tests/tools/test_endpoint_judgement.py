"""Which ranks share an endpoint that only one of them can have."""

from lean_selector.tools.check_judgements import Level, WorkerRecord, judge_shared_endpoints
from lean_selector.wire.selection_bodies import KvSource

from .selector_answers import source as source_in


def worker(worker_id: int, endpoint: str | None = None) -> WorkerRecord:
    return WorkerRecord(
        worker_id, "m", "schedulable", endpoint=endpoint or f"http://gpu-{worker_id}"
    )


def source(worker_id: int, events: str, replay: str | None, dp_rank: int = 0) -> KvSource:
    fields = {"worker_id": worker_id, "dp_rank": dp_rank, "endpoint": events}
    return source_in("live", **fields, replay_endpoint=replay)


def judged(workers: list[WorkerRecord], *sources: KvSource) -> list[tuple[str, str]]:
    found = list(judge_shared_endpoints(workers, sources))
    assert {finding.level for finding in found} <= {Level.ERROR}
    return [(finding.subject, finding.what.partition(": what")[0]) for finding in found]


def test_a_replay_endpoint_that_is_another_workers_is_named_at_both() -> None:
    workers = [worker(1), worker(2)]
    assert judged(
        workers, source(1, "tcp://a:1", "tcp://a:2"), source(2, "tcp://b:1", "tcp://a:2")
    ) == [
        (
            "worker 1 rank 0",
            "replay_endpoint tcp://a:2 is also the replay_endpoint of worker 2 rank 0",
        )
    ]


def test_two_ranks_of_a_worker_and_two_fields_of_a_rank_share_nothing_either() -> None:
    ranks = source(1, "tcp://a:1", None), source(1, "tcp://a:1", "tcp://a:1", dp_rank=1)
    assert judged([worker(1)], *ranks) == [
        (
            "worker 1 rank 0",
            "kv_events_endpoint tcp://a:1 is also the kv_events_endpoint of worker 1 rank 1, "
            "the replay_endpoint of worker 1 rank 1",
        )
    ]


def test_one_engine_that_is_registered_twice_shares_with_itself() -> None:
    workers = [worker(1, "http://gpu"), worker(2, "http://gpu")]
    assert (
        judged(workers, source(1, "tcp://a:1", "tcp://a:2"), source(2, "tcp://a:1", "tcp://a:2"))
        == []
    )


def test_of_many_that_share_one_the_first_are_named_and_the_others_counted() -> None:
    workers = [worker(number) for number in range(7)]
    [(subject, what)] = judged(workers, *(source(number, "tcp://a:1", None) for number in range(7)))
    assert subject == "worker 0 rank 0"
    assert what.endswith("the kv_events_endpoint of worker 4 rank 0 and 2 more")


def test_ranks_with_endpoints_of_their_own_and_without_replays_are_fine() -> None:
    workers = [worker(1), worker(2)]
    assert judged(workers, source(1, "tcp://a:1", None), source(2, "tcp://b:1", None)) == []
