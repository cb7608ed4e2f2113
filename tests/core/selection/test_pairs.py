"""Pairs: what each stage costs, when one worker does both, and what is learned of whom."""

from functools import partial
from typing import Any

import pytest

from lean_selector.core.errors import AllWorkersBusy
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.selection.inspection import potential_loads, saturation
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import (
    EXPLANATION,
    AffinityTarget,
    Placement,
    PrefillPlacement,
)
from lean_selector.core.selection.watch import ChoiceWatch
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, fleet_of, pack, teach

PROMPT = list(range(1, 11))  # 40 tokens


def hold(driven: DrivenSelector, worker_id: int, blocks: int, tier: Tier = Tier.DEVICE) -> None:
    names = PROMPT[:blocks]
    store_blocks(driven.partition.index, (worker_id, 0), tier, None, names, pack(names))


def chosen(driven: DrivenSelector, name: str = "r", **changes: Any) -> Placement:
    changes.setdefault("disaggregate", "auto")
    placement = driven.book(name, hashes=PROMPT, isl_tokens=40, **changes)
    assert isinstance(placement, Placement)
    return placement


def pair_of(placement: Placement) -> tuple[int, int]:
    assert isinstance(placement.prefill, PrefillPlacement), placement
    return placement.prefill.worker_id, placement.worker_id


def reason(placement: Placement) -> str:
    return placement.disaggregation.reason  # type: ignore[union-attr]


def test_each_stage_has_its_own_cost() -> None:
    driven = fleet_of("prefill", "decode", active_request_weight=0.5)
    driven.reserve("a", (1, 0), hashes=[91, 92, 93], prefill=8)
    driven.reserve("b", (2, 0), hashes=[94, 95], prefill=16)
    hold(driven, 1, 3)
    hold(driven, 2, 4)
    hold(driven, 2, 1)
    placement = chosen(driven, disaggregate="always", adds=EXPLANATION)
    assert pair_of(placement) == (1, 2)

    def cost(explanation: Any) -> Any:
        return next(rank.cost for rank in explanation.ranks if rank.cost is not None)

    # (8 tokens before + 28 uncached + 12 cached) / 4, less a credit of 3 blocks; and no block
    assert cost(placement.prefill.explain) == 12.0 - 3.0  # type: ignore[union-attr]
    # 2 active blocks and 10 new ones, less a credit of 4, and half a block per request; no prefill
    assert cost(placement.explain) == 2 + 10 - 4 + 0.5


@pytest.mark.parametrize(
    ("held", "most", "local"),
    [(3, 2048, False), (4, 2048, True), (10, 2048, True), (10, 0, True), (9, 4, False)],
)
def test_who_has_most_of_a_prompt_does_both(held: int, most: int, local: bool) -> None:
    """Blocks of lower tiers count as whole ones."""
    driven = fleet_of("prefill", "decode", pd_local_max_tokens=most)
    hold(driven, 2, held, Tier.HOST_PINNED)
    placement = chosen(driven)
    assert (reason(placement), placement.worker_id) == ("cached" if local else "uncached", 2)
    assert (placement.prefill is not None and hasattr(placement.prefill, "worker_id")) is not local
    assert chosen(driven, "s", disaggregate="always").effective_prefill_tokens == 0


def test_who_is_too_busy_only_decodes() -> None:
    driven = fleet_of("prefill", "decode", decode_busy_threshold=0.15)
    hold(driven, 2, 10)
    assert reason(chosen(driven)) == "cached"
    driven.reserve("a", (2, 0), hashes=[91, 92, 93, 94, 95, 96], prefill=None)
    assert reason(chosen(driven, "s")) == "decode_busy"
    driven = DrivenSelector(queue_threshold=1.0)
    driven.register(1, worker_role="prefill", max_num_batched_tokens=8)
    driven.register(2, max_num_batched_tokens=8)
    hold(driven, 2, 10)
    driven.reserve("a", (2, 0), hashes=[91], prefill=16)
    placement = chosen(driven)
    assert (pair_of(placement), reason(placement)) == ((1, 2), "decode_busy")


