"""Choose a pair of workers for a request: one prefills the prompt, and passes the KV blocks to the
other, which decodes. Imported only if a request asks for a pair.

Each stage is an ordinary choice (`Selector.choose`) with its own candidates and cost (`cost.py`),
so sessions, targets, pins and labels act as always. First the request may stay with one worker
(`auto`): the transfer of blocks costs more than it saves if the worker has most of them. That is
judged on the worker that would be chosen if there were no pairs. Then the worker for the decode is
chosen, among those for which there is another for the prefill; and then the latter. Both are booked
in the same call, as two reservations: that of the request, without prefill, and its leg."""

from copy import copy
from typing import Final, Protocol

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
from lean_selector.core.selection.scheduler import eligible, not_busy
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


class Chooser(Protocol):
    """The part of a Selector that pairs use; each of its methods is explained there."""

    @property
    def settings(self) -> RouterSettings: ...
    @property
    def reservations(self) -> Reservations: ...
    @property
    def pairs(self) -> dict[str, int]: ...

    def free_ranks(self, partition: Partition, request: SelectionRequest) -> int: ...

    def choose(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        now: float,
    ) -> tuple[RankLoad, Placement, int]: ...

    def keep(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        load: RankLoad,
        placement: Placement,
        now: float,
    ) -> None: ...


def place(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    matches: MatchSets,
    now: float,
    *,
    waits: bool = False,
    among: int = -1,
) -> Placement | None:
    """Choose a pair, or one worker that does both, and book the choice if `request.books`. If the
    request `waits` and has to, return None. `among`: the ranks for prefill that a request may use
    that leaves the queue. Raises SelectorError, with nothing changed."""
    if request.after_prefill:
        return _decode_alone(selector, partition, request, matches, now)
    if request.bars_pair:
        request.role = DECODE
        ranks = selector.free_ranks(partition, request) & among
        room = partition.queue.room
        if waits and room is not None:
            ranks, is_next = partition.queue.may_pass(room, ranks)
            if not is_next:
                return None
        return _local(selector, partition, request, ranks, matches, now, request.bars_pair)
    local = copy(request)
    local.role, local.disaggregate = DECODE, NEVER
    decoding = selector.free_ranks(partition, local)
    if not decoding:
        raise partition.nobody()
    reason = ASKED
    if request.disaggregate == AUTO:
        reason = UNCACHED
        if _may_be_cached(selector, partition, local, decoding, matches):
            choice = selector.choose(partition, local, decoding, matches, now)
            reason = _judged(selector, partition, local, choice[0], matches)
            if reason == CACHED:
                return _kept(selector, partition, local, choice, matches, now, reason)
    prefill = prefill_of(request)
    usable = eligible(partition, prefill)
    pairable = _pairable(partition, decoding, usable)
    if not pairable:
        reason = _why_none(partition, usable)
        if selector.settings.pd_fallback == "refuse":
            _count(selector, reason)
            raise NoPrefillWorker(reason)
        return _local(selector, partition, local, decoding, matches, now, reason)
    free = _free(selector, partition, prefill, usable)
    room = partition.queue.room
    if waits and room is not None:
        free, is_next = partition.queue.may_pass(room, free)
        if not is_next:
            return None
    free &= among
    pairable = _pairable(partition, decoding, free)
    if not pairable:
        raise _busy(selector, partition, prefill)
    return _pair(selector, partition, request, prefill, pairable, free, matches, now, reason)


def _pair(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    prefill: SelectionRequest,
    decoding: int,
    prefilling: int,
    matches: MatchSets,
    now: float,
    reason: str,
) -> Placement:
    decode = copy(request)
    decode.role, decode.disaggregate, decode.after_prefill = DECODE, NEVER, True
    decode.terms = decode_terms(request.terms)
    load, placement, left = selector.choose(partition, decode, decoding, matches, now)
    partners = prefilling & partition.partners(load) & ~partition.workers[load.worker_id].mask
    if not partners:  # a session or a target led away from those that have some
        alone = copy(request)
        alone.role, alone.disaggregate = DECODE, NEVER
        return _local(selector, partition, alone, load.mask, matches, now, NO_PARTNER)
    if partition.domains is not None:
        preferred = partition.domains.preferred(load)
        prefill.preferred_taints = {**request.preferred_taints, **preferred}
    its_load, its_placement, its_left = selector.choose(partition, prefill, partners, matches, now)
    if request.books:
        try:
            selector.reservations.check_free(partition, prefill.reservation_id)
        except Conflict as error:
            raise selector.reservations.not_booked(error, request.reservation_id) from None
    selector.keep(partition, decode, left, matches, load, placement, now)
    selector.keep(partition, prefill, its_left, matches, its_load, its_placement, now)
    if request.books:
        tokens = its_placement.effective_prefill_tokens
        selector.reservations.join_leg(partition, request.reservation_id, tokens)
    partition.pairs += 1
    _count(selector, reason)
    how = partition.workers[its_load.worker_id].disaggregation
    return replace(
        placement,
        effective_prefill_tokens=0,
        prefill=PrefillPlacement(
            its_placement.worker_id,
            its_placement.dp_rank,
            its_placement.endpoint,
            its_placement.overlap,
            its_placement.effective_prefill_tokens,
            UNSET if how is None else how,
            its_placement.explain,
        ),
        disaggregation=Disaggregated(True, reason),
    )


