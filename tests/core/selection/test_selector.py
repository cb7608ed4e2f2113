"""The selector as its callers see it: ids, refusals, what waits, and what is shown.

Who waits, who goes where and when, whatever happens, is in tests/properties/test_queue_model.py;
what is booked, for whom peers hear of it, in tests/core/replication/test_ledger.py.
"""

from functools import partial
from typing import Any

import msgspec
import pytest

from lean_selector.core.errors import BadRequest, Conflict, NotFound, SelectorError, Unavailable
from lean_selector.core.index.shapes import Tier
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection import inspection
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import Placement, SelectionRequest
from lean_selector.core.settings import API_1_6
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, pack, prompt_of
from tests.support.reservations import book

RANK = "WorkerWithDpRank { worker_id: 1, dp_rank: 0 }"
NO_ENDPOINTS = "no endpoints available to route work"


@pytest.fixture
def queueing() -> DrivenSelector:
    """Two workers, each busy above 16 tokens of prefill."""
    driven = DrivenSelector(queue_threshold=16.0)
    driven.register(1)
    driven.register(2)
    return driven


def fill(driven: DrivenSelector, *worker_ids: int) -> None:
    """Makes workers of capacity 1 busy at a threshold of 16."""
    for worker_id in worker_ids:
        driven.reserve(f"fill{worker_id}", (worker_id, 0), isl_tokens=17, prefill=17)


def error_of(driven: DrivenSelector, name: str) -> tuple[int, str]:
    outcome = driven.answers[name]
    assert isinstance(outcome, SelectorError)
    return outcome.status, outcome.message


# -- entering the queue ----------------------------------------------------------------------------


def test_a_pin_outside_the_allowed_workers_is_refused_before_the_queue(
    queueing: DrivenSelector,
) -> None:
    fill(queueing, 1, 2)
    with pytest.raises(BadRequest, match="pinned worker 1 is not in allowed worker set"):
        queueing.book("r", pin=(1, 0), allowed={2})
    assert queueing.pending() == (0, 0)


def test_a_bad_hash_is_refused_before_the_request_is_queued(queueing: DrivenSelector) -> None:
    def bad() -> bytes:
        raise ValueError("out of range")

    fill(queueing, 1, 2)
    request = queueing.request([], 16)
    request.prompt = Prompt(16, pack([1, 2]), 2, pack([1]), bad)
    with pytest.raises(ValueError, match="out of range"):
        queueing.submit("r", request)
    assert queueing.pending() == (0, 0)


def test_pending_tokens_are_printed_saturated(queueing: DrivenSelector) -> None:
    fill(queueing, 1, 2)
    queueing.book("a", isl_tokens=2**63)
    queueing.book("b", isl_tokens=2**63 + 5)
    assert queueing.pending() == (2, U64_MAX)


# -- leaving the queue -----------------------------------------------------------------------------


def test_a_peers_event_frees_capacity_for_those_waiting(queueing: DrivenSelector) -> None:
    fill(queueing, 1, 2)
    queueing.book("r")
    queueing.partition.slots.free("fill1", queueing.now)
    queueing.selector.load_changed("default", "default", "fill1", queueing.now)
    assert queueing.placed("r") == (1, 0)


def test_nothing_is_booked_for_a_client_that_has_gone_and_the_next_one_is_placed(
    queueing: DrivenSelector,
) -> None:
    queueing.remove(2)
    fill(queueing, 1)
    gone = queueing.selector.select(
        queueing.partition, queueing.request([], 9, books=True, reservation_id="gone"), 0.0
    )
    assert isinstance(gone, Waiting)
    answers: list[Placement | Exception] = []
    gone.on_answer, gone.has_client = answers.append, lambda: False
    queueing.book("next", isl_tokens=9)
    queueing.selector.reservations.free("fill1", queueing.now)
    gone.cancel(queueing.now)
    assert queueing.placed("next") == (1, 0)
    assert list(queueing.partition.slots.reservations) == ["next"]
    assert (answers, queueing.pending()) == ([], (0, 0))


