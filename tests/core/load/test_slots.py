"""What the recorded cases and the decisions say about active requests, without HTTP."""

import gc

import pytest

from lean_selector.core.errors import BadRequest, DuplicateRequest, NotFound
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.slots import Slots, check_decay_fraction
from tests.support.bookings import book


def packed(*hashes: int) -> bytes:
    return b"".join((h % 2**64).to_bytes(8, "little") for h in hashes)


@pytest.fixture
def slots() -> Slots:
    slots = Slots()
    slots.add_rank(1, 0)
    slots.add_rank(1, 1)
    return slots


@pytest.fixture
def rank(slots: Slots) -> RankLoad:
    return slots.ranks[1, 0]


def load(rank: RankLoad) -> tuple[int, int, int]:
    return rank.active_prefill_tokens, rank.active_decode_blocks, rank.active_requests


def test_sharing_prefill_and_free_as_in_the_examples_of_the_specification(
    slots: Slots, rank: RankLoad
) -> None:
    book(slots, "a", 1, 0, packed(1, 2, 3), 48, 0.0)
    assert load(rank) == (48, 3, 1)
    book(slots, "b", 1, 0, packed(1, 2, 4), 16, 0.0)
    assert load(rank) == (64, 4, 2)
    slots.prefill_complete("a", 0.0)
    assert load(rank) == (16, 4, 2)
    slots.free("a", 0.0)
    assert load(rank) == (16, 3, 1)
    slots.free("b", 0.0)
    assert load(rank) == (0, 0, 0)
    assert load(slots.ranks[1, 1]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("query", "depth"), [((1, 2, 3, 4), 3), ((2, 3), 0), ((9, 1, 2), 0), ((), 0), ((1, 5), 1)]
)
def test_active_prefix_starts_at_the_first_block(
    slots: Slots, query: tuple[int, ...], depth: int
) -> None:
    book(slots, "a", 1, 0, packed(1, 2, 3), 48, 0.0)
    assert slots.active_prefix(packed(*query)).get((1, 0), 0) == depth


def test_lists_that_are_not_chains_count_path_positions(slots: Slots, rank: RankLoad) -> None:
    """D20; recorded otherwise in odd_hash_sequences and projection."""
    book(slots, "dup", 1, 0, packed(5, 5, 5), 3, 0.0)
    assert rank.active_decode_blocks == 3
    assert slots.active_prefix(packed(5, 5, 5, 5)) == {(1, 0): 3}
    slots.free("dup", 0.0)
    book(slots, "p", 1, 0, packed(1, 2, 3), 0, 0.0)
    book(slots, "q", 1, 0, packed(3, 2, 1), 0, 0.0)
    assert rank.active_decode_blocks == 6
    assert slots.active_prefix(packed(3, 2)) == {(1, 0): 2}
    assert slots.active_prefix(packed(2)) == {}
    book(slots, "s", 1, 0, packed(9, 2), 0, 0.0)
    slots.free("p", 0.0)
    assert rank.active_decode_blocks == 5


def test_output_blocks_as_recorded_in_output_block_validation(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1, 0, packed(1, 2, 3, 4), 0, 0.0)
    for fraction in (None, None, 0.5, 1.0, 0.0, -0.0, None):
        assert slots.output_block("a", 0.0, fraction) is slots.reservations["a"]
    assert rank.active_decode_blocks == 1
    assert rank.distinct_blocks == 11


@pytest.mark.parametrize("fraction", [-0.1, 1.1, 1.0000001, 1e308, float("nan")])
def test_a_fraction_out_of_range_is_refused_whether_the_request_lives_or_not(
    slots: Slots, rank: RankLoad, fraction: float
) -> None:
    book(slots, "a", 1, 0, packed(1), 5, 0.0)
    for request_id in ("a", "unknown"):
        with pytest.raises(BadRequest, match=r"^decay_fraction must be between 0\.0 and 1\.0$"):
            slots.output_block(request_id, 9.0, fraction)
    assert load(rank) == (5, 1, 1)
    assert slots.reservations["a"].touched_at == 0.0
    check_decay_fraction(None)


def test_shared_blocks_keep_their_weight(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1, 0, packed(1, 2, 3, 4), 0, 0.0)
    book(slots, "b", 1, 0, packed(1, 2, 8), 0, 0.0)
    slots.output_block("a", 0.0, 0.0)  # 3, 4 and the new one vanish; 1 and 2 are shared
    assert rank.active_decode_blocks == 3
    slots.free("b", 0.0)
    assert rank.active_decode_blocks == 2
    slots.output_block("a", 0.0, 0.5)  # all six are its own now
    assert rank.active_decode_blocks == 3
    book(slots, "c", 1, 0, packed(1, 2, 3, 4), 0, 0.0)
    slots.output_block("c", 0.0, 1.0)  # what a left fractional is shared, and stays so
    assert rank.active_decode_blocks == 4
    slots.free("a", 0.0)
    assert rank.active_decode_blocks == 3
    slots.free("c", 0.0)
    assert load(rank) == (0, 0, 0)


