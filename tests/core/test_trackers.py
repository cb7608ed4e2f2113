"""The rules of the slot tracker, with its words and their precedence (slot_tracker.md 1.3)."""

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lean_selector.core.errors import (
    BadRequest,
    Conflict,
    DuplicateRequest,
    NotFound,
    SelectorError,
)
from lean_selector.core.load.shapes import LoadRow, PotentialLoadRow, WorkerRow
from lean_selector.core.numbers import MAX_ISL_TOKENS, MAX_RANKS
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents, Verdict
from lean_selector.core.replication.ledger import REPUBLISH_AFTER_S, republish_after_s
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.core.trackers import Trackers
from tests.support.bookings import book

WORKER = WorkerRow(7, "llama", "t1", 16, 0, 2)
SCOPE = ("llama", "t1")


def hashes(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


PROMPT = hashes(1, 2, 3)


def row(**fields: object) -> WorkerRow:
    return msgspec.structs.replace(WORKER, **fields)


def ready() -> Trackers:
    trackers = Trackers()
    trackers.register(WORKER)
    return trackers


def add(trackers: Trackers, request_id: str = "r", dp_rank: int = 0, now: float = 0.0) -> None:
    trackers.add(*SCOPE, request_id, 7, dp_rank, PROMPT, 48, now)


def loads(trackers: Trackers) -> list[tuple[int, int]]:
    return [
        (load.active_prefill_tokens, load.active_decode_blocks)
        for load in trackers.loads(*SCOPE, 0.0)
    ]


# Workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "error", "text"),
    [
        (row(block_size=0, dp_size=0), BadRequest, "block_size must be greater than 0"),
        (row(dp_size=0, dp_start=2**32 - 1), BadRequest, "dp_size must be greater than 0"),
        (
            row(dp_start=2**32 - 1, dp_size=1),
            BadRequest,
            "dp range overflows u32: start=4294967295 size=1",
        ),
        (
            row(dp_start=1, dp_size=2**32 - 1),
            BadRequest,
            "dp range overflows u32: start=1 size=4294967295",
        ),
        (row(dp_size=2**32 - 1), BadRequest, "dp_size 4294967295 exceeds the maximum 4096"),
        (
            row(dp_size=MAX_RANKS + 1, block_size=32),
            BadRequest,
            "dp_size 4097 exceeds the maximum 4096",
        ),
        (
            row(block_size=32),
            Conflict,
            "block_size mismatch for model=llama tenant=t1: existing=16, requested=32",
        ),
        (WORKER, Conflict, "worker 7 already registered for model=llama tenant=t1"),
        (
            row(dp_start=5, dp_size=9),
            Conflict,
            "worker 7 already registered for model=llama tenant=t1",
        ),
    ],
)
def test_a_registration_that_cannot_be_is_refused_and_changes_nothing(
    worker: WorkerRow, error: type[SelectorError], text: str
) -> None:
    trackers = ready()
    add(trackers)
    before = trackers.loads(None, None, 0.0)
    with pytest.raises(error) as raised:
        trackers.register(worker)
    assert raised.value.message == text
    assert trackers.workers() == [WORKER]
    assert trackers.loads(None, None, 0.0) == before


def test_a_refused_registration_makes_no_tracker() -> None:
    trackers = Trackers()
    with pytest.raises(BadRequest):
        trackers.register(row(dp_size=0))
    assert trackers.lookup(*SCOPE) is None


def test_the_largest_ranges_are_accepted() -> None:
    trackers = Trackers()
    trackers.register(row(dp_size=MAX_RANKS))
    trackers.register(row(worker_id=8, dp_start=2**32 - 2, dp_size=1))
    assert len(trackers.loads(None, None, 0.0)) == MAX_RANKS + 1


def test_the_same_worker_id_may_be_in_two_scopes_with_two_block_sizes() -> None:
    trackers = ready()
    trackers.register(row(tenant_id="t2", block_size=32))
    assert [worker.block_size for worker in trackers.workers()] == [16, 32]


