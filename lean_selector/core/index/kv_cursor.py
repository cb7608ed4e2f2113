"""Track the batch numbers of one source (an engine's KV-event publisher): gaps, replays, restarts.

A PUB socket neither repeats nor reorders messages. So if the number of a live batch does not grow,
the batch comes from a new publisher. A replay contains all batches from the requested one to the
engine's newest. Live batches that arrive between the request and the first replayed batch are
applied at once and also kept, because a replay endpoint may never answer. Live batches that arrive
later are only kept. When the replay ends, the kept batches that the replay did not contain are
applied. By then all batches after the gap have been applied in order, some of them for the second
time. The second time, a block that is already held is not counted again (`is_again`).

The first live batch of a restarted engine may have a higher number than our last batch. To notice
such a restart, we request the replay from the batch before the gap. If the engine's batch differs
from the batch that we applied, the engine has restarted. The newest batch that was applied before
the last connection is also compared, because the batch before the gap may come from the new engine.
If the engine's buffer has neither of these two batches, the source is degraded (batches may be
missing). Without a replay endpoint, a restart looks like a gap, and the source is degraded. If the
number of the first batch happens to be the next in order, the restart is not noticed.

After each new connection, we request a replay from our last batch on, even if there is no gap,
because an idle engine publishes nothing. If the engine has none of these batches, the engine has
restarted (D34).

The caller applies the batches, and has the socket and the clock. Spec: indexer.md 1.5.

A `_Gap` is what a replay should bring; it is there while one is due or running. A `_Replay` is
there from its request until the kept batches are applied. Its phase changes as follows; where a
cell is empty, the phase stays. A live restart of the engine, and RESTART, drop gap and replay; then
a gap from batch 0 on is due.

    call              none     ASKED            ANSWERING    CATCHING_UP
    connected         gap (1)  asks again (2)   (2)          (2)
    live, in order    apply    apply, keep      keep         keep
    live, not next    gap      gap, keep        keep         keep
    replay_started    ASKED (only with a gap)
    replayed                   ANSWERING                     (ignored)
    replay_finished            CATCHING_UP      CATCHING_UP               the gap ends (3)
    replay_failed              CATCHING_UP      CATCHING_UP               the gap stays, or is less
    cleared           no gap   none, no gap                  no gap
    next_held: None                                          none

(1) if the engine can replay; (2) after the replay, as (1); (3) but batches that were missed after
the request are a new gap."""

from collections import deque
from enum import Enum, auto

from xxhash import xxh3_64_intdigest

# Engines count from 0, some from 1. So a missing batch 0 does not count, if there is no replay
# endpoint or the replay does not contain it. At worst the blocks of one batch are unknown.
LATE_FIRST_SEQ = 1
UNSET_SEQ = 2**64 - 1  # stands for "no batch yet", even if a batch has this number

# Limits of the live batches that are kept during a replay. Above a limit the oldest are dropped,
# which leaves a gap to request again. The bytes are 1 s of events at 64 MB/s.
MAX_HELD = 100_000
MAX_HELD_BYTES = 64 * 1024 * 1024


class BatchVerdict(Enum):
    """What the caller must do with a batch of KV events."""

    APPLY = auto()
    IGNORE = auto()  # it was applied before
    HOLD = auto()  # it is kept: next_held() returns it later
    RESTART = auto()  # drop every block of this source; then, if live, apply the batch


class SourceState(Enum):
    """How complete the index is for one source (the KV-event publisher of a rank)."""

    CONNECTING = "connecting"  # nothing has arrived yet
    LIVE = "live"  # complete, as far as the engine reports
    REPLAYING = "replaying"  # a replay is due or running
    DEGRADED = "degraded"  # batches are missing, perhaps for good
    PARTIAL = "partial"  # complete from some batch on; the replay lacks the first batches
    NO_REPLAY = "no_replay"  # what was published before the connection is unknown
    SILENT = "silent"  # the engine has published nothing, according to its replay


class _Phase(Enum):
    ASKED = auto()  # no answer has arrived
    ANSWERING = auto()
    CATCHING_UP = auto()  # the replay has ended, and kept live batches are not applied yet