def test_a_ranks_weights_are_its_own(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1, 0, packed(1, 2), 0, 0.0)
    book(slots, "b", 1, 1, packed(1, 2), 0, 0.0)
    slots.output_block("a", 0.0, 0.0)
    assert rank.active_decode_blocks == 0
    assert slots.ranks[1, 1].active_decode_blocks == 2


def test_booking_on_an_unknown_rank_is_refused_before_a_duplicate_id(slots: Slots) -> None:
    book(slots, "a", 1, 1, packed(1), 5, 0.0)
    with pytest.raises(
        NotFound, match=r"^Worker WorkerWithDpRank \{ worker_id: 9, dp_rank: 4 \} not found$"
    ):
        book(slots, "a", 9, 4, packed(1), 5, 0.0)
    with pytest.raises(
        DuplicateRequest,
        match=r"^Request a already exists "
        r"\(assigned to worker WorkerWithDpRank \{ worker_id: 1, dp_rank: 1 \}\)$",
    ):
        book(slots, "a", 1, 0, packed(2), 5, 0.0)
    assert load(slots.ranks[1, 0]) == (0, 0, 0)
    assert slots.starts_no_prompt(2)


def test_sums_do_not_wrap(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1, 0, b"", 2**64 - 1, 0.0)
    book(slots, "b", 1, 0, b"", 2**64 - 1, 0.0)
    assert rank.active_prefill_tokens == 2**65 - 2
    slots.free("a", 0.0)
    slots.free("b", 0.0)
    assert load(rank) == (0, 0, 0)


def test_only_the_first_prefill_complete_counts_as_such(slots: Slots) -> None:
    booked = book(slots, "a", 1, 0, packed(1), 0, 0.0)
    assert slots.prefill_complete("a", 1.0) == (booked, True)
    assert slots.prefill_complete("a", 2.0) == (booked, False)
    assert booked.touched_at == 2.0


def test_unknown_requests_are_none_and_leave_no_trace(slots: Slots, rank: RankLoad) -> None:
    assert slots.prefill_complete("x", 0.0) is None
    assert slots.output_block("x", 0.0) is None
    assert slots.free("x", 0.0) is None
    assert slots.touch("x", 0.0) is None
    book(slots, "x", 1, 0, packed(1), 7, 0.0)
    assert load(rank) == (7, 1, 1)


def test_a_reservation_knows_what_it_was_booked_with(slots: Slots) -> None:
    booked = book(
        slots,
        "a",
        1,
        0,
        packed(1, -22),
        48,
        3.0,
        router_id=5,
        lora_name="l",
        expected_output_tokens=9,
        prefill_duration_s=2.0,
    )
    assert (booked.is_replica, booked.router_id) == (True, 5)
    assert (booked.booking.lora_name, booked.booking.expected_output_tokens) == ("l", 9)
    assert (booked.touched_at, booked.published_at) == (3.0, 3.0)
    assert (booked.block_count, booked.prefill_tokens) == (2, 48)
    book(slots, "b", 1, 1, packed(1), 0, 0.0)
    assert slots.sequence_hashes_of(booked) == packed(1, -22)
    slots.free("a", 4.0)
    assert slots.sequence_hashes_of(booked) == b""


def test_removing_a_rank_forgets_only_its_requests(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1, 0, packed(1, 2), 5, 0.0)
    book(slots, "b", 1, 1, packed(1, 2, 3), 6, 0.0)
    slots.output_block("a", 0.0, 0.3)
    assert [r.request_id for r in slots.remove_rank(1, 0)] == ["a"]
    assert load(rank) == (0, 0, 0)
    assert load(slots.ranks[1, 1]) == (6, 3, 1)
    assert slots.remove_rank(1, 0) == []
    assert slots.reservations.keys() == {"b"}
    assert slots.active_prefix(packed(1)) == {(1, 1): 1}
    assert slots.add_rank(1, 0) is not rank
    book(slots, "a", 1, 1, packed(1, 2), 5, 0.0)


def test_adding_a_known_rank_keeps_its_load(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1, 0, packed(1), 5, 0.0)
    assert slots.add_rank(1, 0) is rank
    assert load(rank) == (5, 1, 1)


def test_expiry_counts_from_the_last_touch_and_is_strict(slots: Slots, rank: RankLoad) -> None:
    book(slots, "touched", 1, 0, packed(1), 5, 0.0)
    book(slots, "quiet", 1, 0, packed(2), 6, 1.0)
    book(slots, "copy", 1, 0, packed(3), 7, 0.0, router_id=9)
    slots.output_block("touched", 200.0)
    assert slots.expire(301.0, 300.0, 360.0, 10) == []
    assert [r.request_id for r in slots.expire(301.5, 300.0, 360.0, 10)] == ["quiet"]
    assert load(rank) == (12, 3, 2)
    assert [r.request_id for r in slots.expire(360.5, 300.0, 360.0, 10)] == ["copy"]
    assert [r.request_id for r in slots.expire(501.0, 300.0, 360.0, 10)] == ["touched"]
    assert load(rank) == (0, 0, 0)