def test_thresholds_judge_whom_they_concern() -> None:
    """Those of prefill the ones that prefill, those of decode the ones that decode."""
    driven = fleet_of("prefill", "decode", "both")
    partition = driven.partition
    for number in (1, 2, 3):
        driven.reserve(f"t{number}", (number, 0), hashes=[90 + number], prefill=16)
    for tokens, blocks, busy in ((8, None, {1, 3}), (None, 0.005, {2, 3}), (8, 0.005, {1, 2, 3})):
        limits = BusyThreshold(active_prefill_tokens=tokens, active_decode_blocks=blocks)
        partition.set_threshold(limits)
        masks = {number: partition.workers[number].mask for number in (1, 2, 3)}
        assert {number for number, mask in masks.items() if partition.busy & mask} == busy
    driven.remove(3)
    partition.set_threshold(BusyThreshold(active_prefill_tokens=8))
    with pytest.raises(AllWorkersBusy):
        chosen(driven)
    hold(driven, 2, 10)
    assert reason(chosen(driven)) == "cached"  # it needs no prefill worker
    assert partition.shed == {"/select": 1, "/select_and_reserve": 0}


def test_a_target_without_a_partner_does_both() -> None:
    driven = fleet_of("both", "decode")
    placement = chosen(driven, disaggregate="always", target=AffinityTarget(1, None))
    assert (placement.worker_id, reason(placement)) == (1, "no_partner")


def test_the_caller_may_bar_a_pair_and_choose_another_to_decode() -> None:
    driven = fleet_of("prefill", "decode", "decode")
    placement = chosen(driven, bars_pair="engine_fields")
    assert reason(placement) == "engine_fields"
    assert placement.effective_prefill_tokens == 40
    other = 5 - placement.worker_id
    again = chosen(driven, "s", disaggregate="never", after_prefill=True, allowed=[1, other])
    assert (again.effective_prefill_tokens, again.worker_id) == (0, other)
    assert driven.loads()["default", "default"][other, 0] == (0, 10, 1)
    assert driven.selector.pairs == {"engine_fields": 1}


def test_without_a_prefill_worker_one_does_all_if_that_is_wanted() -> None:
    driven = fleet_of("decode", pd_fallback="local")
    assert reason(chosen(driven)) == "no_prefill_worker"
    driven.register(2, worker_role="prefill")
    barred = chosen(driven, "s", prefill_allowed_worker_ids=frozenset({9}))
    assert reason(barred) == "prefill_not_allowed"
    assert driven.loads()["default", "default"][1, 0] == (80, 10, 2)


def test_what_is_reported_tells_of_whom_it_concerns() -> None:
    """The cached tokens and the time are the leg's, though it ended before."""
    driven = fleet_of("prefill", "decode")
    hold(driven, 1, 5)
    chosen(driven, disaggregate="always")
    reservations, ranks = driven.selector.reservations, driven.partition.slots.ranks
    reservations.prefill_complete("r", 1.0, ttft_s=1.0)
    assert "r#prefill" not in driven.partition.slots.reservations
    reservations.end("r", "ok", 16, 2.0, prefill_outcome="failed")
    prefill, decode = ranks[1, 0].counts, ranks[2, 0].counts
    assert (prefill.compared_tokens, prefill.compared_overlap_tokens) == (16, 20)
    assert (decode.compared_tokens, decode.cached_tokens) == (0, 0)
    assert (prefill.failed, prefill.ok, decode.failed, decode.ok) == (1, 0, 0, 1)
    assert (prefill.prompt_tokens, prefill.overlap_tokens) == (40, 20)
    assert (decode.selections, decode.prompt_tokens, decode.ttft_count) == (1, 0, 1)


def test_the_prompt_of_a_pair_is_one_hit() -> None:
    driven = fleet_of("prefill", "decode")
    hold(driven, 1, 5)
    watch = driven.selector.watch = ChoiceWatch()
    chosen(driven, disaggregate="always")
    assert list(watch.hits.values()) == [1]


def test_both_are_assumed_to_cache_what_was_booked() -> None:
    """But not the one that failed before its prefill was complete."""
    for outcome, left in ((None, 10), ("failed", 0)):
        driven = fleet_of("prefill", "decode", ttl_s=100.0)
        chosen(driven, disaggregate="always")
        index = driven.partition.index
        assert [index.blocks(n, 0, Tier.DEVICE) for n in (1, 2)] == [10, 10]
        driven.selector.reservations.end("r", "ok", None, 1.0, prefill_outcome=outcome)
        assert [index.blocks(n, 0, Tier.DEVICE) for n in (1, 2)] == [left, 10]