class _Gap:
    """The batches that a replay should bring."""

    __slots__ = ("before", "early_from", "missing", "proof", "start")

    def __init__(
        self,
        start: int,
        proof: int | None = None,
        early_from: int | None = None,
        missing: int = 0,
        before: int = 0,
    ) -> None:
        self.start = start  # the first batch to bring
        self.proof = proof  # digest of the batch before `start`, until it is compared
        self.early_from = early_from  # the first batch after `start` that was applied early, if any
        self.missing = missing  # batches known to be missing
        self.before = before  # how many of these come before the first known batch


class _Replay:
    """A replay, from its request until the batches kept meanwhile are applied."""

    __slots__ = ("digest", "early_end", "is_blind", "is_shown", "missing", "next", "phase")

    def __init__(self, next_seq: int, digest: int | None, missing: int) -> None:
        self.phase = _Phase.ASKED
        # As they were at the request:
        self.next = next_seq  # the next batch in order,
        self.digest = digest  # the digest of the batch before it,
        self.missing = missing  # and how many batches were missing
        self.is_blind = False  # when it answered, no batch after its start was known
        self.is_shown = False  # it has contained the newest applied batch, or starts after it
        self.early_end = 0  # batches before this may have been applied early; set by its answer


class KvCursor:
    """Tracks the batches of one KV-event source. Without `can_replay`, missing batches are lost."""

    def __init__(self, can_replay: bool) -> None:
        self.can_replay = can_replay
        self.gaps = 0
        self.replayed_batches = 0
        self.restarts = 0  # total
        # Batches that no replay can bring back, since the index last matched the engine.
        self.lost = 0
        self.unknown = 0  # missing batches before the first known one
        self.last_live: int | None = None  # number of the last live batch
        self.is_again = False  # the batch to apply now may already have been applied
        self._next = 0  # number of the next batch in order; 0 before the first batch
        self._digest: int | None = (
            None  # digest of the batch before `_next`; None: unknown or unusable
        )
        self._gap: _Gap | None = None
        self._replay: _Replay | None = None
        # The newest applied batch and its digest; a replay by the same publisher contains it too.
        # Set while the connection is new and no replay has contained the batch.
        self._top: tuple[int, int] | None = None
        self._holds_top = False
        self._newest = -1  # up to this, a live number comes from a new publisher
        self.copied_to = -1  # see is_copied
        self._has_answered = False  # a replay by this publisher has reached its end
        self._asks_again = False  # a new connection was made during a replay
        self._has_failed = False  # the last replay did not reach its end
        self.dropped = 0  # total kept live batches that were dropped because of the limits
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0

    @property
    def watermark(self) -> int | None:
        """The number of the batch that was applied last; None before the first batch."""
        return self._next - 1 if self._next else None

    @property
    def lag(self) -> int:
        """How many batches were published, as far as is known, but have not been applied."""
        kept_only = 0 if self._is_in_phase(_Phase.ASKED) else len(self._held)
        return kept_only if self._gap is None else self._gap.missing + kept_only

    def _is_in_phase(self, phase: _Phase) -> bool:
        return self._replay is not None and self._replay.phase is phase

    @property
    def held_bytes(self) -> int:
        """The total size of the live batches that are kept until a replay ends, in bytes."""
        return self._held_bytes

    @property
    def state(self) -> SourceState:
        gap = self._gap
        if self.lost or (self._has_failed and gap is not None and gap.missing > gap.before):
            return SourceState.DEGRADED
        if self._has_failed:
            return SourceState.NO_REPLAY
        if not self.is_settled:
            return SourceState.REPLAYING
        if self.unknown:
            return SourceState.PARTIAL if self.can_replay else SourceState.NO_REPLAY
        if self.last_live is None and not self._has_answered:
            return SourceState.CONNECTING
        return SourceState.LIVE if self.has_told else SourceState.SILENT

    @property
    def has_told(self) -> bool:
        """Whether a batch of this publisher was received, live or from a replay."""
        return self.last_live is not None or (self._has_answered and self._next > 0)

    @property
    def complete_to(self) -> int | None:
        """Number of the last applied batch; None if there is a gap or a replay is being applied."""
        is_in_order = self._replay is None or self._replay.phase is _Phase.ASKED
        has_gap = self._gap is not None and self._gap.missing > 0
        return self.watermark if is_in_order and not has_gap and not self.lost else None

    @property
    def replay_from(self) -> int | None:
        """Number of the first batch to replay: the last batch before the gap, because it shows
        whether the engine restarted, or batch 0 if the gap begins there. None: no replay is due."""
        if self._gap is None or self._replay is not None:
            return None
        return max(0, self._gap.start - 1)

    @property
    def is_settled(self) -> bool:
        """Whether no replay is due or running."""
        return self._gap is None and self._replay is None

    def resume_at(self, watermark: int, until: int = -1, unknown: int = 0) -> None:
        """Start with an index that contains the batches up to number `watermark` except the first
        `unknown` ones, and perhaps those up to `until`, as recovered from a peer. Call this before
        the socket connects.

        A live batch with a number up to `watermark` means that the engine was restarted."""
        assert self.last_live is None
        assert self._next == 0
        self._next = watermark + 1
        self._newest = watermark
        self.copied_to = until
        self.unknown = unknown

    @property
    def is_copied(self) -> bool:
        """Whether the blocks that a peer's dump showed may include the batch to apply now."""
        return self._next <= self.copied_to + 1

    def supersede(self) -> None:
        """Record that all blocks were dropped, because the replay that answers has all batches. The
        batches that were applied early are no longer in the index."""
        assert self._gap is not None
        self._gap.early_from = UNSET_SEQ

    def connected(self) -> None:
        """Record a new connection to the publisher. No batch of the connection may have come yet.

        A replay is now due, if the engine can replay, because batches that were published before
        the connection may be missing. From now on, a live batch with a number that was already
        received means that the engine was restarted."""
        self._holds_top = self._top is not None
        if self._replay is not None:
            self._asks_again = self.can_replay
            return
        self._newest = max(self._newest, self._next - 1)
        self._ask()

    def _ask(self) -> None:
        if self.can_replay and self._gap is None:
            start, proof = self._next, self._digest
            if self._holds_top and self._top is not None and self._top[0] < self._next:
                start, proof = self._top[0] + 1, self._top[1]
            self._gap = _Gap(start, proof, start if start < self._next else None)

    def live(self, seq: int, payload: bytes) -> BatchVerdict:
        """Decide what to do with a live batch (not a replayed one). `seq`: from 0 to 2**64 - 1."""
        self.is_again = False
        if seq == UNSET_SEQ:
            self._start_over()
            return BatchVerdict.APPLY
        is_restart = seq <= self._newest
        if is_restart:
            self._restarted()
        self.last_live = self._newest = seq
        if self._replay is not None:
            self._hold(seq, payload)
            if self._replay.phase is not _Phase.ASKED:
                return BatchVerdict.HOLD
        if seq < self._next:
            return BatchVerdict.IGNORE
        self._advance(seq, payload)
        has_gap = self._gap is not None and self._gap.missing > 0
        if self._has_failed and not has_gap and self._replay is None and not self._holds_top:
            self._gap = None  # no replay runs and nothing is missing
            self._has_failed = False
        return BatchVerdict.RESTART if is_restart else BatchVerdict.APPLY

    def replay_started(self) -> None:
        """Record that a replay from `replay_from` on is about to be requested."""
        assert self._gap is not None
        assert self._replay is None
        self._replay = _Replay(self._next, self._digest, self._gap.missing)

    def replayed(self, seq: int, payload: bytes) -> BatchVerdict:
        """Decide what to do with a batch of a replay: APPLY (perhaps the batch was applied live
        before), IGNORE or RESTART. After RESTART, drop all blocks of this source, abort the replay,
        and request a new replay from `replay_from` on."""
        replay, gap = self._replay, self._gap
        if replay is None or gap is None or replay.phase is _Phase.CATCHING_UP:
            return BatchVerdict.IGNORE
        if replay.phase is _Phase.ASKED:
            replay.phase = _Phase.ANSWERING
            replay.is_blind = self._next == gap.start
            replay.early_end = self._next
            self._next, self._digest = gap.start, gap.proof
        if not self._next - 1 <= seq < UNSET_SEQ:
            return BatchVerdict.IGNORE
        proof, gap.proof = gap.proof, None
        digest = xxh3_64_intdigest(payload)
        if seq < self._next and proof is not None and proof != digest:
            return self._replaced(replay)
        top, top_digest = (-1, None) if self._top is None else self._top
        if seq == top:
            if digest != top_digest:  # the live batches came from another publisher
                return self._begins_anew()
            self._has_shown_top(replay)
        if seq < self._next:
            return BatchVerdict.IGNORE
        # The engine's buffer may no longer have the batches to compare.
        is_in_doubt = proof is not None or (seq > top >= 0 and not replay.is_shown)
        if seq > top:
            self._has_shown_top(replay)
        heard = max(0, min(seq, top + 1) - self._next)  # already applied, except the gaps
        gone = min(heard, gap.missing) + seq - self._next - heard
        if self._next:
            self.lost += max(gone, is_in_doubt)
        else:  # batches missed after the first known one are lost
            before = gone if top < 0 else min(gone, gap.before)
            self.lost += max(gone - before, is_in_doubt)
            self.unknown = before if seq != LATE_FIRST_SEQ else 0
        early_from = replay.early_end if gap.early_from is None else gap.early_from
        self.is_again = early_from <= seq < replay.early_end
        self._applied(seq, digest)
        self.replayed_batches += 1
        return BatchVerdict.APPLY

    def replay_finished(self) -> BatchVerdict:
        """Record that a replay has ended. Batches that were requested but not replayed are lost.
        Returns IGNORE (apply each batch that next_held() returns) or RESTART (see `replayed`)."""
        replay, gap = self._replay, self._gap
        assert replay is not None
        assert gap is not None
        since = 0  # missing batches after the request, which the replay may lack
        if replay.phase is _Phase.ASKED:
            since = gap.missing - replay.missing
            if gap.start == 0:
                self.unknown = min(replay.missing, gap.before)
                self.lost += replay.missing - self.unknown
            elif replay.next == gap.start or (self._holds_top and not self._asks_again):
                # The engine lacks even the batch that we already have.
                return self._begins_anew()
            else:
                self.lost += replay.missing
        elif self._next < replay.next:
            # The replay ended before a batch that we know, so that batch was not applied in order.
            self.lost += replay.next - self._next
        self._end_replay(replay, complete=True)
        if since:
            before = 0 if replay.next else gap.before
            self._gap = _Gap(replay.next, replay.digest, replay.next, since, before)
        return BatchVerdict.IGNORE

    def replay_failed(self) -> None:
        """Record that a replay got no answer, or stopped early. The caller must then apply each
        batch that next_held() returns, and retry the replay later unless `replay_from` is None."""
        replay, gap = self._replay, self._gap
        assert replay is not None
        assert gap is not None
        answered = replay.phase is _Phase.ANSWERING
        if answered and (replay.is_blind or self._next < replay.next):
            missing = min(gap.missing, max(0, replay.next - self._next))
            self._gap = _Gap(self._next, self._digest, self._next, missing)
            self._holds_top = self._top is not None  # the kept batches follow it
            answered = False
        self._end_replay(replay, complete=answered)  # perhaps only the end marker is missing

    def replay_interrupted(self) -> bool:
        """Record that the caller aborted a replay. Returns whether next_held() must now be called
        (until it returns None), because live batches may have been kept."""
        if self._replay is not None and self._replay.phase is not _Phase.CATCHING_UP:
            self.replay_failed()
        return self._replay is not None

    def shed(self, size: int) -> None:
        """Drop the oldest live batches that are kept during a replay, until `size` bytes are freed.
        Keeps the newest batch, because its number shows which batches must be requested again."""
        goal = self._held_bytes - size
        while len(self._held) > 1 and self._held_bytes > goal:
            self._held_bytes -= len(self._held.popleft()[1])
            self.dropped += 1

    def next_held(self) -> bytes | None:
        """Return the next batch to apply of those kept during a replay; None after the last."""
        while self._held:
            seq, payload = self._held.popleft()
            self._held_bytes -= len(payload)
            if seq >= self._next:
                self.is_again = self._replay is not None and seq < self._replay.early_end
                self._advance(seq, payload)
                return payload
        self._replay = None
        if self._asks_again:
            self._asks_again = False
            self._ask()
        return None

    def cleared(self) -> None:
        """Record that the batch applied last cleared all blocks. Older gaps no longer matter."""
        self.lost = self.unknown = 0
        was_asked = self._is_in_phase(_Phase.ASKED)
        if self._replay is None or was_asked:
            self._holds_top = False  # it came before the clearing batch, too
            if self._next and self._digest is not None:
                self._top = self._next - 1, self._digest
        if not self._is_in_phase(_Phase.ANSWERING):
            self._gap = None
            self._has_failed = False
        if was_asked:
            self._replay = None
            self._asks_again = False
            self._drop_held()

    def lose(self) -> None:
        """Count a batch as lost, because the caller cannot decode it."""
        self.lost += 1

    def _advance(self, seq: int, payload: bytes) -> None:
        size = seq - self._next
        if self.can_replay:
            if size:
                self.gaps += 1
                if self._gap is None:
                    self._gap = _Gap(self._next, self._digest, seq)
                if not self._next:
                    self._gap.before = size
                self._gap.missing += size
            if self._gap is not None and self._gap.early_from is None:
                self._gap.early_from = seq
            self._applied(seq, xxh3_64_intdigest(payload))
            return
        if size and (self._next or seq != LATE_FIRST_SEQ):
            self.gaps += 1
            if self._next:
                self.lost += size
            else:
                self.unknown = size
        self._next = seq + 1

    def _has_shown_top(self, replay: _Replay) -> None:
        """Record that this replay has reached or passed `_top`, a batch that was applied before.
        If a new connection was made meanwhile, the next replay must reach `_top`, too."""
        replay.is_shown = True
        self._holds_top = self._holds_top and self._asks_again

    def _applied(self, seq: int, digest: int) -> None:
        self._next, self._digest = seq + 1, digest
        if self._top is None or (seq >= self._top[0] and not self._holds_top):
            self._top = seq, digest

    def _replaced(self, replay: _Replay) -> BatchVerdict:
        """Handle a replayed batch that differs from the applied one: the publisher is a new one.
        All batches of the new publisher are missing, because the caller drops all blocks."""
        newest = None if replay.is_blind else self.last_live
        verdict = self._begins_anew()
        if newest is not None:
            self.last_live = self._newest = newest
            self._next = newest + 1
            self._gap = _Gap(0, missing=self._next, before=self._next)
        return verdict

    def _begins_anew(self) -> BatchVerdict:
        """Handle a replay that shows that the publisher is a new one, whose batches all miss."""
        self._restarted()
        self._gap = _Gap(0)
        return BatchVerdict.RESTART

    def _restarted(self) -> None:
        self.restarts += 1
        self.lost = 0
        self._start_over()

    def _hold(self, seq: int, payload: bytes) -> None:
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        while len(self._held) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
            self._held_bytes -= len(self._held.popleft()[1])
            self.dropped += 1

    def _end_replay(self, replay: _Replay, complete: bool) -> None:
        if complete:
            self._gap = None
            self._has_failed = False
            self._has_answered = True
        else:
            self._has_failed = True
        # Batches that were applied live before the request need not be applied again.
        if self._next < replay.next:
            self._next, self._digest = replay.next, replay.digest
        replay.phase = _Phase.CATCHING_UP
        if self._asks_again:  # the replay's batches may be from the former publisher
            self._ask()

    def _start_over(self) -> None:
        """Forget all batches of this source. Only the totals and `lost` remain."""
        self.last_live = None
        self.unknown = 0
        self._newest = self.copied_to = -1
        self._has_answered = self._asks_again = False
        self._next = 0
        self._digest = None
        self._gap = self._replay = self._top = None
        self._holds_top = False
        self._has_failed = False
        self._drop_held()

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0