def test_lists_are_sorted_and_filtered_exactly() -> None:
    trackers = Trackers()
    rows = [
        row(model_name=model, tenant_id=tenant, worker_id=worker_id, dp_size=1)
        for model in ("B", "a", "a b", "\u00e9")
        for tenant in ("", "t")
        for worker_id in (2, 10)
    ]
    for worker in reversed(rows):
        trackers.register(worker)
    assert trackers.workers() == rows
    assert trackers.workers("a") == [worker for worker in rows if worker.model_name == "a"]
    assert trackers.workers(None, "") == [worker for worker in rows if worker.tenant_id == ""]
    assert trackers.workers("a", "") == rows[4:6]
    assert trackers.workers("A") == []
    assert [(load.model_name, load.worker_id) for load in trackers.loads("a b", "t", 0.0)] == [
        ("a b", 2),
        ("a b", 10),
    ]


@pytest.mark.parametrize("scope_and_id", [("llama", "t1", 8), ("llama", "t2", 7), ("l", "t1", 7)])
def test_an_unknown_worker_cannot_be_unregistered(scope_and_id: tuple[str, str, int]) -> None:
    model, tenant, worker_id = scope_and_id
    with pytest.raises(NotFound) as raised:
        ready().unregister(*scope_and_id)
    assert raised.value.message == f"worker {worker_id} not found for model={model} tenant={tenant}"


def test_unregistering_a_worker_forgets_its_requests_and_no_others() -> None:
    trackers = ready()
    trackers.register(row(worker_id=8, dp_size=1))
    add(trackers, "on 7")
    trackers.add(*SCOPE, "on 8", 8, 0, PROMPT, 48, 0.0)
    trackers.unregister(*SCOPE, 7)
    with pytest.raises(NotFound, match="Request on 7 not found"):
        trackers.prefill_complete(*SCOPE, "on 7", 0.0)
    trackers.add(*SCOPE, "on 7", 8, 0, PROMPT, 0, 0.0)
    assert trackers.loads(None, None, 0.0) == [LoadRow("llama", "t1", 8, 0, 48, 3)]


def test_the_last_worker_takes_the_tracker_along_and_frees_its_block_size() -> None:
    trackers = ready()
    add(trackers)
    trackers.unregister(*SCOPE, 7)
    with pytest.raises(NotFound, match="no slot tracker for model=llama tenant=t1"):
        trackers.free(*SCOPE, "r", 0.0)
    trackers.register(row(block_size=32))
    assert loads(trackers) == [(0, 0), (0, 0)]


# Requests ----------------------------------------------------------------------------------------