def test_a_peers_event_about_an_unknown_partition_changes_nothing(queueing: DrivenSelector) -> None:
    queueing.selector.load_changed("other", "default", "r", queueing.now)


def test_a_pipelined_request_does_not_overtake_who_is_about_to_be_let_go(
    queueing: DrivenSelector,
) -> None:
    queueing.remove(2)
    fill(queueing, 1)
    order = []

    def on_answer(name: str, outcome: Placement | Exception) -> None:
        order.append(name)
        if order == ["a"]:
            late = queueing.request([], 10, books=True, reservation_id="late")
            assert isinstance(submit(late), Waiting)

    def submit(request: SelectionRequest) -> Placement | Waiting:
        found = queueing.selector.select(queueing.partition, request, queueing.now)
        if isinstance(found, Waiting):
            found.on_answer = partial(on_answer, request.reservation_id)
        return found

    for name in "ab":
        submit(queueing.request([], 9, books=True, reservation_id=name))
    queueing.selector.reservations.free("fill1", queueing.now)
    assert order == ["a", "b"]
    assert queueing.pending() == (1, 10)
    queueing.selector.reservations.free("a", queueing.now)
    assert order == ["a", "b", "late"]


def test_a_conflict_found_late_is_the_answer(queueing: DrivenSelector) -> None:
    queueing.remove(2)
    fill(queueing, 1)
    queueing.book("twice", isl_tokens=1)
    second = queueing.request([], 1, books=True, reservation_id="twice")
    queueing.submit("second", second)
    queueing.selector.reservations.free("fill1", queueing.now)
    assert queueing.placed("twice") == (1, 0)
    assert error_of(queueing, "second") == (
        409,
        f"failed to book scheduler state: Request twice already exists (assigned to worker {RANK})",
    )


def test_who_gives_up_after_the_answer_gives_back_its_own_reservation_and_no_other(
    queueing: DrivenSelector,
) -> None:
    queueing.remove(2)
    fill(queueing, 1)

    def waits(name: str, *, books: bool) -> Waiting:
        request = queueing.request([], 1, books=books, reservation_id=name)
        found = queueing.selector.select(queueing.partition, request, queueing.now)
        assert isinstance(found, Waiting)
        return found

    own, twice, asks = waits("a", books=True), waits("a", books=True), waits("a", books=False)
    live = queueing.partition.slots.reservations
    queueing.selector.reservations.free("fill1", queueing.now)
    assert [type(each.answer) for each in (own, twice, asks)] == [Placement, Conflict, Placement]
    twice.cancel(queueing.now)
    asks.cancel(queueing.now)
    assert list(live) == ["a"]
    own.cancel(queueing.now)
    assert list(live) == []
    queueing.book("a", isl_tokens=1)
    own.cancel(queueing.now)
    assert list(live) == ["a"]


def test_in_the_16_dialect_a_conflict_found_late_is_told_as_one_found_early() -> None:
    driven = DrivenSelector(queue_threshold=16.0, dialect=API_1_6)
    driven.register(1)
    fill(driven, 1)
    driven.book("r", isl_tokens=1)
    copy(driven, "r", ("default", "default"), (1, 0))
    driven.selector.reservations.free("fill1", driven.now)
    assert error_of(driven, "r") == (409, "selection r is already reserved or being reserved")


def test_what_breaks_for_one_that_waited_is_its_own_answer_and_the_others_go_on(
    queueing: DrivenSelector,
) -> None:
    for worker_id in (1, 2):
        queueing.register(worker_id, taints=frozenset({"gpu"}))
    fill(queueing, 1, 2)
    broken: Any = {"gpu": "heavy"}  # as if a check had let it pass
    queueing.book("first", isl_tokens=1)
    queueing.book("broken", isl_tokens=1, preferred_taints=broken)
    queueing.book("last", isl_tokens=1)
    assert queueing.pending() == (3, 3)
    queueing.selector.reservations.prefill_complete("fill1", queueing.now)
    assert isinstance(queueing.answers["broken"], TypeError)
    assert [queueing.placed(name) for name in ("first", "last")] == [(1, 0), (1, 0)]
    assert queueing.pending() == (0, 0)


