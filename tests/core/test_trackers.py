"""The slot tracker's own rules (slot_tracker.md 1.3), and its words that no recording has.

The others are in tests/conformance; what requests do to loads, in tests/properties/
test_slots_model.py.
"""

import msgspec
import pytest

from lean_selector.core.errors import BadRequest, Conflict, NotFound, SelectorError
from lean_selector.core.load.shapes import LoadRow, WorkerRow
from lean_selector.core.numbers import MAX_ISL_TOKENS, MAX_RANKS
from lean_selector.core.trackers import Trackers
from tests.support.driven_selector import pack
from tests.support.reservations import book

WORKER = WorkerRow(7, "llama", "t1", 16, 0, 2)
SCOPE = ("llama", "t1")


PROMPT = pack([1, 2, 3])


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
        (load.active_prefill_tokens, load.active_decode_blocks) for load in trackers.loads(*SCOPE)
    ]


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "error", "text"),
    [
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
    ],
)
def test_a_registration_that_cannot_be_is_refused_and_changes_nothing(
    worker: WorkerRow, error: type[SelectorError], text: str
) -> None:
    trackers = ready()
    add(trackers)
    before = trackers.loads(None, None)
    with pytest.raises(error) as raised:
        trackers.register(worker)
    assert raised.value.message == text
    assert trackers.workers() == [WORKER]
    assert trackers.loads(None, None) == before


def test_a_refused_registration_makes_no_tracker() -> None:
    trackers = Trackers()
    with pytest.raises(BadRequest):
        trackers.register(row(dp_size=0))
    assert trackers.lookup(*SCOPE) is None


def test_the_largest_ranges_are_accepted() -> None:
    trackers = Trackers()
    trackers.register(row(dp_size=MAX_RANKS))
    trackers.register(row(worker_id=8, dp_start=2**32 - 2, dp_size=1))
    assert len(trackers.loads(None, None)) == MAX_RANKS + 1


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
    assert [(load.model_name, load.worker_id) for load in trackers.loads("a b", "t")] == [
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
    assert trackers.loads(None, None) == [LoadRow("llama", "t1", 8, 0, 48, 3)]


def test_the_last_worker_takes_the_tracker_along_and_frees_its_block_size() -> None:
    trackers = ready()
    add(trackers)
    trackers.unregister(*SCOPE, 7)
    with pytest.raises(NotFound, match="no slot tracker for model=llama tenant=t1"):
        trackers.free(*SCOPE, "r", 0.0)
    trackers.register(row(block_size=32))
    assert loads(trackers) == [(0, 0), (0, 0)]


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [MAX_ISL_TOKENS + 1, 2**64 - 1])
def test_absurd_token_counts_are_refused_before_anything_is_looked_up(tokens: int) -> None:
    trackers = Trackers()
    text = rf"^isl_tokens \({tokens}\) exceeds the maximum 9007199254740991$"
    with pytest.raises(BadRequest, match=text):
        trackers.add(*SCOPE, "r", 7, 0, PROMPT, tokens, 0.0)
    with pytest.raises(BadRequest, match=text):
        trackers.potential_loads(*SCOPE, PROMPT, tokens)


def test_sums_print_saturated_and_come_down_again() -> None:
    trackers = ready()
    slots = trackers.lookup("llama", "t1")
    assert slots is not None
    book(slots.slots, "huge", 7, 0, b"", 2**64 - 1, 0.0)  # as a peer may send it
    trackers.add(*SCOPE, "r", 7, 0, PROMPT, MAX_ISL_TOKENS, 0.0)
    assert loads(trackers)[0] == (2**64 - 1, 3)
    assert trackers.potential_loads(*SCOPE, b"", 5)[0].potential_prefill_tokens == 2**64 - 1
    trackers.free(*SCOPE, "huge", 0.0)
    assert loads(trackers)[0] == (MAX_ISL_TOKENS, 3)
