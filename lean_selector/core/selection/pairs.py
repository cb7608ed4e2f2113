"""Choose a pair of workers for a request: one prefills the prompt, and passes the KV blocks to the
other, which decodes. Imported only if a request asks for a pair.

Each stage is an ordinary choice (`Selector.choose`) with its own candidates and cost (`cost.py`),
so sessions, targets, pins and labels act as always. First the request may stay with one worker
(`auto`): the transfer of blocks costs more than it saves if the worker has most of them. That is
judged on the worker that would be chosen if there were no pairs. Then the worker for the decode is
chosen, among those for which there is another for the prefill; and then the latter. Both are booked
in the same call, as two reservations: that of the request, without prefill, and its leg."""

from collections.abc import Callable
from copy import copy
from typing import Final

from msgspec import UNSET
from msgspec.structs import replace

from lean_selector.core.errors import AllWorkersBusy, Conflict, NoPrefillWorker
from lean_selector.core.index.shapes import Matched
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.explain import outlook_of
from lean_selector.core.selection.overlap import MatchSets, match_of
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.reservations import Reservations, leg_of
from lean_selector.core.selection.router_settings import CostTerms, RouterSettings
from lean_selector.core.selection.scheduler import eligible, free_ranks
from lean_selector.core.selection.shapes import (
    AUTO,
    DECODE,
    EXPLANATION,
    NEVER,
    PREFILL,
    Disaggregated,
    Placement,
    PrefillPlacement,
    SelectionRequest,
)

LOCAL_SHARE: Final = 0.7  # of a prompt: if less is uncached, and few tokens, no pair is worth it

# Reasons, as in answers and metrics. The caller of `bars_pair` has others.
ASKED: Final = "asked"  # always
UNCACHED: Final = "uncached"  # no worker that decodes has enough of the prompt
DECODE_BUSY: Final = "decode_busy"  # one has, but is too busy to prefill the rest
CACHED: Final = "cached"  # one has, so it does both
NO_PREFILL: Final = "no_prefill_worker"
NOT_ALLOWED: Final = "prefill_not_allowed"  # there are prefill workers, and the request bars them
NO_PARTNER: Final = "no_partner"  # none for the worker of the session or target, or in its domain
PREFILL_BUSY: Final = "prefill_busy"


Choice = tuple[RankLoad, Placement, int]  # as `Selector.choose` returns it


Choose = Callable[[SelectionRequest, int], Choice]
Keep = Callable[[SelectionRequest, Choice], Placement]