def test_an_answer_may_free_what_the_next_one_takes(queueing: DrivenSelector) -> None:
    """As when a client's connection goes on with a request that it had pipelined."""
    queueing.remove(2)
    fill(queueing, 1)
    order = []

    def on_answer(name: str, outcome: Placement | Exception) -> None:
        order.append(name)
        queueing.selector.reservations.prefill_complete(name, queueing.now)

    for name in "abc":
        request = queueing.request([], 17, books=True, reservation_id=name)
        found = queueing.selector.select(queueing.partition, request, queueing.now)
        assert isinstance(found, Waiting)
        found.on_answer = partial(on_answer, name)
    queueing.selector.reservations.free("fill1", queueing.now)
    assert order == ["a", "b", "c"]
    assert queueing.pending() == (0, 0)


def test_a_stop_answers_all_waiting_and_lets_no_more_wait(queueing: DrivenSelector) -> None:
    fill(queueing, 1, 2)
    queueing.book("r")
    queueing.selector.refuse_waiting(Unavailable("stopping"))
    assert error_of(queueing, "r") == (503, "stopping")
    with pytest.raises(Unavailable, match="stopping"):
        queueing.book("late")
    assert queueing.pending() == (0, 0)


def test_a_stop_answers_no_more_to_who_hangs_up_on_the_answer_of_another(
    queueing: DrivenSelector,
) -> None:
    """As when one client had sent both, pipelined, and closes on the first error."""
    fill(queueing, 1, 2)
    parked: list[Waiting] = []
    answered: list[str] = []

    def on_answer(name: str, outcome: Placement | Exception) -> None:
        answered.append(name)
        parked[1].cancel(queueing.now)

    for name in "ab":
        request = queueing.request([], 1, books=True, reservation_id=name)
        waits = queueing.selector.select(queueing.partition, request, queueing.now)
        assert isinstance(waits, Waiting)
        waits.on_answer = partial(on_answer, name)
        parked.append(waits)
    queueing.selector.refuse_waiting(Unavailable("stopping"))
    assert answered == ["a"]
    assert queueing.pending() == (0, 0)


# -- many that may go ------------------------------------------------------------------------------


@pytest.fixture
def crowd() -> DrivenSelector:
    """A hundred selects that wait for either of two workers."""
    driven = DrivenSelector(queue_threshold=16.0, turns=True)
    driven.register(1)
    driven.register(2)
    fill(driven, 1, 2)
    for number in range(100):
        assert isinstance(driven.submit(f"r{number}", driven.request([], 1)), Waiting)
    return driven


def test_one_event_lets_some_go_in_each_turn(crowd: DrivenSelector) -> None:
    crowd.selector.reservations.free("fill1", crowd.now)
    gone = [len(crowd.answers)]
    while crowd.turns:
        crowd.selector.reservations.prefill_complete(
            "fill2", crowd.now
        )  # no other event hurries it
        assert len(crowd.answers) == gone[-1]
        crowd.turn()
        gone.append(len(crowd.answers))
    assert gone == [32, 64, 96, 100]
    assert list(crowd.answers) == [f"r{number}" for number in range(100)]


def test_who_comes_while_some_have_still_to_go_is_behind_them(crowd: DrivenSelector) -> None:
    crowd.selector.reservations.free("fill1", crowd.now)
    assert isinstance(crowd.submit("late", crowd.request([], 1)), Waiting)
    while crowd.turns:
        crowd.turn()
    assert list(crowd.answers)[-2:] == ["r99", "late"]


def test_those_whom_nobody_can_serve_are_told_in_turns(crowd: DrivenSelector) -> None:
    crowd.remove(1)
    crowd.remove(2)
    told = [len(crowd.answers)]
    while crowd.turns:
        crowd.turn()
        told.append(len(crowd.answers))
    assert told == [32, 64, 96, 100]
    assert error_of(crowd, "r99") == (503, NO_ENDPOINTS)


