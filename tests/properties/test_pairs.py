"""The choice of pairs against a chooser that looks at every rank, one by one."""

import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from lean_selector.core.errors import AllWorkersBusy, NoPrefillWorker, SelectorError, Unavailable
from lean_selector.core.index.shapes import Matched
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection import choice, scheduler
from lean_selector.core.selection.pairs import decode_terms, prefill_terms
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import Placement, SelectionRequest, WorkerSpec
from tests.properties.test_choice import Fleet, fleets, request_of, routers, weights
from tests.support import naive_choice

Candidates = list[naive_choice.Candidate]


class Site(msgspec.Struct, frozen=True):
    """What a worker does, where it is, and whom it wants as the other of a pair."""

    role: str
    rack: str | None = None
    wants: str | None = None  # required or preferred: one of its rack
    weight: float | None = None


sites = st.builds(
    Site,
    st.sampled_from(["both", "prefill", "decode"]),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([None, None, "required", "preferred"]),
    st.sampled_from([None, 0.5, -0.7, 5.0]),
)
options = st.fixed_dictionaries(
    {"disaggregate": st.sampled_from(["auto", "always"])},
    optional={
        "allowed_worker_ids": st.just(frozenset({0, 2, 3, 5, 7, 9})),
        "prefill_allowed_worker_ids": st.just(frozenset({1, 2, 3, 4, 8})),
        "required_taints": st.just(frozenset("a")),
        "preferred_taints": st.dictionaries(st.sampled_from("abcd"), weights),
    },
)


def settle(selector: Selector, fleet: Fleet, sites: list[Site]) -> Partition:
    """Give the workers of a fleet, which are busy already, their sites."""
    partition = selector.catalog.ready_partition("default", "default")
    for worker in list(partition.workers.values()):
        site = sites[worker.worker_id % len(sites)]
        spec = WorkerSpec(
            worker_id=worker.worker_id,
            endpoint="w",
            block_size=fleet.block_size,
            data_parallel_size=len(worker.loads),
            taints=worker.taints,
            total_kv_blocks=worker.total_kv_blocks,
            worker_role=site.role,  # type: ignore[arg-type]
            topology_domains={} if site.rack is None else {"rack": site.rack},
            kv_transfer_domain=None if site.wants is None else "rack",
            kv_transfer_enforcement=site.wants,
            kv_transfer_preferred_weight=site.weight,
        )
        selector.upsert_worker(spec, 0.0)
    return partition


