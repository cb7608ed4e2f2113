"""Active requests: what the model does not look at.

Loads, expiry and the trie of prompts under any calls are in tests/properties/test_slots_model.py.
"""

import gc

import pytest

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.slots import Slots
from tests.support.driven_selector import pack
from tests.support.reservations import book


@pytest.fixture
def slots() -> Slots:
    slots = Slots()
    slots.add_rank(1, 0)
    slots.add_rank(1, 1)
    return slots


def load(rank: RankLoad) -> tuple[int, int, int]:
    return rank.active_prefill_tokens, rank.active_decode_blocks, rank.active_requests


def test_a_reservation_knows_what_it_was_booked_with(slots: Slots) -> None:
    asked = slots, "a", 1, 0, pack([1, -22]), 48, 3.0
    booked = book(*asked, router_id=5, lora_name="l", expected_output_tokens=9)
    assert (booked.is_replica, booked.router_id) == (True, 5)
    assert (booked.spec.lora_name, booked.spec.expected_output_tokens) == ("l", 9)
    assert (booked.touched_at, booked.published_at) == (3.0, 3.0)
    assert (booked.block_count, booked.prefill_tokens) == (2, 48)
    book(slots, "b", 1, 1, pack([1]), 0, 0.0)
    assert slots.sequence_hashes_of(booked) == pack([1, -22])
    slots.free("a", 4.0)
    assert slots.sequence_hashes_of(booked) == b""


def backdated(slots: Slots, **touched_at: float) -> None:
    """Copies that another replica heard of last at these times."""
    for request_id, at in touched_at.items():
        copy = book(slots, request_id, 1, 0, b"", 0, 100.0, router_id=7)
        before = slots.revision
        slots.backdate(copy, at)
        assert slots.revision > before


def test_backdated_copies_stand_and_expire_among_the_others_by_when_they_were_heard_of(
    slots: Slots,
) -> None:
    book(slots, "mine", 1, 0, b"", 0, 40.0)
    book(slots, "copy", 1, 0, b"", 0, 60.0, router_id=7)
    backdated(slots, young=50.0, middle=30.0, touched=20.0, ended=15.0, old=10.0)
    slots.touch("touched", 70.0)
    slots.free("ended", 70.0)
    assert [each.request_id for each in slots.by_touch()] == [
        *("touched", "copy", "young", "mine", "middle", "old")
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


def test_every_change_of_a_load_is_told_once_it_is_done() -> None:
    heard: list[tuple[int, int, int]] = []
    slots = Slots(lambda rank: heard.append(load(rank)))
    slots.add_rank(1, 0)
    book(slots, "a", 1, 0, pack([1, 2]), 5, 0.0)
    slots.output_block("a", 0.0, 0.0)
    slots.prefill_complete("a", 0.0)
    slots.prefill_complete("a", 0.0)
    slots.free("a", 0.0)
    assert heard == [(5, 2, 1), (5, 0, 1), (0, 0, 1), (0, 0, 0)]
    book(slots, "b", 1, 0, pack([1, 2]), 5, 0.0)
    slots.remove_rank(1, 0)
    assert len(heard) == 5


def test_live_requests_are_nothing_to_the_collector(slots: Slots) -> None:
    gc.collect()  # tuples of ints, the keys of ranks, are untracked when first seen
    before = len(gc.get_objects())
    for n in range(200):
        book(slots, f"r{n}", 1, 0, pack([1, n, n + 1]), 1, 0.0)
    gc.collect()
    assert len(gc.get_objects()) - before < 50
    for n in range(200):
        slots.free(f"r{n}", 0.0)