# -- overlap of what waited ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refresh", "waited", "gpu"),
    [
        pytest.param(10.0, 9.9, 0, id="as it was at arrival"),
        pytest.param(10.0, 10.0, 8, id="looked up again"),
        pytest.param(None, 1000.0, 0, id="never, when switched off"),
    ],
)
def test_overlap_is_looked_up_again_after_a_long_wait(
    refresh: float | None, waited: float, gpu: int
) -> None:
    driven = DrivenSelector(
        queue_threshold=16.0, overlap_refresh_after_s=refresh, reservation_expiry_s=1e6
    )
    driven.register(1)
    fill(driven, 1)
    driven.book("r", hashes=[1, 2, 3], isl_tokens=12)
    store_blocks(driven.partition.index, (1, 0), Tier.DEVICE, None, [91, 92], pack([1, 2]))
    driven.now = waited
    driven.selector.reservations.free("fill1", driven.now)
    outcome = driven.answers["r"]
    assert isinstance(outcome, Placement)
    assert outcome.overlap.gpu == gpu
    assert outcome.effective_prefill_tokens == 12 - gpu
    assert driven.loads()["default", "default"][1, 0] == (12 - gpu, 3, 1)


def test_what_a_rank_held_is_not_taken_for_that_of_a_rank_that_has_its_bit_now() -> None:
    driven = DrivenSelector(queue_threshold=16.0)
    for worker_id in (1, 2):
        driven.register(worker_id)
    fill(driven, 1, 2)
    partition = driven.partition
    store_blocks(partition.index, (1, 0), Tier.DEVICE, None, [91, 92], pack([1, 2]))
    bit = partition.slots.ranks[1, 0].bit
    assert isinstance(driven.book("r", hashes=[1, 2, 3], isl_tokens=12), Waiting)
    driven.remove(1)
    driven.register(3)
    assert partition.slots.ranks[3, 0].bit == bit
    outcome = driven.answers["r"]
    assert isinstance(outcome, Placement)
    assert (outcome.worker_id, outcome.overlap.gpu) == (3, 0)


# -- ids (D4) --------------------------------------------------------------------------------------


@pytest.fixture
def two_models() -> DrivenSelector:
    driven = DrivenSelector()
    driven.register(1)
    driven.register(2, model_name="m")
    return driven


def copy(driven: DrivenSelector, name: str, key: tuple[str, str], rank: tuple[int, int]) -> None:
    """What a peer's AddRequest does."""
    slots = driven.selector.catalog.ready_partition(*key).slots
    book(slots, name, *rank, b"", 5, driven.now, router_id=77)


def test_an_id_whose_reservation_a_peer_freed_can_be_used_elsewhere(
    two_models: DrivenSelector,
) -> None:
    two_models.reserve("r")
    two_models.partition.slots.free("r", 0.0)
    two_models.selector.load_changed("default", "default", "r", 0.0)
    assert not two_models.selector.reservations  # the id takes no memory after its end
    two_models.reserve("r", (2, 0), key=("m", "default"))


def test_a_copy_in_one_partition_does_not_keep_an_id_from_another(
    two_models: DrivenSelector,
) -> None:
    copy(two_models, "r", ("m", "default"), (2, 0))
    two_models.reserve("r")
    with pytest.raises(Conflict):
        two_models.reserve("r", (2, 0), key=("m", "default"))


def test_a_call_acts_on_the_local_booking_alone(two_models: DrivenSelector) -> None:
    copy(two_models, "r", ("m", "default"), (2, 0))
    two_models.reserve("r", hashes=[1])
    two_models.selector.reservations.prefill_complete("r", 0.0)
    two_models.selector.reservations.output_block("r", None, 0.0)
    assert two_models.loads() == {
        ("default", "default"): {(1, 0): (0, 2, 1)},
        ("m", "default"): {(2, 0): (5, 0, 1)},
    }
    two_models.selector.reservations.free("r", 0.0)
    assert two_models.loads()["m", "default"] == {(2, 0): (5, 0, 1)}