CALLS: dict[str, Callable[[Trackers], object]] = {
    "add": lambda t: t.add("m", "t", "r", 7, 0, PROMPT, 0, 0.0),
    "prefill_complete": lambda t: t.prefill_complete("m", "t", "r", 0.0),
    "free": lambda t: t.free("m", "t", "r", 0.0),
    "potential_loads": lambda t: t.potential_loads("m", "t", PROMPT, 0, 0.0),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_without_a_tracker_there_is_nothing_to_do(call: Callable[[Trackers], object]) -> None:
    with pytest.raises(NotFound) as raised:
        call(ready())
    assert raised.value.message == "no slot tracker for model=m tenant=t"


@pytest.mark.parametrize(("worker_id", "dp_rank"), [(8, 0), (7, 2)])
def test_a_rank_that_is_not_registered_is_noticed_before_a_duplicate_id(
    worker_id: int, dp_rank: int
) -> None:
    trackers = ready()
    add(trackers)
    with pytest.raises(NotFound) as raised:
        trackers.add(*SCOPE, "r", worker_id, dp_rank, PROMPT, 0, 0.0)
    rank = f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
    assert raised.value.message == f"Worker {rank} not found"


def test_an_active_id_is_a_conflict_until_it_is_freed() -> None:
    trackers = ready()
    add(trackers, dp_rank=1)
    with pytest.raises(DuplicateRequest) as raised:
        add(trackers, dp_rank=0)
    assert raised.value.message == (
        "Request r already exists (assigned to worker "
        "WorkerWithDpRank { worker_id: 7, dp_rank: 1 })"
    )
    trackers.free(*SCOPE, "r", 0.0)
    add(trackers, dp_rank=0)
    assert loads(trackers) == [(48, 3), (0, 0)]


def test_an_id_may_be_active_in_two_trackers() -> None:
    trackers = ready()
    trackers.register(row(tenant_id="t2"))
    add(trackers)
    trackers.add("llama", "t2", "r", 7, 0, PROMPT, 1, 0.0)
    trackers.free("llama", "t2", "r", 0.0)
    assert loads(trackers) == [(48, 3), (0, 0)]


def test_prefill_completion_is_repeatable_and_of_an_unknown_id_an_error() -> None:
    trackers = ready()
    add(trackers)
    for _ in range(2):
        trackers.prefill_complete(*SCOPE, "r", 0.0)
        assert loads(trackers)[0] == (0, 3)
    with pytest.raises(NotFound, match=r"^Request s not found$"):
        trackers.prefill_complete(*SCOPE, "s", 0.0)


def test_free_of_an_unknown_id_is_ok_while_the_tracker_exists_and_is_forgotten() -> None:
    trackers = ready()
    trackers.free(*SCOPE, "r", 0.0)
    add(trackers)
    assert loads(trackers)[0] == (48, 3)


@pytest.mark.parametrize("tokens", [MAX_ISL_TOKENS + 1, 2**64 - 1])
def test_absurd_token_counts_are_refused_before_anything_is_looked_up(tokens: int) -> None:
    trackers = Trackers()
    text = rf"^isl_tokens \({tokens}\) exceeds the maximum 9007199254740991$"
    with pytest.raises(BadRequest, match=text):
        trackers.add(*SCOPE, "r", 7, 0, PROMPT, tokens, 0.0)
    with pytest.raises(BadRequest, match=text):
        trackers.potential_loads(*SCOPE, PROMPT, tokens, 0.0)


def test_sums_print_saturated_and_come_down_again() -> None:
    trackers = ready()
    slots = trackers.lookup("llama", "t1")
    assert slots is not None
    book(slots.slots, "huge", 7, 0, b"", 2**64 - 1, 0.0)  # as a peer may send it
    trackers.add(*SCOPE, "r", 7, 0, PROMPT, MAX_ISL_TOKENS, 0.0)
    assert loads(trackers)[0] == (2**64 - 1, 3)
    assert trackers.potential_loads(*SCOPE, b"", 5, 0.0)[0].potential_prefill_tokens == 2**64 - 1
    trackers.free(*SCOPE, "huge", 0.0)
    assert loads(trackers)[0] == (MAX_ISL_TOKENS, 3)


def test_a_projection_counts_the_blocks_that_no_active_prompt_of_the_rank_starts_with() -> None:
    trackers = ready()
    add(trackers)
    assert trackers.potential_loads(*SCOPE, hashes(1, 2, 3, 4), 16, 0.0) == [
        PotentialLoadRow(7, 0, 64, 4, 1),
        PotentialLoadRow(7, 1, 16, 4, 0),
    ]
    for query, blocks in ((hashes(2, 3), 5), (hashes(9, 1, 2), 6), (b"", 3)):
        projected = trackers.potential_loads(*SCOPE, query, 0, 0.0)[0]
        assert projected.potential_decode_blocks == blocks
    assert loads(trackers)[0] == (48, 3)


def test_the_rows_encode_in_the_documented_key_order() -> None:
    trackers = ready()
    add(trackers)
    encoded = [
        msgspec.json.encode(rows[0])
        for rows in (
            trackers.workers(),
            trackers.loads(None, None, 0.0),
            trackers.potential_loads(*SCOPE, b"", 0, 0.0),
        )
    ]
    assert encoded == [
        b'{"worker_id":7,"model_name":"llama","tenant_id":"t1","block_size":16,'
        b'"dp_start":0,"dp_size":2}',
        b'{"model_name":"llama","tenant_id":"t1","worker_id":7,"dp_rank":0,'
        b'"active_prefill_tokens":48,"active_decode_blocks":3}',
        b'{"worker_id":7,"dp_rank":0,"potential_prefill_tokens":48,'
        b'"potential_decode_blocks":3,"active_requests":1}',
    ]


# Expiry and replicas -----------------------------------------------------------------------------


OURS, PEER = 1, 2


class Replica:
    """Trackers that publish to a list, and the applier of what peers publish."""

    def __init__(self, router_id: int) -> None:
        self.published: list[ReplicaEvent] = []
        self.trackers = Trackers(ReplicaEvents(router_id, self.published.append))
        self.trackers.register(WORKER)
        self.applier = ReplicaApplier(router_id, self.trackers.lookup)


def test_each_call_that_changed_something_is_told_once() -> None:
    here = Replica(OURS)
    add(here.trackers)
    here.trackers.prefill_complete(*SCOPE, "r", 0.0)
    here.trackers.prefill_complete(*SCOPE, "r", 0.0)
    here.trackers.free(*SCOPE, "r", 0.0)
    here.trackers.free(*SCOPE, "r", 0.0)
    with pytest.raises(NotFound):
        here.trackers.prefill_complete(*SCOPE, "r", 0.0)
    assert [event.kind for event in here.published] == [
        EventKind.ADD,
        EventKind.PREFILL_COMPLETE,
        EventKind.FREE,
    ]


def test_what_expires_here_is_told_if_it_was_admitted_here_and_copies_expire_later() -> None:
    here, there = Replica(OURS), Replica(PEER)
    add(here.trackers, now=0.0)
    assert there.applier.apply(here.published.pop(), 0.0) is Verdict.APPLIED
    assert here.trackers.expire(300.0, 10) == []
    assert [gone.request_id for gone in here.trackers.expire(300.1, 10)] == ["r"]
    assert [event.kind for event in here.published] == [EventKind.FREE]
    assert there.trackers.expire(360.0, 10) == []
    assert len(there.trackers.expire(360.1, 10)) == 1
    assert there.published == []


def test_prefill_completion_starts_the_clock_of_expiry_again() -> None:
    trackers = ready()
    add(trackers, now=0.0)
    trackers.prefill_complete(*SCOPE, "r", 200.0)
    assert trackers.expire(499.0, 10) == []
    assert len(trackers.expire(501.0, 10)) == 1


def test_expiry_takes_bounded_steps() -> None:
    trackers = ready()
    for n in range(5):
        add(trackers, str(n))
    assert [len(trackers.expire(301.0, 2)) for _ in range(3)] == [2, 2, 1]


def test_no_tracker_waits_for_anothers_backlog() -> None:
    trackers = ready()
    trackers.register(WorkerRow(1, "other", "default", 16, 0, 1))
    for n in range(9):
        add(trackers, str(n))
    trackers.add("other", "default", "quiet", 1, 0, b"", 1, 0.0)
    gone = [{held.request_id for held in trackers.expire(301.0, 4)} for _ in range(4)]
    assert [len(step) for step in gone] == [4, 4, 2, 0]
    assert "quiet" in gone[0] | gone[1]
    assert trackers.arrived() == 10


def test_what_an_unregistered_worker_takes_along_is_told_if_it_was_admitted_here() -> None:
    here, there = Replica(OURS), Replica(PEER)
    add(here.trackers, "ours")
    add(there.trackers, "theirs")
    assert here.applier.apply(there.published[0], 0.0) is Verdict.APPLIED
    here.published.clear()
    here.trackers.unregister(*SCOPE, 7)
    assert [(event.kind, event.booking.request_id) for event in here.published] == [
        (EventKind.FREE, "ours")
    ]
    assert here.applier.apply(there.published[0], 0.0) is Verdict.UNKNOWN_PARTITION


class TrackerModel(RuleBasedStateMachine):
    """Random calls against a plain dict of requests; prompts are chains, as in real traffic."""

    chains = st.lists(st.integers(1, 3), max_size=4).map(
        lambda path: [
            sum(step * 4**i for i, step in enumerate(path[: n + 1])) for n in range(len(path))
        ]
    )
    ids = st.sampled_from("abcdef")
    ranks = st.integers(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.trackers = ready()
        self.active: dict[str, tuple[int, list[int], int]] = {}

    @rule(request_id=ids, dp_rank=ranks, chain=chains, tokens=st.integers(0, 50))
    def add(self, request_id: str, dp_rank: int, chain: list[int], tokens: int) -> None:
        try:
            self.trackers.add(*SCOPE, request_id, 7, dp_rank, hashes(*chain), tokens, 0.0)
        except DuplicateRequest:
            assert request_id in self.active
            return
        assert request_id not in self.active
        self.active[request_id] = dp_rank, chain, tokens

    @precondition(lambda self: self.active)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.active)))
        self.trackers.prefill_complete(*SCOPE, request_id, 0.0)
        dp_rank, chain, _tokens = self.active[request_id]
        self.active[request_id] = dp_rank, chain, 0

    @rule(request_id=ids)
    def free(self, request_id: str) -> None:
        self.trackers.free(*SCOPE, request_id, 0.0)
        self.active.pop(request_id, None)

    @rule(chain=chains)
    def project(self, chain: list[int]) -> None:
        for dp_rank, load in enumerate(
            self.trackers.potential_loads(*SCOPE, hashes(*chain), 9, 0.0)
        ):
            held = [request for request in self.active.values() if request[0] == dp_rank]
            blocks = {block for request in held for block in request[1]}
            assert load.potential_decode_blocks == len(blocks | set(chain))
            assert load.potential_prefill_tokens == 9 + sum(request[2] for request in held)
            assert load.active_requests == len(held)

    @invariant()
    def loads_are_the_sums_of_what_is_active(self) -> None:
        for dp_rank, load in enumerate(loads(self.trackers)):
            held = [request for request in self.active.values() if request[0] == dp_rank]
            blocks = {block for request in held for block in request[1]}
            assert load == (sum(request[2] for request in held), len(blocks))


TrackerModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTrackerModel = TrackerModel.TestCase


def test_an_owner_that_only_repeats_its_prefill_completion_says_now_and_then_that_it_lives() -> (
    None
):
    owner, peer = Replica(1), Replica(2)
    owner.trackers.add(*SCOPE, "r", 7, 0, b"", 5, 0.0)
    for now in (10.0, 100.0, 10.0 + REPUBLISH_AFTER_S, 200.0):
        owner.trackers.prefill_complete(*SCOPE, "r", now)
    add, complete, alive = owner.published
    assert [event.kind for event in owner.published] == [
        EventKind.ADD,
        EventKind.PREFILL_COMPLETE,
        EventKind.ADD,
    ]
    assert alive.booking.prefill_tokens is None
    peer.applier.apply(add, 0.0)
    peer.applier.apply(complete, 10.0)
    assert peer.applier.apply(alive, 130.0) is Verdict.DUPLICATE
    peer.trackers.prefill_complete(*SCOPE, "r", 400.0)
    assert len(peer.published) == 0  # a copy is its owner's to keep alive


def test_signs_of_life_come_sooner_where_reservations_expire_sooner() -> None:
    assert republish_after_s(300.0) == REPUBLISH_AFTER_S == 120.0
    assert republish_after_s(10.0) == pytest.approx(4.0)
    assert republish_after_s(3600.0) == 120.0