class Pairing:
    """The choice of one or two ranks for a request that asks for a pair."""

    __slots__ = (
        "_choose", "_keep", "_matches", "_pairs", "_partition", "_request", "_reservations",
        "_settings",
    )  # fmt: skip

    def __init__(
        self,
        settings: RouterSettings,
        reservations: Reservations,
        pairs: dict[str, int],
        partition: Partition,
        request: SelectionRequest,
        matches: MatchSets,
        choose: Choose,
        keep: Keep,
    ) -> None:
        """`pairs` counts requests by reason. `choose` and `keep` are those of the selector, where
        they are explained, for this partition and these matches."""
        self._settings = settings
        self._reservations = reservations
        self._pairs = pairs
        self._partition = partition
        self._request = request
        self._matches = matches
        self._choose = choose
        self._keep = keep

    def place(self, *, waits: bool = False, among: int = -1) -> Placement | None:
        """Choose a pair, or one rank that does both, and book the choice if the request books. If
        it `waits` and has to, return None. `among`: the ranks for prefill that a request may use
        that leaves the queue. Raises SelectorError, with nothing changed."""
        partition, request = self._partition, self._request
        alone = copy(request)
        alone.role, alone.disaggregate = DECODE, NEVER
        decoding = free_ranks(partition, alone)
        if request.after_prefill:
            alone.terms = decode_terms(request.terms)
            placement = self._keep(alone, self._choose(alone, decoding))
            return replace(placement, effective_prefill_tokens=0)
        if request.bars_pair:
            request.role = DECODE  # so it waits for other ranks than for those that prefill
            decoding = self._among(decoding, waits, among)
            return None if decoding < 0 else self._alone(alone, decoding, request.bars_pair)
        if not decoding:
            raise partition.nobody()
        reason = ASKED
        if request.disaggregate == AUTO:
            reason = UNCACHED
            if self._may_be_cached(decoding):
                choice = self._choose(alone, decoding)
                reason = self._judged(choice[0])
                if reason == CACHED:
                    return self._kept(alone, choice, reason)
        prefill = prefill_of(request)
        usable = eligible(partition, prefill)
        if not _pairable(partition, decoding, usable):
            reason = _why_none(partition, usable)
            if self._settings.pd_fallback == "local":
                return self._alone(alone, decoding, reason)
            self._count(reason)
            raise NoPrefillWorker(reason)
        free = usable & ~partition.busy
        if free and (free := self._among(free, waits, among)) < 0:
            return None
        decoding = _pairable(partition, decoding, free)
        if not decoding:
            partition.count_shed(request.asked_at)
            self._count(PREFILL_BUSY)
            raise AllWorkersBusy
        return self._pair(alone, prefill, decoding, free, reason)

    def _pair(
        self,
        alone: SelectionRequest,
        prefill: SelectionRequest,
        decoding: int,
        prefilling: int,
        reason: str,
    ) -> Placement:
        partition, request, reservations = self._partition, self._request, self._reservations
        decode = copy(alone)
        decode.after_prefill, decode.terms = True, decode_terms(request.terms)
        choice = self._choose(decode, decoding)
        load, placement, _ = choice
        partners = prefilling & ~partition.workers[load.worker_id].mask
        if partition.domains is not None:
            domain = partition.domains.of(load)
            partners &= domain.partners
            prefill.liked = domain.liked
        if not partners:  # a session or a target led away from those that have some
            return self._alone(alone, load.mask, NO_PARTNER)
        other = self._choose(prefill, partners)
        found = other[1]
        if request.books:
            try:
                reservations.check_free(partition, prefill.reservation_id)
            except Conflict as error:
                raise reservations.not_booked(error, request.reservation_id) from None
        self._keep(decode, choice)
        self._keep(prefill, other)
        if request.books:
            left = found.effective_prefill_tokens
            reservations.join_leg(partition, request.reservation_id, left)
        partition.pairs += 1
        self._count(reason)
        return replace(
            placement,
            effective_prefill_tokens=0,
            prefill=PrefillPlacement(
                found.worker_id,
                found.dp_rank,
                found.endpoint,
                found.overlap,
                found.effective_prefill_tokens,
                partition.workers[found.worker_id].disaggregation or UNSET,
                found.explain,
            ),
            disaggregation=Disaggregated(True, reason),
        )

    def _alone(self, request: SelectionRequest, ranks: int, reason: str) -> Placement:
        return self._kept(request, self._choose(request, ranks), reason)

    def _kept(self, request: SelectionRequest, choice: Choice, reason: str) -> Placement:
        placement = self._keep(request, choice)
        self._count(reason)
        return replace(placement, disaggregation=Disaggregated(False, reason))

    def _count(self, reason: str) -> None:
        self._pairs[reason] = self._pairs.get(reason, 0) + 1

    def _among(self, ranks: int, waits: bool, among: int) -> int:
        """Return those of `ranks` that may be used now; -1 if the request has to wait."""
        queue = self._partition.queue
        if waits and queue.room is not None:
            ranks, is_next = queue.may_pass(queue.room, ranks)
            if not is_next:
                return -1
        return ranks & among

    # -- one worker or two -------------------------------------------------------------------------

    def _may_be_cached(self, ranks: int) -> bool:
        """Whether any of these ranks has so much of the prompt that it may do both."""
        found = [match for match, holding in self._matches if holding & ranks]
        return not self._request.prompt.isl_tokens or any(map(self._is_cached, found))

    def _is_cached(self, match: Matched) -> bool:
        tokens = self._request.prompt.isl_tokens
        cached = (match.device + match.host + match.disk) * self._partition.block_size
        left, most = max(0, tokens - cached), self._settings.pd_local_max_tokens
        return not left or left < min(most, LOCAL_SHARE * tokens)

    def _judged(self, load: RankLoad) -> str:
        """Return CACHED if this rank is to do both, or else why not."""
        partition, matches = self._partition, self._matches
        if not self._is_cached(match_of(matches, load.mask)):
            return UNCACHED
        room, most = partition.queue.room, self._settings.decode_busy_threshold
        if load.mask & partition.busy or (room is not None and not load.mask & room.below):
            return DECODE_BUSY
        if most is not None:
            outlook = outlook_of(partition, self._request, matches, load)
            total = outlook.total_kv_blocks
            if total is not None and outlook.potential_decode_blocks > most * total:
                return DECODE_BUSY
        return CACHED


# -- who may form a pair ---------------------------------------------------------------------------


def prefill_of(request: SelectionRequest) -> SelectionRequest:
    """Return the request for the rank of the prefill."""
    leg = SelectionRequest(request.prompt, prefill_terms(request.terms))
    leg.books = request.books
    leg.reservation_id = leg_of(request.reservation_id)
    leg.allowed_worker_ids = request.prefill_allowed_worker_ids
    leg.required_taints = request.required_taints
    leg.preferred_taints = request.preferred_taints
    leg.adds = request.adds & EXPLANATION
    leg.asked_at, leg.role = request.asked_at, PREFILL
    leg.waited_s, leg.matches = request.waited_s, request.matches
    return leg


def _why_none(partition: Partition, usable: int) -> str:
    if usable:
        return NO_PARTNER
    return NOT_ALLOWED if partition.usable(PREFILL) else NO_PREFILL


def _pairable(partition: Partition, decoding: int, prefilling: int) -> int:
    """Return those of `decoding` that can get their blocks from another worker of `prefilling`."""
    if partition.domains is None:
        return _with_another(partition, decoding, prefilling)
    found = 0
    for each in partition.domains.classes():
        if ranks := each.ranks & decoding:
            found |= _with_another(partition, ranks, each.partners & prefilling)
    return found


def _with_another(partition: Partition, decoding: int, prefilling: int) -> int:
    if not prefilling:
        return 0
    load = partition.order.ranks[prefilling.bit_length() - 1]
    sole = partition.workers[load.worker_id].mask
    return decoding if prefilling & ~sole else decoding & ~sole


# -- what a stage costs ----------------------------------------------------------------------------


def prefill_terms(terms: CostTerms) -> CostTerms:
    """Return the weights for the rank of the prefill: those of the policy, without its decode."""
    return replace(
        terms, track_prefill=True, request_weight=0.0, credits_untracked=False, counts_decode=False
    )


def decode_terms(terms: CostTerms) -> CostTerms:
    """Return the weights for the rank of the decode: active blocks and requests, less a credit."""
    return replace(
        terms,
        decay=0.0,
        scale=0.0,
        track_prefill=False,
        credits_untracked=True,
        eviction=0.0,
        knows_speeds=False,
    )