def test_a_call_acts_on_every_copy_when_nothing_was_booked_here(two_models: DrivenSelector) -> None:
    copy(two_models, "r", ("default", "default"), (1, 0))
    copy(two_models, "r", ("m", "default"), (2, 0))
    two_models.selector.reservations.prefill_complete("r", 0.0)
    assert two_models.loads() == {
        ("default", "default"): {(1, 0): (0, 0, 1)},
        ("m", "default"): {(2, 0): (0, 0, 1)},
    }
    two_models.selector.reservations.free("r", 0.0)
    assert two_models.told == [("prefill_completed", "r")] * 2 + [("freed", "r")] * 2
    with pytest.raises(NotFound, match="reservation r not found"):
        two_models.selector.reservations.free("r", 0.0)


# -- /reservations ---------------------------------------------------------------------------------


def test_reserve_checks_in_the_documented_order(two_models: DrivenSelector) -> None:
    partition = two_models.partition
    two_models.reserve("live")

    def refusal(worker_id: int, dp_rank: int, prefill: int) -> tuple[int, str]:
        with pytest.raises(SelectorError) as caught:
            two_models.selector.reservations.reserve(
                partition, "live", worker_id, dp_rank, prompt_of([], 16), prefill, 0.0
            )
        return caught.value.status, caught.value.message

    assert refusal(9, 9, 17) == (
        400,
        "effective_prefill_tokens (17) must not exceed isl_tokens (16)",
    )
    assert refusal(9, 9, 16) == (
        404,
        "schedulable worker 9 not found for model=default tenant=default",
    )
    assert refusal(1, 9, 16) == (
        404,
        "Worker WorkerWithDpRank { worker_id: 1, dp_rank: 9 } not found",
    )
    assert refusal(1, 0, 16) == (409, f"Request live already exists (assigned to worker {RANK})")
    assert two_models.loads()["default", "default"] == {(1, 0): (16, 0, 1)}  # D5: no ghost rank


# -- inspection ------------------------------------------------------------------------------------


def test_potential_loads_add_the_prompt_to_every_rank() -> None:
    driven = DrivenSelector()
    driven.register(1, data_parallel_size=2)
    driven.reserve("r", (1, 0), hashes=[1, 2], prefill=7)
    store_blocks(driven.partition.index, (1, 1), Tier.DEVICE, None, [91], pack([1]))
    prompt = prompt_of([1, 2, 3], 12)
    for track, tokens in ((True, (7 + 12, 12 - 4)), (False, (7, 0))):
        terms = msgspec.structs.replace(driven.selector.terms, track_prefill=track)
        rows = inspection.potential_loads(driven.partition, prompt, terms)
        assert [
            (row.dp_rank, row.potential_prefill_tokens, row.potential_decode_blocks) for row in rows
        ] == [(0, tokens[0], 2 + 3 - 2), (1, tokens[1], 3)]


def test_overlap_scores_show_every_tier_and_the_credit() -> None:
    driven = DrivenSelector()
    driven.register(1, data_parallel_size=2)
    index = driven.partition.index
    store_blocks(index, (1, 0), Tier.DEVICE, None, [91, 92], pack([1, 2]))
    store_blocks(index, (1, 0), Tier.HOST_PINNED, 92, [93], pack([3]))
    store_blocks(index, (1, 0), Tier.DISK, 93, [94, 95], pack([4, 5]))
    terms = msgspec.structs.replace(driven.selector.terms, credit=0.5)
    scores = inspection.overlap_scores(driven.partition, pack([1, 2, 3, 4, 5, 6]), terms)
    assert (scores.block_size, scores.num_blocks) == (4, 6)
    first, second = scores.workers
    assert (first.device_blocks, first.host_pinned_blocks, first.disk_blocks) == (2, 3, 5)
    assert (first.host_pinned_extension_blocks, first.disk_extension_blocks) == (1, 2)
    assert first.router_credit_blocks == 0.5 * 2 + 0.75 * 1 + 0.25 * 2
    assert (second.dp_rank, second.device_blocks, second.router_credit_blocks) == (1, 0, 0.0)