def test_a_pair_waits_while_every_prefill_worker_is_above_the_threshold() -> None:
    """However idle the others are, whose batch size need not be known; what is cached with one that
    decodes does not wait."""
    driven = DrivenSelector(queue_threshold=1.0)
    driven.register(1, worker_role="prefill", max_num_batched_tokens=8)
    driven.register(2, worker_role="decode", max_num_batched_tokens=None)
    driven.reserve("a", (1, 0), hashes=[91], prefill=16)
    for name in ("b", "c"):
        assert isinstance(
            driven.book(name, hashes=PROMPT, isl_tokens=40, disaggregate="auto"), Waiting
        )
    asked = driven.request(PROMPT, 40, disaggregate="always")
    assert pair_of(driven.selector.select_now(driven.partition, asked, driven.now)) == (1, 2)
    plain = driven.book("p", hashes=[92], isl_tokens=4)
    assert isinstance(plain, Placement)
    assert driven.pending() == (2, 80)
    hold(driven, 2, 10)
    assert reason(chosen(driven, "d")) == "cached"
    driven.partition.index.clear(2, 0)
    driven.selector.reservations.free("a", driven.now)
    placed = driven.answers["b"]
    assert isinstance(placed, Placement)
    assert pair_of(placed) == (1, 2)
    assert driven.pending() == (1, 40)
    assert {"b", "b#prefill"} <= driven.partition.slots.reservations.keys()
    driven.selector.reservations.prefill_complete("b", driven.now)
    assert driven.placed("c") == (2, 0)
    assert isinstance(driven.book("e", hashes=PROMPT, disaggregate="always"), Waiting)
    driven.remove(1)  # nobody can prefill it any more
    assert "no_prefill_worker" in str(driven.answers["e"])


def test_a_pair_is_a_share_of_what_its_prefill_worker_computes() -> None:
    driven = DrivenSelector(queue_threshold=1.0, queue_fairness="on")
    driven.register(1, worker_role="prefill", max_num_batched_tokens=8)
    driven.register(2, worker_role="decode")
    shares = driven.partition.shares
    assert shares is not None
    driven.reserve("a", (1, 0), hashes=[91], prefill=16)
    hold(driven, 1, 4)
    for name in ("b", "c"):
        driven.book(name, hashes=PROMPT, isl_tokens=40, disaggregate="always")
    hold(driven, 2, 9)
    assert reason(chosen(driven, "d")) == "cached"  # while others wait
    asked = driven.request(PROMPT, 40, disaggregate="always")
    driven.selector.select_now(driven.partition, asked, driven.now)  # advisory: no share
    assert shares._shares[""].service == 4
    driven.selector.reservations.free("a", driven.now)
    assert pair_of(driven.answers["b"]) == (1, 2)  # type: ignore[arg-type]
    assert shares._shares[""].service == 4 + 40 - 16


def test_each_that_nobody_can_prefill_any_more_is_answered_once() -> None:
    """Also if the first of them ends at its answer, by which others are looked at."""
    driven = DrivenSelector(queue_threshold=1.0, pd_fallback="local")
    driven.register(1, worker_role="prefill", max_num_batched_tokens=8)
    driven.register(2, worker_role="decode")
    driven.reserve("a", (1, 0), hashes=[91], prefill=16)
    answers: list[tuple[str, object]] = []

    def ends(name: str, answer: object) -> None:
        answers.append((name, reason(answer) if isinstance(answer, Placement) else answer))
        driven.selector.reservations.free(name, driven.now)

    for name in ("b", "c"):
        waiting = driven.book(name, hashes=PROMPT, isl_tokens=40, disaggregate="always")
        assert isinstance(waiting, Waiting)
        waiting.on_answer = partial(ends, name)
    driven.remove(1)
    assert answers == [("b", "no_prefill_worker"), ("c", "no_prefill_worker")]


def test_a_client_that_gives_up_leaves_no_leg() -> None:
    driven = DrivenSelector(queue_threshold=1.0, turns=True)
    driven.register(1, worker_role="prefill", max_num_batched_tokens=8)
    driven.register(2, worker_role="decode")
    driven.reserve("a", (1, 0), hashes=[91], prefill=16)
    waiting = driven.book("b", hashes=PROMPT, isl_tokens=40, disaggregate="always")
    assert isinstance(waiting, Waiting)
    driven.selector.reservations.free("a", driven.now)
    assert isinstance(waiting.answer, Placement)
    waiting.cancel(driven.now)
    assert not driven.partition.slots.reservations


