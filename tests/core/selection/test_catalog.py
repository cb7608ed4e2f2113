"""The worker catalog: reasons, replacement, removal, and what becomes of load and sources."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.core.errors import AllWorkersBusy, BadRequest, Unavailable
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.numbers import MAX_RANKS
from lean_selector.core.selection import catalog as catalog_module
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import Source, WorkerSpec
from lean_selector.core.settings import API_1_3
from tests.support.blocks import matches, store_blocks
from tests.support.driven_selector import DrivenSelector, Sources, pack

ENDPOINT = "tcp://w:5557"


@pytest.fixture
def listening() -> DrivenSelector:
    return DrivenSelector(use_kv_events=True)


@pytest.fixture
def deaf() -> DrivenSelector:
    return DrivenSelector(use_kv_events=False)


def reasons(driven: DrivenSelector, **changes: Any) -> list[str]:
    worker = driven.register(1, **changes)
    assert worker.lifecycle == ("incomplete" if worker.reasons else "schedulable")
    return worker.reasons


# -- how much a record may hold --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "as_field"),
    [
        ("kv_events_endpoints", lambda numbers: dict.fromkeys(numbers, ENDPOINT)),
        ("replay_endpoints", lambda numbers: dict.fromkeys(numbers, ENDPOINT)),
        # They are sorted for each record that is shown: 800 000 took 0.7 s.
        ("taints", lambda numbers: frozenset(map(str, numbers))),
        ("topology_domains", lambda numbers: dict.fromkeys(map(str, numbers), "a")),
    ],
)
def test_d28_what_a_record_lists_has_a_limit_and_nothing_changes_beyond_it(
    listening: DrivenSelector, field: str, as_field: Callable[[range], object]
) -> None:
    before = listening.register(1, kv_events_endpoint=ENDPOINT)
    with pytest.raises(BadRequest) as raised:
        listening.selector.catalog.patch(1, {field: as_field(range(4097))})
    assert raised.value.message == f"{field}: 4097 entries exceed the maximum 4096"
    assert listening.selector.catalog.workers[1] is before
    listening.selector.catalog.patch(1, {field: as_field(range(4096))})


def test_d28_endpoints_of_ranks_that_the_worker_lacks_stay_in_its_record() -> None:
    driven = DrivenSelector(use_kv_events=True)
    worker = driven.register(1, kv_events_endpoints={0: ENDPOINT, 7: ENDPOINT, 9: ENDPOINT})
    assert worker.shown(API_1_3)["kv_events_endpoints"] == {
        "0": ENDPOINT,
        "7": ENDPOINT,
        "9": ENDPOINT,
    }
    assert list(worker.sources) == [0]
    worker = driven.selector.catalog.patch(1, {"data_parallel_start_rank": 7})
    assert list(worker.sources) == [7]


# -- what a record lacks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"endpoint": ""}, ["endpoint is required"], id="empty endpoint"),
        pytest.param(
            {"data_parallel_start_rank": 2**32 - 1, "data_parallel_size": 1},
            ["data parallel range overflows u32"],
            id="D6: the range ends beyond u32",
        ),
        pytest.param(
            {"data_parallel_start_rank": 2**32 - 2, "data_parallel_size": 1}, [], id="last range"
        ),
        pytest.param({"max_num_batched_tokens": None}, [], id="no queue, no capacity needed"),
    ],
)
def test_reasons_without_kv_events(
    deaf: DrivenSelector, changes: dict[str, Any], expected: list[str]
) -> None:
    """Those that no recording has: most are in tests/conformance."""
    assert reasons(deaf, **changes) == expected


def test_queueing_needs_a_capacity_and_takes_zero() -> None:
    driven = DrivenSelector(queue_threshold=1.0)
    missing = "max_num_batched_tokens is required while queueing is enabled"
    assert reasons(driven, max_num_batched_tokens=None, endpoint="") == [
        "endpoint is required",
        missing,
    ]
    assert reasons(driven, max_num_batched_tokens=0) == []


FAILED = "reconciliation failed: invalid"
LACKS_KV_EVENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a map counts alone": (
        {"kv_events_endpoint": ENDPOINT, "kv_events_endpoints": {4: ENDPOINT, 6: ""},
         "data_parallel_start_rank": 4, "data_parallel_size": 3},
        [f"kv_events endpoint is required for dp_rank {rank}" for rank in (5, 6)],
    ),
    "a map counts alone, also for one rank": (
        {"kv_events_endpoint": ENDPOINT, "kv_events_endpoints": {1: ENDPOINT}},
        ["kv_events endpoint is required for dp_rank 0"],
    ),
    "no rank of an overflowing range is listed": (
        {"data_parallel_start_rank": 2**32 - 1, "data_parallel_size": 4096},
        ["data parallel range overflows u32"],
    ),
    "the first bad one, extra ranks too": (
        {"kv_events_endpoints": {0: ENDPOINT, 7: "http://a:1", 3: ""}},
        [f"{FAILED} kv_events endpoint for worker 1 dp_rank 3: "
         "invalid ZMQ endpoint ``: missing scheme"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), LACKS_KV_EVENTS.values(), ids=LACKS_KV_EVENTS)
def test_reasons_with_kv_events(
    listening: DrivenSelector, changes: dict[str, Any], expected: list[str]
) -> None:
    assert reasons(listening, **changes) == expected
    assert bool(listening.sources.subscribed) is not bool(expected)


def test_an_endpoint_nobody_uses_is_not_judged(deaf: DrivenSelector) -> None:
    assert reasons(deaf, kv_events_endpoint="foo", replay_endpoint="bar") == []
    assert not deaf.sources.subscribed


@pytest.mark.parametrize("size", [MAX_RANKS + 1, 2**32 - 1])
def test_too_many_ranks_are_refused_and_nothing_changes(deaf: DrivenSelector, size: int) -> None:
    error = f"data_parallel_size {size} exceeds the maximum 4096"
    with pytest.raises(BadRequest, match=error):
        deaf.register(1, data_parallel_size=size)
    assert not deaf.selector.catalog.workers
    deaf.register(1, data_parallel_size=MAX_RANKS)
    with pytest.raises(BadRequest, match=error):
        deaf.selector.patch_worker(1, {"data_parallel_size": size}, 0.0)
    assert len(deaf.loads()["default", "default"]) == MAX_RANKS


# -- the partition's block size (D3) ---------------------------------------------------------------


def keys(driven: DrivenSelector) -> list[tuple[str, str]]:
    return list(driven.loads())


def is_refused(worker: Worker) -> bool:
    return any("mismatch" in reason for reason in worker.reasons)


@pytest.mark.parametrize("by", ["post", "patch"])
def test_the_only_worker_does_not_free_the_size_by_changing_its_own(
    deaf: DrivenSelector, by: str
) -> None:
    deaf.register(1)
    if by == "post":
        worker = deaf.register(1, block_size=8)
    else:
        worker = deaf.selector.patch_worker(1, {"block_size": 8}, 0.0)
    assert is_refused(worker)
    assert keys(deaf) == [("default", "default")]
    with pytest.raises(Unavailable):
        deaf.selector.catalog.ready_partition("default", "default")
    assert not is_refused(deaf.register(1))


@pytest.mark.parametrize("leaves", ["delete", "move"])
@pytest.mark.parametrize("changed", [{"block_size": 8}, {"is_eagle": True}])
def test_a_size_goes_with_the_last_worker_that_has_it(
    deaf: DrivenSelector, leaves: str, changed: dict[str, Any]
) -> None:
    """Workers that were schedulable with the old one, and say another now, do not hold it."""
    for worker_id in (1, 2, 3):
        deaf.register(worker_id)
    deaf.register(4, **changed)
    for worker_id in (1, 2):
        assert is_refused(deaf.register(worker_id, **changed))
    if leaves == "delete":
        deaf.remove(3)
    else:
        deaf.register(3, model_name="m")
    workers = deaf.selector.catalog.workers
    assert [workers[each].lifecycle for each in (1, 2, 4)] == ["schedulable"] * 3


def test_who_does_not_have_a_size_frees_it_too_when_nobody_has_it(deaf: DrivenSelector) -> None:
    """The remedy for one worker works, whichever is told first."""
    deaf.register(1)
    deaf.register(2, block_size=8)
    assert is_refused(deaf.register(1, block_size=8))
    deaf.remove(2)
    assert [each.reasons for each in deaf.selector.catalog.workers.values()] == [[]]


def test_what_a_worker_lacks_does_not_free_its_size(deaf: DrivenSelector) -> None:
    deaf.register(1)
    deaf.register(2)
    deaf.register(1, endpoint="")
    deaf.remove(2)
    assert is_refused(deaf.register(3, block_size=8))


# -- load and sources of a worker that changes (D10) -----------------------------------------------

TWO_RANKS: dict[str, Any] = {
    "data_parallel_size": 2,
    "kv_events_endpoints": {0: "tcp://w:1", 1: "tcp://w:2"},
}


@pytest.fixture
def busy(listening: DrivenSelector) -> DrivenSelector:
    """Worker 1 with a reservation and a block on each of two ranks."""
    listening.register(1, **TWO_RANKS)
    for rank in (0, 1):
        listening.reserve(f"r{rank}", (1, rank), hashes=[rank], prefill=5)
        store_blocks(listening.partition.index, (1, rank), Tier.DEVICE, None, [rank], pack([1]))
    listening.sources.changes.clear()
    listening.told.clear()
    return listening


def holders(driven: DrivenSelector) -> list[tuple[int, int]]:
    return sorted(matches(driven.partition.index, pack([1])))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"endpoint": "http://other"}, id="endpoint"),
        pytest.param({"max_num_batched_tokens": 99, "total_kv_blocks": 50}, id="capacity"),
        pytest.param({"taints": frozenset({"a"}), "stable_routing_id": "s"}, id="labels"),
        pytest.param(
            {"kv_events_endpoint": "tcp://unused:1"}, id="an endpoint that does not count"
        ),
    ],
)
def test_load_index_and_subscriptions_survive_a_change_that_is_not_theirs(
    busy: DrivenSelector, changes: dict[str, Any]
) -> None:
    before = busy.loads()
    busy.register(1, **{**TWO_RANKS, **changes})
    busy.selector.patch_worker(1, changes, 0.0)
    assert busy.loads() == before
    assert busy.sources.changes == []
    assert holders(busy) == [(1, 0), (1, 1)]
    assert busy.told == []


def test_another_event_endpoint_renews_that_rank_only(busy: DrivenSelector) -> None:
    before = busy.loads()
    endpoints = {0: "tcp://w:1", 1: "tcp://w:9"}
    busy.register(1, data_parallel_size=2, kv_events_endpoints=endpoints)
    assert busy.loads() == before
    assert busy.sources.changes == [("unsubscribe", 1, 1), ("subscribe", 1, 1)]
    assert holders(busy) == [(1, 0)]


def test_a_worker_that_becomes_incomplete_loses_load_blocks_and_sources(
    busy: DrivenSelector,
) -> None:
    partition = busy.partition
    busy.register(1, **{**TWO_RANKS, "endpoint": ""})
    assert busy.loads() == {("default", "default"): {}}
    assert not busy.sources.subscribed
    assert partition.index.is_empty
    assert sorted(busy.told) == [("freed", "r0"), ("freed", "r1")]
    busy.register(1, **TWO_RANKS)
    assert busy.loads()["default", "default"] == {(1, 0): (0, 0, 0), (1, 1): (0, 0, 0)}
    assert sorted(busy.sources.subscribed) == [(1, 0), (1, 1)]


# -- sources ---------------------------------------------------------------------------------------


SOURCES: dict[str, tuple[dict[str, Any], dict[int, Source]]] = {
    "one rank": (
        {"kv_events_endpoint": "tcp://w:1", "data_parallel_start_rank": 3},
        {3: Source("tcp://w:1", None)},
    ),
    "D28: ranks outside the range are not heard": (
        {"kv_events_endpoints": {0: "tcp://w:1", 7: "tcp://w:2"}},
        {0: Source("tcp://w:1", None)},
    ),
    "a replay port per rank": (
        {"data_parallel_start_rank": 4, "data_parallel_size": 2,
         "kv_events_endpoints": {4: "tcp://w:1", 5: "tcp://w:2"},
         "replay_endpoint": "tcp://w:9000"},
        {4: Source("tcp://w:1", "tcp://w:9000"), 5: Source("tcp://w:2", "tcp://w:9001")},
    ),
    "a rank's own replay endpoint": (
        {**TWO_RANKS, "replay_endpoint": "tcp://w:9000", "replay_endpoints": {1: "tcp://w:7"}},
        {0: Source("tcp://w:1", "tcp://w:9000"), 1: Source("tcp://w:2", "tcp://w:7")},
    ),
    "no replay where the port cannot exist": (
        {**TWO_RANKS, "replay_endpoint": "tcp://w:65535"},
        {0: Source("tcp://w:1", "tcp://w:65535"), 1: Source("tcp://w:2", None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), SOURCES.values(), ids=SOURCES)
def test_every_rank_is_subscribed_to_its_own_source(
    listening: DrivenSelector, changes: dict[str, Any], expected: dict[int, Source]
) -> None:
    assert reasons(listening, **changes) == []
    assert listening.sources.subscribed == {(1, rank): found for rank, found in expected.items()}


def test_a_rank_holds_twice_the_blocks_that_its_worker_has(listening: DrivenSelector) -> None:
    listening.register(1, kv_events_endpoint=ENDPOINT, total_kv_blocks=2)
    index = listening.partition.index
    for number in range(6):
        store_blocks(index, (1, 0), Tier.DEVICE, None, [number], pack([number]))
    assert index.blocks(1, 0, Tier.DEVICE) == 4
    listening.register(1, kv_events_endpoint=ENDPOINT)
    for number in range(6, 12):
        store_blocks(index, (1, 0), Tier.DEVICE, None, [number], pack([number]))
    assert index.blocks(1, 0, Tier.DEVICE) == 10


def test_a_worker_whose_rank_range_moves_leaves_no_bounds_behind(deaf: DrivenSelector) -> None:
    deaf.register(1, total_kv_blocks=2, data_parallel_size=64)
    index = deaf.partition.index
    for start in (64, 128, 640):
        deaf.selector.catalog.patch(1, {"data_parallel_start_rank": start})
        assert len(index.bounds._set) == 1
        for number in range(10):
            store_blocks(index, (1, start), Tier.DEVICE, None, [number], pack([number]))
        assert index.blocks(1, start, Tier.DEVICE) == 4
    deaf.selector.catalog.patch(1, {"total_kv_blocks": None})
    assert index.bounds.of(1) == index.bounds.default


def test_recovered_blocks_of_another_size_than_the_first_workers_are_told_of_once() -> None:
    discarded: list[Partition] = []
    selector = Selector(
        RouterSettings(use_kv_events=False),
        Sources(),
        random.Random(7),
        on_discarded=discarded.append,
    )
    waiting = selector.catalog.recovered_partition(("m", "t"), 4)
    fitting = selector.catalog.recovered_partition(("m", "u"), 8)
    for worker_id, tenant_id in enumerate(("t", "t", "u", "v")):
        spec = WorkerSpec(
            worker_id=worker_id,
            model_name="m",
            tenant_id=tenant_id,
            endpoint="http://w",
            block_size=8,
        )
        assert not selector.upsert_worker(spec, 0.0).reasons
    assert discarded == [waiting]
    assert selector.catalog.partitions["m", "u"] is fitting


def test_models_without_workers_are_remembered_up_to_a_bound(
    deaf: DrivenSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest are forgotten first, and those that have workers never."""
    monkeypatch.setattr(catalog_module, "MAX_REMEMBERED", 3)
    deaf.register(1, model_name="stays")
    for name in "abcd":
        deaf.register(2, model_name=name)
    catalog = deaf.selector.catalog
    assert [model for model, _ in catalog.known] == ["stays", "c", "d"]
    for worker_id, name in enumerate("efg", 3):
        deaf.register(worker_id, model_name=name)
    assert [model for model, _ in catalog.known] == ["stays", "d", "e", "f", "g"]