def _decode_alone(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    matches: MatchSets,
    now: float,
) -> Placement:
    """Choose another worker for the decode of a prompt that was prefilled elsewhere."""
    request.role, request.terms = DECODE, decode_terms(request.terms)
    ranks = selector.free_ranks(partition, request)
    load, placement, left = selector.choose(partition, request, ranks, matches, now)
    selector.keep(partition, request, left, matches, load, placement, now)
    return replace(placement, effective_prefill_tokens=0)


def _local(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
    now: float,
    reason: str,
) -> Placement:
    choice = selector.choose(partition, request, ranks, matches, now)
    return _kept(selector, partition, request, choice, matches, now, reason)


def _kept(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    choice: tuple[RankLoad, Placement, int],
    matches: MatchSets,
    now: float,
    reason: str,
) -> Placement:
    load, placement, ranks = choice
    selector.keep(partition, request, ranks, matches, load, placement, now)
    _count(selector, reason)
    return replace(placement, disaggregation=Disaggregated(False, reason))


def _count(selector: Chooser, reason: str) -> None:
    selector.pairs[reason] = selector.pairs.get(reason, 0) + 1


# -- one worker or two -----------------------------------------------------------------------------


def _may_be_cached(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
) -> bool:
    """Whether any of these ranks has so much of the prompt that it may do both."""
    if not matches and request.prompt.isl_tokens:
        return False
    for match, holding in matches:
        if holding & ranks and _is_cached(selector, partition, request, match):
            return True
    return not request.prompt.isl_tokens


def _is_cached(
    selector: Chooser, partition: Partition, request: SelectionRequest, match: Matched
) -> bool:
    tokens = request.prompt.isl_tokens
    cached = (match.device + match.host + match.disk) * partition.block_size
    left = max(0, tokens - cached)
    return not left or left < min(selector.settings.pd_local_max_tokens, LOCAL_SHARE * tokens)


def _judged(
    selector: Chooser,
    partition: Partition,
    request: SelectionRequest,
    load: RankLoad,
    matches: MatchSets,
) -> str:
    """Return CACHED if this rank is to do both, or else why not."""
    if not _is_cached(selector, partition, request, match_of(matches, load.mask)):
        return UNCACHED
    room = partition.queue.room
    if load.mask & partition.busy or (room is not None and not load.mask & room.below):
        return DECODE_BUSY
    most = selector.settings.decode_busy_threshold
    if most is not None:
        outlook = outlook_of(partition, request, matches, load)
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


def _free(selector: Chooser, partition: Partition, prefill: SelectionRequest, usable: int) -> int:
    try:
        return not_busy(partition, prefill, usable)
    except AllWorkersBusy:
        raise _busy(selector, partition, prefill) from None


def _busy(selector: Chooser, partition: Partition, prefill: SelectionRequest) -> AllWorkersBusy:
    partition.count_shed(prefill.asked_at)
    _count(selector, PREFILL_BUSY)
    return AllWorkersBusy()


def _why_none(partition: Partition, usable: int) -> str:
    if usable:
        return NO_PARTNER
    serving = partition.everyone & ~partition.draining
    return NOT_ALLOWED if partition.usable(serving, PREFILL) else NO_PREFILL


def _pairable(partition: Partition, decoding: int, prefilling: int) -> int:
    """Return those of `decoding` that can get their blocks from another worker of `prefilling`."""
    if partition.domains is None:
        return _with_another(partition, decoding, prefilling)
    found = 0
    for ranks, partners in partition.domains.partners():
        if ranks & decoding:
            found |= _with_another(partition, ranks & decoding, partners & prefilling)
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
    return CostTerms(
        terms.credit,
        terms.decay,
        terms.scale,
        terms.temperature,
        True,
        terms.host_weight,
        terms.disk_weight,
        0.0,
        False,
        terms.eviction,
        terms.knows_speeds,
        False,
    )


def decode_terms(terms: CostTerms) -> CostTerms:
    """Return the weights for the rank of the decode: active blocks and requests, less a credit."""
    return CostTerms(
        terms.credit,
        0.0,
        0.0,
        terms.temperature,
        False,
        terms.host_weight,
        terms.disk_weight,
        terms.request_weight,
        True,
    )