def test_ranks_are_ejected_and_slow_among_those_of_their_role() -> None:
    driven = fleet_of("prefill", "prefill", "decode", "decode", "decode", "decode")
    partition, health = driven.partition, driven.selector.health
    for worker_id in (1, 2, 3, 4):
        for _ in range(3):
            health.record_outcome(worker_id, None, "failed", driven.now)
    assert partition.health.out == {(1, 0), (3, 0), (4, 0)}  # the other half serves
    assert pair_of(chosen(driven, disaggregate="always"))[0] == 2
    for worker_id, seconds in ((1, 1e-3), (2, 1e-3), (3, 4e-3), (4, 4e-3), (5, 4e-3), (6, 16e-3)):
        teach(partition, partition.slots.ranks[worker_id, 0], seconds)
    factors = [partition.speeds.factor(partition.slots.ranks[n, 0]) for n in range(1, 7)]
    assert factors == [1.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    driven.register(1, worker_role="decode")
    assert partition.speeds.seconds_per_token(partition.slots.ranks[1, 0]) is None


def test_the_pace_of_a_prefill_worker_ends_with_the_leg_and_its_error_with_the_first_token() -> (
    None
):
    driven = fleet_of("prefill", "decode")
    partition, reservations = driven.partition, driven.selector.reservations
    prefill = partition.slots.ranks[1, 0]
    teach(partition, prefill, 1e-3)
    for number in range(40):
        name = f"r{number}"
        driven.now += 100.0
        driven.book(name, hashes=[], isl_tokens=2000, disaggregate="always")
        reservations.end(f"{name}#prefill", "ok", None, driven.now + 4.0)
        reservations.prefill_complete(name, driven.now + 8.0, ttft_s=8.0)
        reservations.free(name, driven.now + 50.0)
    assert partition.speeds.seconds_per_token(prefill) == pytest.approx(2e-3)
    assert prefill.counts.predictions == 40
    assert prefill.counts.observed_s == pytest.approx(8.0 * 40)
    assert partition.speeds.seconds_per_token(partition.slots.ranks[2, 0]) is None


def test_how_full_each_role_is() -> None:
    driven = fleet_of("prefill", "decode")
    driven.register(1, worker_role="prefill", max_num_batched_tokens=100)
    driven.reserve("a", (1, 0), isl_tokens=100, prefill=50)
    driven.reserve("b", (2, 0), hashes=list(range(25)), prefill=None)
    found = [saturation(driven.partition, role=role) for role in ("prefill", "decode", "both")]
    assert found == [0.5, 0.25, 0.25]


def test_an_explanation_says_who_has_another_role_or_cannot_be_the_other_one() -> None:
    driven = fleet_of("prefill", "decode", "both")
    placement = chosen(driven, disaggregate="always", allowed=[3], adds=EXPLANATION)

    def why(explanation: Any) -> list[str | None]:
        return [rank.filtered for rank in explanation.ranks]

    assert why(placement.explain) == ["not_allowed", "not_allowed", None]
    assert why(placement.prefill.explain) == [None, "role", "partner"]  # type: ignore[union-attr]
    plain = chosen(driven, "s", disaggregate="never", adds=EXPLANATION)
    assert why(plain.explain) == ["role", "role", None]


def test_projected_loads_of_pairs_have_no_prefill_where_there_is_only_decode() -> None:
    driven = fleet_of("prefill", "decode", "both")
    prompt, terms = driven.request(PROMPT, 40).prompt, driven.selector.terms
    for in_pairs, tokens in ((False, [40, 40, 40]), (True, [40, 0, 40])):
        rows = potential_loads(driven.partition, prompt, terms, in_pairs=in_pairs)
        assert [row.potential_prefill_tokens for row in rows] == tokens


def test_a_pair_waits_by_what_is_left_for_its_prefill_worker() -> None:
    driven = DrivenSelector(queue_threshold=1.0, queue_policy="wspt")
    for worker_id, role in ((1, "prefill"), (2, "decode")):
        driven.register(worker_id, worker_role=role, max_num_batched_tokens=8)
    driven.reserve("a", (1, 0), hashes=[91], prefill=16)
    hold(driven, 1, 9)
    driven.book("short", hashes=[71, 72], isl_tokens=8, disaggregate="always")
    driven.book("held", hashes=PROMPT, isl_tokens=40, disaggregate="always")
    assert [each.request.reservation_id for each in driven.partition.queue.in_order()] == [
        "held",
        "short",
    ]