class Naive:
    """Who may be chosen, by the words of choosing.md."""

    def __init__(
        self,
        partition: Partition,
        router: RouterSettings,
        request: SelectionRequest,
        at: list[Site],
    ) -> None:
        self.partition, self.router, self.request, self.at = partition, router, request, at
        self.matches = naive_choice.matches_of(partition, request.prompt.local_hashes)

    def stage(self, role: str, **changes: Any) -> SelectionRequest:
        return msgspec.structs.replace(self.request, role=role, **changes)

    def fit(self, one: SchedulableWorker, other: SchedulableWorker) -> bool:
        first, second = (self.at[each.worker_id % len(self.at)] for each in (one, other))
        is_same = first.rack is not None and first.rack == second.rack
        return one is not other and (is_same or "required" not in (first.wants, second.wants))

    def liking(self, decode: SchedulableWorker) -> dict[int, float]:
        site, liked = self.at[decode.worker_id % len(self.at)], {}
        for worker_id in self.partition.workers:
            other = self.at[worker_id % len(self.at)]
            if site.rack is not None and site.rack == other.rack:
                wishes = {(each.wants, each.weight) for each in (site, other)}
                given = [weight for wants, weight in wishes if wants == "preferred" and weight]
                liked[worker_id] = sum(given)
        return liked

    def cheapest(
        self, request: SelectionRequest, ranks: Candidates, liked: dict[int, float] | None = None
    ) -> list[tuple[SchedulableWorker, RankLoad]]:
        costs = naive_choice.rank_costs(
            self.partition, request, ranks, self.matches, liked=liked or {}
        )
        return [rank for rank, cost in zip(ranks, costs, strict=True) if cost <= min(costs) + 1e-9]

    def uncached(self, load: RankLoad) -> int:
        match = self.matches.get(load.key, Matched(0))
        held = (match.device + match.host + match.disk) * self.partition.block_size
        return max(0, self.request.prompt.isl_tokens - held)

    def is_local(self, load: RankLoad) -> bool:
        left, isl = self.uncached(load), self.request.prompt.isl_tokens
        return not left or (left < self.router.pd_local_max_tokens and left < 0.7 * isl)

    def check(self, found: Placement | SelectorError) -> None:
        partition, request = self.partition, self.request
        whole = self.stage("decode")
        everyone = naive_choice.candidates(partition, whole)
        if not everyone:
            assert type(found) is Unavailable
            return
        try:
            decoding = naive_choice.not_busy(partition, whole, everyone)
        except AllWorkersBusy:
            assert type(found) is AllWorkersBusy
            return
        if request.disaggregate == "auto":
            best = self.cheapest(whole, decoding)
            locals_ = [load.key for _, load in best if self.is_local(load)]
            if isinstance(found, Placement) and found.prefill is msgspec.UNSET:
                if found.disaggregation.reason == "cached":  # type: ignore[union-attr]
                    assert (found.worker_id, found.dp_rank) in locals_
                    return
            elif len(locals_) == len(best):
                pytest.fail(f"one that has it should do both: {found}")
        self.check_pair(found, decoding)

    def check_pair(self, found: Placement | SelectorError, decoding: Candidates) -> None:
        partition, request = self.partition, self.request
        leg = self.stage(
            "prefill",
            allowed_worker_ids=request.prefill_allowed_worker_ids,
            terms=prefill_terms(request.terms),
        )
        usable = naive_choice.candidates(partition, leg)
        if not any(self.fit(one[0], other[0]) for one in decoding for other in usable):
            if self.router.pd_fallback == "refuse":
                assert type(found) is NoPrefillWorker
                return
            assert isinstance(found, Placement)
            best = self.cheapest(self.stage("decode"), decoding)
            assert (found.worker_id, found.dp_rank) in [load.key for _, load in best]
            return
        try:
            free = naive_choice.not_busy(partition, leg, usable)
        except AllWorkersBusy:
            free = []
        decoding = [one for one in decoding if any(self.fit(one[0], other[0]) for other in free)]
        if not decoding:
            assert type(found) is AllWorkersBusy
            return
        assert isinstance(found, Placement)
        assert isinstance(found.prefill, msgspec.Struct), found
        decode = self.stage("decode", terms=decode_terms(request.terms))
        best = self.cheapest(decode, decoding)
        chosen = partition.workers[found.worker_id]
        assert (found.worker_id, found.dp_rank) in [load.key for _, load in best]
        partners = [other for other in free if self.fit(chosen, other[0])]
        best = self.cheapest(leg, partners, self.liking(chosen))
        assert (found.prefill.worker_id, found.prefill.dp_rank) in [load.key for _, load in best]
        assert found.effective_prefill_tokens == 0


@settings(max_examples=500)
@given(
    fleet=fleets.filter(lambda fleet: len(fleet.ranks) > 3),
    router=routers.map(lambda each: msgspec.structs.replace(each, temperature=0.0)),
    changes=options,
    at=st.lists(sites, min_size=2, max_size=5),
    isl_tokens=st.integers(0, 400),
    local_most=st.sampled_from([0, 30, 2048]),
    fallback=st.sampled_from(["refuse", "local"]),
    few=st.sampled_from([0, choice._FEW_RANKS]),
    many=st.sampled_from([0, scheduler._MANY_GROUPS]),
)
def test_pairs_are_chosen_as_by_looking_at_each_rank(
    fleet: Fleet,
    router: RouterSettings,
    changes: dict[str, Any],
    at: list[Site],
    isl_tokens: int,
    local_most: int,
    fallback: Any,
    few: int,
    many: int,
) -> None:
    router = msgspec.structs.replace(router, pd_local_max_tokens=local_most, pd_fallback=fallback)
    selector = fleet.selector(router)
    partition = settle(selector, fleet, at)
    request = request_of(partition, router, isl_tokens)
    for name, value in changes.items():
        setattr(request, name, value)
    naive = Naive(partition, router, msgspec.structs.replace(request), at)
    selector._rng = random.Random(isl_tokens)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choice, "_FEW_RANKS", few)
        patched.setattr(scheduler, "_MANY_GROUPS", many)
        found: Placement | SelectorError
        try:
            placed = selector.select(partition, request, 0.0)
            assert isinstance(placed, Placement)
            found = placed
        except SelectorError as error:
            found = error
    naive.check(found)
