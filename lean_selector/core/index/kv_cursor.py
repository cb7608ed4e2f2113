"""Track the batch numbers of one source (an engine's KV-event publisher): gaps, replays, restarts.

An engine publishes its cache changes as numbered batches on a PUB socket. Such a socket neither
repeats nor reorders messages, but it drops them: when a queue is full, while the connection is
broken, and before anybody has connected. One lost `removed` leaves a block in the index for ever,
one lost `stored` hides all blocks below it. Most engines therefore have a second socket, which
replays the newest batches from a given number on. This class tells its caller, who has the sockets
and the clock and applies the batches, what to do with each of them. Spec: indexer.md 1.5.

A batch is missing if a live number is not the next one. It is applied at once, early, because a
replay endpoint may never answer, and a hole remains. A replay is then due. It contains all batches
from the requested one to the engine's newest, so it brings the missing batches late, and the early
ones again. Which is which is told by the holes, not by where the gap began: among the early batches
others may be missing, and a replay that stops on the way fills some holes and leaves others. What
the caller must do with a batch that comes early, late or again is in out_of_turn.py. Live batches
that come before the replay's first answer are applied, and kept too; after it they are only kept.
When the replay ends, those that it did not bring are applied.

An engine may restart, and its numbers and its cache with it. A live number that does not grow is a
restart, since nothing is repeated. But the first number that we see of the new engine may also be
higher than our last one, which looks like a gap. So a replay is requested from the batch before the
gap on. If the engine has another batch under that number (we keep a digest), or, after a new
connection, none from there on, it is a new one. At a restart all blocks are dropped, a replay that
runs is given up with what was kept for it, and everything is requested; a live batch that shows the
restart is applied at once. The newest batch before the last connection is compared too, because the
batch before the gap may be of the new engine. If the engine's buffer has neither, batches may be
missing, and the source is degraded. Without a replay endpoint such a restart looks like a gap, or,
if the next number happens to fit, like nothing.

After each new connection a replay is requested from our last batch on, even if there is no gap,
because an idle engine publishes nothing (D34).

Tried, and given up: to wait for the replay with all that is live (1.5 s stale at each loss, and for
ever if it is cut off again and again); to apply early batches twice and let a store that comes
again count once (a removal that comes again takes a copy that is still there); to remember the
early ones as an interval (a hole in it is then taken for applied).

The states: idle; due, if there is a `_Gap`, which is what a replay should bring; and the phases of
a `_Replay`, from its request until the kept batches are applied. An empty cell changes nothing, `-`
is not called. A batch that is applied or held is the next one in order, or a later one.

    call             idle          due           ASKED             ANSWERING     CATCHING_UP
    connected        due                         again             again         again
    live, next       apply         apply         apply, kept       hold          hold
    live, later      apply, due    apply         apply, kept       hold          hold
    live, older      restart, due  restart, due  restart, due      restart, due  restart, due
    replay_started   -             ASKED         -                 -             -
    replayed, next   ignore        ignore        apply, ANSWERING  apply         ignore
    replayed, other  ignore        ignore        restart, due      restart, due  ignore
    replay_finished  -             -             CATCHING_UP       CATCHING_UP   -
    replay_failed    -             -             CATCHING_UP       CATCHING_UP   -
    next_held, last  -             -             -                 -             idle
    cleared                        idle          idle

`older`: a number that does not grow; after its batch 0 nothing is missing, and the state is idle. A
higher one that a replay has brought already is ignored. If the end of a replay shows a restart, the
state is due. `again`: a further replay is due after this one. After a replay that failed, or that
missed batches which the engine published after the request, the last `next_held` leaves `due`.
`other` is a batch that differs from the one that was applied under its number. `cleared` is the
clear of a batch that was just applied: what was missing before it no longer matters."""

from collections import deque
from enum import Enum, auto

from xxhash import xxh3_64_intdigest

from lean_selector.core.index.out_of_turn import Turn

# Engines count from 0, some from 1. So a missing batch 0 does not count, if there is no replay
# endpoint or the replay does not contain it. At worst the blocks of one batch are unknown.
LATE_FIRST_SEQ = 1
UNSET_SEQ = 2**64 - 1  # stands for "no batch yet", even if a batch has this number

# Limits of the live batches that are kept during a replay. Above a limit the oldest are dropped,
# which leaves a gap to request again. The bytes are 1 s of events at 64 MB/s.
MAX_HELD = 100_000
MAX_HELD_BYTES = 64 * 1024 * 1024
# Limit of the gaps of a source whose replay fails. Above it, the batches of the oldest are lost.
MAX_HOLES = 1024


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
    """What a replay should bring: all batches from `start` on."""

    def __init__(self, start: int, proof: int | None = None, is_begun: bool = False) -> None:
        self.start = start
        self.proof = proof  # digest of the batch before `start`, until it is compared
        # A replay has stopped on the way: of batches that were applied early, parts may be missing.
        self.is_begun = is_begun


