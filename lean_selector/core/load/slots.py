"""Active requests of one partition, and the load of each of its ranks.

Stores reservations (of this replica, and copies of peers' reservations) and each rank's load:
prefill tokens, decode blocks, requests. Follows selection.md sections 5 and 6 and slot_tracker.md
section 2; D12 defines expiry. The selection service and the slot tracker share this code."""

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import attrgetter, itemgetter

from lean_selector.core.errors import BadRequest, DuplicateRequest, NotFound, rank_text
from lean_selector.core.load.prompt_trie import HASH_BYTES, PromptTrie
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.rank_bits import RankBits, RankKey, bits_of

_touched_at = attrgetter("touched_at")
_late_s = itemgetter(0)


def check_decay_fraction(decay_fraction: float | None) -> None:
    """Raise BadRequest for a fraction outside [0, 1]."""
    if decay_fraction is not None and not 0.0 <= decay_fraction <= 1.0:
        raise BadRequest("decay_fraction must be between 0.0 and 1.0")


class Slots:
    """The active requests of one (model_name, tenant_id). A method that raises has changed nothing.
    Remove all ranks before you drop a Slots: the garbage collector does not track all its parts."""

    def __init__(
        self,
        on_load_change: Callable[[RankLoad], None] | None = None,
        bits: RankBits | None = None,
    ) -> None:
        """`on_load_change` is called with a rank whose prefill tokens or decode blocks may have
        changed, but not on its removal. `bits` assigns bit numbers to ranks, also for the index."""
        self.on_load_change = on_load_change
        self.bits = RankBits() if bits is None else bits
        # Called with each ended reservation, whatever the cause, and with `heard_at`.
        self.on_ended: Callable[[Reservation], None] | None = None
        self.ranks: dict[RankKey, RankLoad] = {}
        self.ranks_added = 0  # in total
        self.reservations: dict[str, Reservation] = {}  # bounded by expiry
        # Totals of requests admitted here: booked = live + freed + expired + dropped because their
        # rank was removed.
        self.booked = self.freed = self.expired = self.dropped = 0
        self.copied = 0  # copies of peers' reservations, in total
        self._trie = PromptTrie()
        # The time argument of the last call, for what ends without a time of its own, such as a
        # removed rank. Callers may set it.
        self.heard_at = 0.0
        # Incremented when the live reservations or their touch times change.
        self.revision = 0
        # Each reservation is in one of these, in order of touch time, the oldest first; of
        # backdated copies the youngest first. Plain dicts: listing all takes a tenth of an
        # OrderedDict's time. Finding the oldest steps over the holes that removed keys leave.
        self._local_by_touch: dict[str, Reservation] = {}
        self._copies_by_touch: dict[str, Reservation] = {}
        self._backdated: dict[str, Reservation] = {}

    @property
    def arrived(self) -> int:
        """How many requests were booked here or copied from peers, in total."""
        return self.booked + self.copied

    def live_counts(self) -> tuple[int, int]:
        """Return the number of active requests admitted here, and of copies of peers' requests."""
        local = len(self._local_by_touch)
        return local, len(self.reservations) - local

    def add_rank(self, worker_id: int, dp_rank: int) -> RankLoad:
        """Return the load of a rank. Adds the rank, without load, if it is new."""
        load = self.ranks.get((worker_id, dp_rank))
        if load is None:
            load = RankLoad(worker_id, dp_rank, self.bits.acquire((worker_id, dp_rank)))
            self.ranks[load.key] = load
            self.ranks_added += 1
        return load

    def remove_rank(self, worker_id: int, dp_rank: int) -> list[Reservation]:
        """Remove a rank and its reservations. Return the reservations; [] for an unknown rank."""
        load = self.ranks.pop((worker_id, dp_rank), None)
        if load is None:
            return []
        dropped = [self.reservations[request_id] for request_id in load.reservations]
        for reservation in dropped:
            self.dropped += reservation.router_id is None
            self._detach(reservation)
        self.bits.release(load.key)
        load.active_prefill_tokens = load.active_decode_blocks = load.distinct_blocks = 0
        return dropped

    def book(
        self,
        spec: ReservationSpec,
        sequence_hashes: bytes,
        now: float,
        router_id: int | None = None,
    ) -> Reservation:
        """Reserve a rank for a request.

        sequence_hashes: 8 bytes little-endian per block, in prompt order; their number need not
        match the number of tokens. router_id: the peer that admitted the request; None: this
        replica. Raises NotFound for an unknown rank, then DuplicateRequest for a live id."""
        request_id = spec.request_id
        load = self.ranks.get((spec.worker_id, spec.dp_rank))
        if load is None:
            where = rank_text(spec.worker_id, spec.dp_rank)
            raise NotFound(f"Worker {where} not found")
        if (live := self.reservations.get(request_id)) is not None:
            raise DuplicateRequest(request_id, *live.rank_load.key)
        assert len(sequence_hashes) % HASH_BYTES == 0, "whole hashes"
        prefill_tokens = spec.prefill_tokens
        if prefill_tokens is None or not spec.track_prefill_tokens:
            prefill_tokens = 0
        run, new_blocks = self._trie.insert(sequence_hashes, load.mask)
        reservation = Reservation(
            request_id,
            spec,
            load,
            run,
            len(sequence_hashes) // HASH_BYTES,
            prefill_tokens,
            now,
            now,
            router_id,
            booked_at=now,
        )
        ahead_tokens = load.active_prefill_tokens + prefill_tokens
        self.reservations[request_id] = reservation
        load.reservations[request_id] = None
        if router_id is None:
            self.booked += 1
            reservation.ahead_tokens = ahead_tokens
            self._local_by_touch[request_id] = reservation
        else:
            self.copied += 1
            self._copies_by_touch[request_id] = reservation
        self.heard_at = now
        self.revision += 1
        self._set_load(load, ahead_tokens, load.distinct_blocks + new_blocks)
        return reservation

    def prefill_complete(self, request_id: str, now: float) -> tuple[Reservation, bool] | None:
        """Release a request's prefill tokens. Return None if the request is not live; otherwise
        the reservation, and whether this was the first such call for the request."""
        reservation = self.reservations.get(request_id)
        if reservation is None:
            return None
        self._touch(reservation, now)
        first = not reservation.prefill_done
        reservation.prefill_done = True
        if tokens := reservation.prefill_tokens:
            load = reservation.rank_load
            reservation.prefill_tokens = 0
            self._set_load(load, load.active_prefill_tokens - tokens, load.distinct_blocks)
        return reservation, first

    def output_block(
        self,
        request_id: str,
        now: float,
        decay_fraction: float | None = None,
        blocks: int = 1,
    ) -> Reservation | None:
        """Add blocks that a request has generated. Return None if the request is not live. With a
        `decay_fraction`, the blocks that only this request has on the rank, including the new
        blocks, get this weight. Raises BadRequest for a fraction outside [0, 1]."""
        check_decay_fraction(decay_fraction)
        reservation = self.reservations.get(request_id)
        if reservation is None:
            return None
        load = reservation.rank_load
        reservation.output_blocks += blocks
        if decay_fraction is not None:
            weights = load.block_weights
            self._trie.weigh(reservation.run, load.mask, decay_fraction, weights)
            weighted, output = reservation.weighted_output_blocks, reservation.output_blocks
            weights.move(reservation.output_weight, decay_fraction, weighted)
            weights.move(1.0, decay_fraction, output - weighted)
            reservation.weighted_output_blocks = output
            reservation.output_weight = decay_fraction
        self._touch(reservation, now)
        self._set_load(load, load.active_prefill_tokens, load.distinct_blocks + blocks)
        return reservation

    def free(self, request_id: str, now: float) -> Reservation | None:
        """End a request and remove its reservation. Return None if the request is not live."""
        reservation = self.reservations.get(request_id)
        if reservation is not None:
            if reservation.router_id is None:
                self.freed += 1
            self.heard_at = now
            self._release(reservation)
        return reservation

    def touch(self, request_id: str, now: float) -> Reservation | None:
        """Restart the time until a request expires. Return None if the request is not live."""
        reservation = self.reservations.get(request_id)
        if reservation is not None:
            self._touch(reservation, now)
        return reservation

    def backdate(self, copy: Reservation, touched_at: float) -> None:
        """Set the time of a copied reservation's last activity to the time that the peer reports.
        Call this for the most recently active reservation first, or some may expire late."""
        copy.touched_at = touched_at
        self.revision += 1
        oldest = next(reversed(self._backdated.values()), copy)
        if touched_at <= oldest.touched_at:
            del self._copies_by_touch[copy.request_id]
            self._backdated[copy.request_id] = copy

    def by_touch(self) -> Iterator[Reservation]:
        """Yield all live reservations, the most recently active first. Skips reservations that end
        during the iteration."""
        listed = heapq.merge(
            list(reversed(self._local_by_touch.values())),
            list(reversed(self._copies_by_touch.values())),
            list(self._backdated.values()),
            key=_touched_at,
            reverse=True,
        )
        live = self.reservations
        return filter(lambda held: live.get(held.request_id) is held, listed)

    def expire(
        self, now: float, local_limit_s: float, replica_limit_s: float, max_steps: int
    ) -> list[Reservation]:
        """End at most `max_steps` requests that were idle longer than their limit, and return them.
        The most overdue request ends first, no matter which replica admitted it. If `max_steps`
        requests are returned, call again: there may be more."""
        self.heard_at = now
        if not self.reservations:
            return []
        overdue = heapq.merge(
            _overdue(self._local_by_touch.values(), now, local_limit_s),
            _overdue(self._copies_by_touch.values(), now, replica_limit_s),
            _overdue(reversed(self._backdated.values()), now, replica_limit_s),
            key=_late_s,
            reverse=True,
        )
        expired = [reservation for _, reservation in islice(overdue, max_steps)]
        for reservation in expired:
            self.expired += reservation.router_id is None
            self._release(reservation)
        return expired

    def active_prefix(self, sequence_hashes: bytes) -> dict[RankKey, int]:
        """Return how many leading blocks of a prompt are active per rank; omits ranks with none."""
        keys = self.bits.keys
        return {
            key: blocks
            for blocks, mask in self._trie.active_prefix(sequence_hashes)
            for bit in bits_of(mask)
            if (key := keys[bit]) is not None
        }

    def active_prefix_sets(self, sequence_hashes: bytes) -> list[tuple[int, int]]:
        """Return pairs (n, set of ranks with exactly n leading blocks active). n is at least 1."""
        return self._trie.active_prefix(sequence_hashes)

    def starts_no_prompt(self, first_hash: int | bytes) -> bool:
        """Whether no active prompt starts with this hash (a signed or unsigned int, or at least 8
        bytes). If so, `active_prefix` finds nothing for a prompt that starts with this hash."""
        if isinstance(first_hash, int):
            first_hash = (first_hash & U64_MAX).to_bytes(HASH_BYTES, "little")
        return first_hash[:HASH_BYTES] not in self._trie.root.children

    def sequence_hashes_of(self, reservation: Reservation) -> bytes:
        """Return the sequence hashes that a live reservation was booked with."""
        return self._trie.hashes_of(reservation.run)

    def _touch(self, reservation: Reservation, now: float) -> None:
        request_id = reservation.request_id
        if reservation.router_id is None:
            by_touch = self._local_by_touch
            del by_touch[request_id]
        else:
            by_touch = self._copies_by_touch
            if by_touch.pop(request_id, None) is None:
                del self._backdated[request_id]
        by_touch[request_id] = reservation
        reservation.touched_at = self.heard_at = now
        self.revision += 1

    def _release(self, reservation: Reservation) -> None:
        load, tokens = reservation.rank_load, reservation.prefill_tokens
        freed_blocks = self._detach(reservation)
        self._set_load(
            load, load.active_prefill_tokens - tokens, load.distinct_blocks - freed_blocks
        )

    def _detach(self, reservation: Reservation) -> int:
        """Remove a reservation, but do not update its rank's load. Return by how many blocks the
        load of the rank must shrink."""
        request_id, load = reservation.request_id, reservation.rank_load
        self.revision += 1
        del self.reservations[request_id]
        del load.reservations[request_id]
        if reservation.router_id is None:
            del self._local_by_touch[request_id]
        elif self._copies_by_touch.pop(request_id, None) is None:
            del self._backdated[request_id]
        weights = load.block_weights
        freed_blocks = self._trie.remove(reservation.run, load.mask, weights)
        reservation.run = self._trie.root  # another run may absorb `run`
        if reservation.output_blocks:
            weights.move(reservation.output_weight, 1.0, reservation.weighted_output_blocks)
        if self.on_ended is not None:
            self.on_ended(reservation)
        return freed_blocks + reservation.output_blocks

    def _set_load(self, load: RankLoad, prefill_tokens: int, distinct_blocks: int) -> None:
        load.active_prefill_tokens = prefill_tokens
        load.distinct_blocks = distinct_blocks
        weights = load.block_weights
        load.active_decode_blocks = (
            weights.rounded_total(distinct_blocks) if weights.counts else distinct_blocks
        )
        if self.on_load_change is not None:
            self.on_load_change(load)


def _overdue(
    by_touch: Iterable[Reservation], now: float, limit_s: float
) -> Iterator[tuple[float, Reservation]]:
    """Yield (seconds overdue, request) for each request that was idle longer than the limit."""
    for reservation in by_touch:
        late_s = now - reservation.touched_at - limit_s
        if late_s <= 0.0:
            return
        yield late_s, reservation
