"""`--decision-log PATH`: the choice and the outcome of each request.

`lean-selector simulate` and `replay` read this file; its format is in wire/decision_lines.py. The
file has no tokens and no text: a prompt is represented by one hash per 512 tokens. When a request
ends, its line is queued for a writing thread. When the file reaches a given size, it is renamed to
PATH.1, which replaces an older PATH.1."""

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from zlib import crc32

import msgspec

from lean_selector.api.logs import LineWriter
from lean_selector.app.host import StartError
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.replication.ledger import LifecycleEvents, ReplicaTarget
from lean_selector.core.selection.overlap import MatchSets, match_of
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.reservations import LEG
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.shapes import Placement, SelectionRequest
from lean_selector.parts import Part
from lean_selector.wire.decision_lines import (
    SPAN_TOKENS,
    VERSION,
    DecisionLine,
    LogHeader,
)
from lean_selector.wire.exposition import Families, table

if TYPE_CHECKING:
    from lean_selector.app.selector_parts import SelectorCore

MOST_BYTES = 512 << 20  # of the file; an older one beside it takes as much
_TOGETHER = 64  # lines per hand-over: waking the thread costs more than writing a line
_MOST_WAITING_BYTES = 16 << 20
_FLUSH_S = 5.0
_log = logging.getLogger("lean_selector.decisions")
_encoder = msgspec.json.Encoder()