def test_expiry_takes_bounded_steps_oldest_touch_first(slots: Slots) -> None:
    for n in range(5):
        book(slots, f"r{n}", 1, 0, packed(n), 1, float(n), router_id=8 if n == 4 else None)
    slots.touch("r0", 5.0)
    steps = [[r.request_id for r in slots.expire(1000.0, 300.0, 360.0, 2)] for _ in range(4)]
    assert steps == [["r1", "r2"], ["r3", "r0"], ["r4"], []]


def test_copies_expire_however_many_local_ones_are_overdue(slots: Slots) -> None:
    for n in range(3):
        book(slots, f"copy{n}", 1, 0, packed(), 1, float(n), router_id=9)
    for n in range(9):
        book(slots, f"local{n}", 1, 0, packed(), 1, 60.0 + n)
    steps = [[r.request_id for r in slots.expire(1000.0, 300.0, 360.0, 2)] for _ in range(3)]
    assert steps == [["local0", "copy0"], ["local1", "copy1"], ["local2", "copy2"]]


def backdated(slots: Slots, **touched_at: float) -> None:
    """Copies that another replica heard of last at these times."""
    for request_id, at in touched_at.items():
        slots.backdate(book(slots, request_id, 1, 0, b"", 0, 100.0, router_id=7), at)


def test_backdated_copies_stand_and_expire_among_the_others_by_when_they_were_heard_of(
    slots: Slots,
) -> None:
    book(slots, "mine", 1, 0, b"", 0, 40.0)
    book(slots, "copy", 1, 0, b"", 0, 60.0, router_id=7)
    backdated(slots, young=50.0, middle=30.0, touched=20.0, ended=15.0, old=10.0)
    slots.touch("touched", 70.0)
    slots.free("ended", 70.0)
    assert [each.request_id for each in slots.by_touch()] == [
        *("touched", "copy", "young", "mine", "middle", "old"),
    ]
    assert slots.live_counts() == (1, 5)
    expired = slots.expire(100.0, 35.0, 45.0, 3)
    assert [each.request_id for each in expired] == ["old", "mine", "middle"]
    assert slots.expired == 1  # of ours
    assert [each.request_id for each in slots.expire(100.0, 35.0, 45.0, 3)] == ["young"]
    assert [each.request_id for each in slots.by_touch()] == ["touched", "copy"]


def test_a_copy_that_is_backdated_out_of_order_expires_late_and_does(slots: Slots) -> None:
    backdated(slots, old=10.0, younger=20.0)
    assert [each.request_id for each in slots.expire(60.0, 1.0, 45.0, 9)] == ["old"]
    assert [each.request_id for each in slots.expire(70.0, 1.0, 45.0, 9)] == ["younger"]
    assert slots.live_counts() == (0, 0)


def test_what_is_live_is_listed_but_for_what_ends_meanwhile(slots: Slots) -> None:
    for number in range(5):
        book(slots, f"r{number}", 1, 0, b"", 0, float(number))
    listed = slots.by_touch()
    assert next(listed).request_id == "r4"
    slots.touch("r0", 9.0)
    slots.free("r2", 9.0)
    slots.free("r3", 9.0)
    book(slots, "r3", 1, 0, b"", 0, 9.0)  # another one of that name
    book(slots, "later", 1, 0, b"", 0, 9.0)
    assert {each.request_id for each in listed} == {"r1", "r0"}


def test_what_arrived_is_counted_whoever_admitted_it(slots: Slots) -> None:
    book(slots, "own", 1, 0, packed(), 1, 0.0)
    book(slots, "copy", 1, 0, packed(), 1, 0.0, router_id=9)
    slots.free("own")
    assert (slots.arrived, slots.booked) == (2, 1)


def test_starts_no_prompt_takes_hashes_of_either_form(slots: Slots) -> None:
    book(slots, "a", 1, 0, packed(-22, 7), 1, 0.0)
    for known in (-22, 2**64 - 22, packed(-22), packed(-22, 99)):
        assert not slots.starts_no_prompt(known)
    for unknown in (7, packed(7)):
        assert slots.starts_no_prompt(unknown)


def test_every_change_of_a_load_is_told_once_it_is_done() -> None:
    heard: list[tuple[int, int, int]] = []
    slots = Slots(lambda rank: heard.append(load(rank)))
    slots.add_rank(1, 0)
    book(slots, "a", 1, 0, packed(1, 2), 5, 0.0)
    slots.output_block("a", 0.0, 0.0)
    slots.prefill_complete("a", 0.0)
    slots.prefill_complete("a", 0.0)
    slots.free("a", 0.0)
    assert heard == [(5, 2, 1), (5, 0, 1), (0, 0, 1), (0, 0, 0)]
    book(slots, "b", 1, 0, packed(1, 2), 5, 0.0)
    slots.remove_rank(1, 0)
    assert len(heard) == 5


def test_live_requests_are_nothing_to_the_collector(slots: Slots) -> None:
    gc.collect()  # tuples of ints, the keys of ranks, are untracked when first seen
    before = len(gc.get_objects())
    for n in range(200):
        book(slots, f"r{n}", 1, 0, packed(1, n, n + 1), 1, 0.0)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    for n in range(200):
        slots.free(f"r{n}")