class _Replay:
    """A replay, from its request until the batches kept meanwhile are applied."""

    def __init__(self, next_seq: int, digest: int | None) -> None:
        self.phase = _Phase.ASKED
        # As they were at the request:
        self.next = next_seq  # the next batch in order,
        self.digest = digest  # and the digest of the batch before it
        self.is_blind = False  # when it answered, no batch after its start was known
        self.is_shown = False  # it has contained the newest applied batch, or starts after it


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
        self.turn = Turn.IN_ORDER  # of the batch to apply now
        self._next = 0  # number of the next batch in order; 0 before the first batch; a replay
        # takes it back
        # Every batch before `_end` was applied, in its turn or early, but for the holes: ranges
        # (first missing batch, next one that was applied), in order.
        self._end = 0
        self._holes: list[tuple[int, int]] = []
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
        self._held: deque[tuple[int, bytes]] = deque()  # live batches, kept until a replay ends
        self.held_bytes = 0

    @property
    def watermark(self) -> int | None:
        """The number of the batch that was applied last; None before the first batch."""
        return self._next - 1 if self._next else None

    @property
    def lag(self) -> int:
        """How many batches were published, as far as is known, but have not been applied."""
        kept_only = 0 if self._is_in_phase(_Phase.ASKED) else len(self._held)
        return self._missing() + kept_only

    def _missing(self, end: int = UNSET_SEQ) -> int:
        """Return how many batches before `end` are known to be missing."""
        return sum([min(to, end) - start for start, to in self._holes if start < end])

    @property
    def _missing_first(self) -> int:
        """How many batches are missing before the first known one."""
        return self._holes[0][1] if self._holes and not self._holes[0][0] else 0

    def _is_in_phase(self, phase: _Phase) -> bool:
        return self._replay is not None and self._replay.phase is phase

    @property
    def state(self) -> SourceState:
        is_begun = self._gap is not None and self._gap.is_begun
        is_missing = is_begun or self._missing() > self._missing_first
        if self.lost or (self._has_failed and is_missing):
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
        is_begun = self._gap is not None and self._gap.is_begun
        is_complete = is_in_order and not self._holes and not is_begun and not self.lost
        return self.watermark if is_complete else None

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
        self._next = self._end = watermark + 1
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
        self._set_hole(self._gap.start, self._end)

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
            self._gap = _Gap(start, proof)

    def live(self, seq: int, payload: bytes) -> BatchVerdict:
        """Decide what to do with a live batch (not a replayed one). `seq`: from 0 to 2**64 - 1."""
        if seq == UNSET_SEQ:
            self._start_over()
            self.turn = Turn.IN_ORDER
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
        if self._has_failed and not self._holes and self._replay is None and not self._holds_top:
            self._gap = None  # no replay runs and nothing is missing
            self._has_failed = False
        return BatchVerdict.RESTART if is_restart else BatchVerdict.APPLY

    def replay_started(self) -> None:
        """Record that a replay from `replay_from` on is about to be requested."""
        assert self._gap is not None
        assert self._replay is None
        self._replay = _Replay(self._next, self._digest)

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
        gone = self._missing(seq) + max(0, seq - max(self._next, self._end))
        if self._next:
            self.lost += max(gone, is_in_doubt)
        else:  # batches missed after the first known one are lost
            before = gone if top < 0 else min(gone, self._missing_first)
            self.lost += max(gone - before, is_in_doubt)
            self.unknown = before if seq != LATE_FIRST_SEQ else 0
        self._fill(seq)
        self._end = max(self._end, seq)  # what the replay lacks is lost, not missing
        self._take(seq)
        self._applied(seq, digest)
        self.replayed_batches += 1
        return BatchVerdict.APPLY

    def replay_finished(self) -> BatchVerdict:
        """Record that a replay has ended. Batches that were requested but not replayed are lost.
        Return IGNORE (apply each batch that next_held() returns) or RESTART (see `replayed`)."""
        replay, gap = self._replay, self._gap
        assert replay is not None
        assert gap is not None
        missing = self._missing(replay.next)  # not what was missed after the request
        if replay.phase is _Phase.ASKED:
            if gap.start == 0:
                self.unknown = min(missing, self._missing_first)
                self.lost += missing - self.unknown
            elif replay.next == gap.start or (self._holds_top and not self._asks_again):
                # The engine lacks even the batch that we already have.
                return self._begins_anew()
            else:
                self.lost += missing
        elif self._next < replay.next:
            # The replay ended before a batch that we know, so that batch was not applied in order.
            self.lost += replay.next - self._next
        self._fill(replay.next)
        is_due = replay.phase is _Phase.ASKED and len(self._holes) > 0
        self._end_replay(replay, complete=True)
        if is_due:
            self._gap = _Gap(replay.next, replay.digest)
        return BatchVerdict.IGNORE

    def replay_failed(self) -> None:
        """Record that a replay got no answer, or stopped early. The caller must then apply each
        batch that next_held() returns, and retry the replay later unless `replay_from` is None."""
        replay = self._replay
        assert replay is not None
        answered = replay.phase is _Phase.ANSWERING
        if answered and (replay.is_blind or self._next < replay.next):
            self._gap = _Gap(self._next, self._digest, is_begun=True)
            self._holds_top = self._top is not None  # the kept batches follow it
            answered = False
        self._end_replay(replay, complete=answered)  # perhaps only the end marker is missing

    def replay_interrupted(self) -> bool:
        """Record that the caller aborted a replay. Return whether next_held() must now be called
        (until it returns None), because live batches may have been kept."""
        if self._replay is not None and self._replay.phase is not _Phase.CATCHING_UP:
            self.replay_failed()
        return self._replay is not None

    def shed(self, size: int) -> None:
        """Drop the oldest live batches that are kept during a replay, until `size` bytes are freed.
        Keeps the newest batch, because its number shows which batches must be requested again."""
        goal = self.held_bytes - size
        while len(self._held) > 1 and self.held_bytes > goal:
            self.held_bytes -= len(self._held.popleft()[1])
            self.dropped += 1

    def next_held(self) -> bytes | None:
        """Return the next batch to apply of those kept during a replay; None after the last."""
        while self._held:
            seq, payload = self._held.popleft()
            self.held_bytes -= len(payload)
            if seq >= self._next:
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
        self._holes.clear()
        if self._is_in_phase(_Phase.ANSWERING):  # the early ones of those to come are gone, too
            self._set_hole(self._next, self._end)
        else:
            self._gap = None
            self._has_failed = False
        if was_asked:
            self._replay = None
            self._asks_again = False
            self._drop_held()

    def lose(self, is_missing: bool = False) -> None:
        """Count the batch applied last as lost, because the caller cannot decode it. If it
        `is_missing`, a replay that is due brings it once more."""
        self.lost += 1
        if is_missing and self.turn is Turn.EARLY:
            self._holes.append((self._end - 1, self._end))

    def _advance(self, seq: int, payload: bytes) -> None:
        size = seq - self._next
        if self.can_replay:
            if seq > self._end:
                self.gaps += 1
                self._holes.append((self._end, seq))
                if len(self._holes) > MAX_HOLES:
                    start, end = self._holes.pop(0)
                    self.lost += end - start
            if size and self._holes and self._gap is None:
                self._gap = _Gap(self._next, self._digest)
            self._take(seq)
            self._applied(seq, xxh3_64_intdigest(payload))
            return
        if size and (self._next or seq != LATE_FIRST_SEQ):
            self.gaps += 1
            if self._next:
                self.lost += size
            else:
                self.unknown = size
        self._next = seq + 1

    def _take(self, seq: int) -> None:
        """Set the turn of a batch that is about to be applied, and record that it was applied."""
        if seq >= self._end:
            self.turn = Turn.EARLY if self._holes else Turn.IN_ORDER
            self._end = seq + 1
            return
        self.turn = Turn.AGAIN
        for at, (start, end) in enumerate(self._holes):
            if start <= seq < end:
                self.turn = Turn.LATE
                self._holes[at : at + 1] = [
                    part for part in ((start, seq), (seq + 1, end)) if part[0] < part[1]
                ]
                break

    def _fill(self, end: int) -> None:
        """Miss no batch before `end` any longer."""
        self._holes = [(max(start, end), to) for start, to in self._holes if to > end]

    def _set_hole(self, start: int, end: int) -> None:
        """Miss the batches from `start` to before `end`, and no others."""
        self._holes = [(start, end)] if start < end else []

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
            self._next = self._end = newest + 1
            self._set_hole(0, self._end)
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
        self.held_bytes += len(payload)
        while len(self._held) > MAX_HELD or self.held_bytes > MAX_HELD_BYTES:
            self.held_bytes -= len(self._held.popleft()[1])
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
        self._next = self._end = 0
        self._holes.clear()
        self._digest = None
        self._gap = self._replay = self._top = None
        self._holds_top = False
        self._has_failed = False
        self._drop_held()

    def _drop_held(self) -> None:
        self._held.clear()
        self.held_bytes = 0