def span_ids(sequence_hashes: bytes, block_size: int) -> list[int]:
    """Return one id for each span of a prompt. A span has SPAN_TOKENS tokens; the last span may
    have fewer. Prompts with the same first tokens have the same first ids. An id is made of 32 bits
    of the sequence hash of the block in which the span ends."""
    words = memoryview(sequence_hashes).cast("I")[1::2]  # the upper halves
    blocks = len(words)
    spans = -(-blocks * block_size // SPAN_TOKENS)
    if SPAN_TOKENS % block_size:  # one large block may end several spans
        ends = (min(-(-span * SPAN_TOKENS // block_size), blocks) for span in range(1, spans + 1))
        return [(words[end - 1] + span) % 2**32 for span, end in enumerate(ends)]
    each = SPAN_TOKENS // block_size
    ids: list[int] = words[each - 1 :: each].tolist()
    if len(ids) < spans:
        ids.append(words[-1])
    return ids


def header_of(settings: RouterSettings, share: float) -> bytes:
    """Return a log's first line: the logged share of requests, and the non-default settings."""
    default = RouterSettings()
    names = (name for name in settings.__struct_fields__ if name not in ("dialect", "sessions"))
    given = {name: getattr(settings, name) for name in names}
    plain = {
        name: value
        for name, value in given.items()
        if value != getattr(default, name) and not isinstance(value, msgspec.Struct)
    }
    return _encoder.encode(LogHeader(VERSION, share, plain)) + b"\n"


class RotatingFile(LineWriter):
    """A log file that is renamed, and begun anew with a header, before it exceeds a size limit."""

    def __init__(self, path: str, most_bytes: int, header: bytes) -> None:
        """Opens the file for appending. Raises OSError."""
        self._path = path
        self._most_bytes = most_bytes
        self._header = header
        self.failed = 0  # lines that could not be written
        descriptor = self._open()
        self._size = os.fstat(descriptor).st_size
        super().__init__(descriptor, _MOST_WAITING_BYTES)
        os.write(descriptor, header)
        self._size += len(header)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _write_all(self, data: bytes) -> None:
        try:
            if self._size + len(data) > self._most_bytes and self._size > len(self._header):
                self._rotate()
            self._write_whole(data)
        except OSError:  # a failing log must not stop the service
            self.failed += data.count(b"\n")

    def _rotate(self) -> None:
        os.rename(self._path, f"{self._path}.1")
        descriptor, self._descriptor = self._descriptor, self._open()
        os.close(descriptor)
        self._size = 0
        self._write_whole(self._header)

    def _write_whole(self, data: bytes) -> None:
        """Writes all of `data`. If writing fails, removes the part that was written and raises
        OSError, so that the file has only whole lines."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)


class DecisionLog(Part):
    """Writes the decision log. Callers report each choice, and each change of a reservation. The
    constructor's `then` also gets the changes. Requests without block hashes are not logged."""

    def __init__(
        self,
        path: str,
        share: float,
        settings: RouterSettings,
        then: LifecycleEvents | None,
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """`share` is the fraction of requests to log, sampled by request id. `clock` must be the
        clock that sets `Reservation.touched_at`. At `most_bytes` the file is renamed to PATH.1,
        replacing an older one. Opens the file to append. Raises StartError."""
        try:
            self._file = RotatingFile(path, most_bytes, header_of(settings, share))
        except OSError as error:
            raise StartError(f"--decision-log: cannot write {path}: {error.strerror}") from error
        self._share = share
        self._then = then
        self._clock = clock
        self._epoch_s = time.time() - clock()
        self._chosen: tuple[str, DecisionLine] | None = None  # until it is reserved
        self._chosen_among: tuple[Partition, MatchSets] | None = None
        self._begun: dict[str, DecisionLine] = {}  # by reservation id
        self._ended: list[DecisionLine] = []  # not yet handed to the thread
        # Matches by reservation id; kept only if an access log may name another rank than the
        # chosen one.
        self.keeps_matches = False
        self._matches: dict[str, tuple[Partition, MatchSets]] = {}
        self.requests = 0

    # -- choices -----------------------------------------------------------------------------------

    def chosen(
        self,
        partition: Partition,
        request: SelectionRequest,
        matches: MatchSets,
        placement: Placement,
    ) -> None:
        """Keeps a choice until its rank is reserved."""
        if self._share < 1.0 and not self._is_drawn(request.reservation_id):
            return
        tokens = request.prompt.isl_tokens
        line = DecisionLine(0.0, tokens, 0, [])
        line.cached = max(0, tokens - placement.effective_prefill_tokens)
        if request.waited_s:
            line.waited_ms = round(request.waited_s * 1e3, 3)
        if request.pinned is not None:
            line.pinned = True
        allowed = request.allowed_worker_ids
        if allowed is not None or request.required_taints:
            line.allowed = sorted(
                worker_id
                for worker_id, worker in partition.workers.items()
                if (allowed is None or worker_id in allowed)
                and request.required_taints <= worker.taints
            )
        self._chosen = request.reservation_id, line
        self._chosen_among = partition, matches

    def reported(
        self, reservation_id: str, ttft_s: float | None, cached_tokens: int | None
    ) -> None:
        """Adds the TTFT, and the number of tokens that the engine had cached, to a log line."""
        line = self._begun.get(reservation_id)
        if line is not None:
            if ttft_s is not None:
                line.ttft_ms = round(ttft_s * 1e3 + line.waited_ms, 3)
            if cached_tokens is not None:
                line.engine_cached = cached_tokens

    def served(
        self,
        reservation_id: str,
        worker_id: int | None,
        dp_rank: int | None,
        ttft_s: float | None,
    ) -> None:
        """Records which worker served a request, according to a gateway's access log."""
        line = self._begun.get(reservation_id)
        if line is None:
            return
        self.reported(reservation_id, ttft_s, None)
        key = worker_id, dp_rank or 0
        if worker_id is None or key == (line.worker, line.rank):
            return
        line.selected, (line.worker, line.rank), line.cached = line.worker, key, None
        partition, matches = self._matches.get(reservation_id, (None, []))
        load = None if partition is None else partition.slots.ranks.get((worker_id, dp_rank or 0))
        if partition is not None and load is not None:
            held = match_of(matches, load.mask).device * partition.block_size
            line.cached = min(held, line.input_length)

    # -- what the ledgers do -----------------------------------------------------------------------

    def booked(
        self, target: ReplicaTarget, reservation: Reservation, sequence_hashes: bytes
    ) -> None:
        if self._then is not None:
            self._then.booked(target, reservation, sequence_hashes)
        reservation_id, size = reservation.request_id, target.block_size
        chosen, self._chosen = self._chosen, None
        if reservation_id.endswith(LEG):
            whole = self._begun.get(reservation_id.removesuffix(LEG))
            if whole is not None:
                whole.prefill_worker, whole.prefill_rank = reservation.rank_load.key
                whole.cached = max(0, whole.input_length - reservation.prefill_tokens)
            return
        if not sequence_hashes:
            return
        if chosen is not None and chosen[0] == reservation_id:
            line = chosen[1]
            if self.keeps_matches and self._chosen_among is not None:
                self._matches[reservation_id] = self._chosen_among
        elif self._is_drawn(reservation_id):
            line = DecisionLine(0.0, len(sequence_hashes) // 8 * size, 0, [])
        else:
            return
        line.hash_ids = span_ids(sequence_hashes, size)
        # If the last block has no hash, or the given length is wrong, log the part with hashes.
        line.input_length = max(1, min(line.input_length, len(line.hash_ids) * SPAN_TOKENS))
        at_ms = (self._epoch_s + reservation.touched_at) * 1e3
        line.timestamp = round(at_ms - line.waited_ms, 3)
        line.model, line.tenant = target.model_name, target.tenant_id
        line.worker = reservation.rank_load.worker_id
        line.rank = reservation.rank_load.dp_rank
        self._begun[reservation_id] = line

    def prefill_completed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        if self._then is not None:
            self._then.prefill_completed(target, reservation)
        line = self._begun.get(reservation.request_id)
        if line is not None:
            line.prefill_ms = self._since(line, reservation.touched_at)

    def kept_alive(self, target: ReplicaTarget, reservation: Reservation) -> None:
        if self._then is not None:
            self._then.kept_alive(target, reservation)

    def freed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        if self._then is not None:
            self._then.freed(target, reservation)
        line = self._begun.pop(reservation.request_id, None)
        self._matches.pop(reservation.request_id, None)
        if line is not None:
            line.output_length = reservation.output_blocks * target.block_size
            line.ended_ms = self._since(line, self._clock())
            self._ended.append(line)
            if len(self._ended) >= _TOGETHER:
                self.hand_over()

    def _is_drawn(self, reservation_id: str) -> bool:
        return crc32(reservation_id.encode()) < self._share * 2**32

    def _since(self, line: DecisionLine, now: float) -> float:
        return round((self._epoch_s + now) * 1e3 - line.timestamp, 3)

    # -- the log itself ----------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Passes the lines of ended requests to the writing thread. Call it periodically."""
        lines, self._ended = self._ended, []
        if lines and self._file.write_lines(_encoder.encode_lines(lines), len(lines)):
            self.requests += len(lines)

    def tick(self, now: float) -> None:
        self.hand_over()

    def families(self) -> Families:
        file = self._file
        return table({
            "decision_log_requests_total": (lambda: self.requests,
                "Requests written to the decision log."),
            "decision_log_dropped_total": (lambda: file.dropped + file.failed,
                "Requests whose line was dropped: the disk was too slow, or failed."),
        })  # fmt: skip

    def close(self) -> None:
        """Writes the pending lines. Waits for the writing thread a few seconds at most."""
        self.hand_over()
        self._file.flush(_FLUSH_S)
        dropped = self._file.dropped + self._file.failed
        _log.info("decision log closed", extra={"requests": self.requests, "dropped": dropped})


def selector_log(core: "SelectorCore", path: str) -> DecisionLog:
    """Creates the decision log of a selector, which has no workers yet. Raises StartError."""
    config, ledgers = core.config, core.selector.ledgers
    log = DecisionLog(path, config.decisions.share, config.settings, ledgers.events)
    log.keeps_matches = bool(config.access_logs.addresses)
    ledgers.events = core.selector.reservations.decisions = log
    return log
