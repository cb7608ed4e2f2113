"""Apply the KV-event batches of one source to the index: one at a time, in order, in time slices.

A small, ordinary batch is applied at once. A large or unusual batch is decoded and applied in
bounded slices, and completed before the next batch starts. See decision D25."""

import logging
import time
from collections.abc import Callable, Iterator

from lean_selector.core.hashing import IS_COMPILED
from lean_selector.core.index.kv_cursor import KvCursor
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.out_of_turn import Delivery, Turn
from lean_selector.core.index.shapes import EventBatch
from lean_selector.wire.kv_events import (
    MAX_BATCH_BYTES,
    WINDOW_BYTES,
    NotABatch,
    batch_slices,
    decode_small,
    one_by_one,
)

# Decodes ordinary batches in the compiled form. `decode_small` and `batch_slices` decode all other
# batches, and in the interpreted form every batch.
Reader = Callable[[bytes], EventBatch | None]
_READER: Reader | None = None
if IS_COMPILED:
    from lean_selector.wire.packed_events import packed_batch

    _READER = packed_batch

Report = Callable[[str, int, str], None]  # arguments: kind of line, level, text


class BatchWork:
    """Applies one batch of KV events at a time. Bad data from an engine raises no exception."""

    def __init__(
        self,
        ingest: KvIngest,
        cursor: KvCursor,
        report: Report,
        reader: Reader | None = _READER,
    ) -> None:
        self.slices = 0  # total events applied in slices
        self._ingest = ingest
        self._cursor = cursor
        self._report = report
        self._reader = reader
        self._rest: Iterator[EventBatch] | None = None
        self._is_lost = False  # the current batch was reported to the cursor as lost
        self._delivery = Delivery(0, Turn.IN_ORDER, is_copied=False)  # of the current batch

    @property
    def is_under_way(self) -> bool:
        """Whether a batch is only partly applied."""
        return self._rest is not None

    def take(self, payload: bytes) -> None:
        """Start a batch. Then call `go_on` while `is_under_way` is true."""
        assert self._rest is None, "batches are applied in order"
        self._is_lost = False
        cursor, early = self._cursor, self._ingest.out_of_turn
        self._delivery = Delivery(cursor.watermark or 0, cursor.turn, cursor.is_copied)
        if cursor.turn is Turn.AGAIN and not early.has_left(self._delivery.seq):
            return
        if len(payload) > MAX_BATCH_BYTES:
            self._lose_all("oversize", f"it has more than {MAX_BATCH_BYTES} bytes")
            return
        if self._reader is not None and (packed := self._reader(payload)) is not None:
            if len(payload) <= WINDOW_BYTES:
                self._apply(packed)
            else:
                self._rest = one_by_one(packed)
            return
        batch = decode_small(payload)
        if batch is None:
            self._rest = batch_slices(payload)
        else:
            self._apply(batch)

    def go_on(self, deadline: float) -> bool:
        """Work on the batch until `deadline` (perf_counter). Return True if the batch is done."""
        rest = self._rest
        if rest is None:
            return True
        try:
            for batch in rest:
                self.slices += 1
                self._apply(batch)
                if time.perf_counter() >= deadline:
                    return False
        except NotABatch as error:
            self._lose_all("not_a_batch", f"it cannot be decoded: {error}")
        except BaseException:
            self._rest = None
            raise
        self._rest = None
        return True

    def drop(self) -> None:
        """Drop the rest of the batch, because its source has ended or restarted."""
        self._rest = None

    def _apply(self, batch: EventBatch) -> None:
        if self._ingest.apply(batch, self._delivery):
            self._cursor.cleared()
        early = self._ingest.out_of_turn
        if self._delivery.turn is Turn.LATE and early.has_forgotten:
            early.has_forgotten = False
            self._lose("batches after it came early, and not all that they left is known")
        for event in batch.skipped if self._delivery.turn is not Turn.AGAIN else ():
            text = f"{event.event_type} event skipped, {event.reason}: {event.detail}"
            self._report("event", logging.WARNING, text)

    def _lose_all(self, reason: str, detail: str) -> None:
        self._ingest.counts.skip("message", reason)
        self._lose(detail)

    def _lose(self, detail: str) -> None:
        """Count and log that the current batch was not applied, or not completely."""
        if not self._is_lost:
            self._is_lost = True
            self._cursor.lose()
        self._report("batch", logging.WARNING, f"batch lost, {detail}")