def test_a_threshold_counts_from_the_first_complete_worker_of_its_model(
    deaf: DrivenSelector,
) -> None:
    deaf.register(1, endpoint=None)
    key = ("default", "default")
    given = BusyThreshold(active_prefill_tokens=10)
    assert deaf.selector.change_threshold(key, given, deaf.now) == given
    assert not deaf.selector.catalog.partitions
    deaf.register(1)
    deaf.reserve("much", isl_tokens=11, prefill=11)
    with pytest.raises(AllWorkersBusy):
        deaf.book("r")


def test_a_source_at_a_new_endpoint_takes_along_what_the_former_said_of_other_ranks(
    listening: DrivenSelector,
) -> None:
    listening.register(1, kv_events_endpoint=ENDPOINT)
    index = listening.partition.index
    for dp_rank in (0, 3):
        store_blocks(index, (1, dp_rank), Tier.DEVICE, None, [1], pack([1]))
    listening.sources.spoken_for = {0, 3}
    listening.register(1, kv_events_endpoint="tcp://w:6000")
    assert matches(index, pack([1])) == {}


class CountedRank(int):
    """Counts how often a dict or a set looks ranks up."""

    looks = 0

    def __hash__(self) -> int:
        CountedRank.looks += 1
        return super().__hash__()


@pytest.mark.skipif(
    catalog_module.__file__.endswith(".so"), reason="counts what compiled code unboxes"
)
def test_new_endpoints_for_all_ranks_cost_each_rank_the_same(listening: DrivenSelector) -> None:
    """4 096 at once took 2 s when each source looked at all ranks."""

    def looks(ranks: int) -> int:
        for host in "ab":
            CountedRank.looks = 0
            endpoints = {CountedRank(each): f"tcp://{host}:{each + 1}" for each in range(ranks)}
            listening.register(ranks, data_parallel_size=ranks, kv_events_endpoints=endpoints)
        return CountedRank.looks

    assert 0 < looks(64) <= 2.5 * looks(32)
