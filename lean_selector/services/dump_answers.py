"""The answers to GET /dump: small ones at once, large ones made in slices of the loop's turns.

One large dump is made at a time, because each may be as large as the index; whoever asks meanwhile
shares the next. A dump nobody waits for any more is dropped. Its text is `wire.dump`'s business.
"""

import logging
import time
from collections.abc import Callable, Iterator

from lean_selector.core.catalog import Catalog
from lean_selector.core.kv_index import RankKey
from lean_selector.core.partition import Partition
from lean_selector.http1.protocol import PendingReply
from lean_selector.http1.response import GrowingResponse, encode_response
from lean_selector.services.gate import error_reply
from lean_selector.wire.dump import PartitionDump, encode_dump

SLICE_S = 0.001  # as KV events: a request meets at most this pause, and what a part takes
_SMALL_BLOCKS = 1000  # up to a millisecond too

Watermarks = Callable[[Partition], dict[RankKey, int]]
CallSoon = Callable[[Callable[[], None]], object]

_log = logging.getLogger("lean_selector.dump")


class DumpAnswers:
    """Only from the thread of the loop."""

    def __init__(self, catalog: Catalog, watermarks: Watermarks, call_soon: CallSoon) -> None:
        """`call_soon` is the loop's."""
        self._catalog = catalog
        self._watermarks = watermarks
        self._call_soon = call_soon
        self._waiting: set[PendingReply] = set()  # for a dump that has not begun
        self._served: set[PendingReply] = set()  # for the one that is being made
        self._parts: Iterator[bytes] | None = None
        self._made: GrowingResponse | None = None  # set together with _parts

    def answer(self) -> bytes | PendingReply:
        partitions = self._catalog.partitions.values()
        if sum(partition.index.total_blocks for partition in partitions) <= _SMALL_BLOCKS:
            return encode_response(200, b"".join(self._encoded()))
        pending = PendingReply()
        pending.on_disconnect = lambda: self._hung_up(pending)
        self._waiting.add(pending)
        if self._parts is None and len(self._waiting) == 1:
            self._call_soon(self._begin)
        return pending

    def _encoded(self) -> Iterator[bytes]:
        return encode_dump(
            [
                PartitionDump(*key, partition.block_size, partition.index.dump(), watermarks)
                for key, partition in sorted(self._catalog.partitions.items())
                if (watermarks := self._watermarks(partition))
                or partition.established
                or not partition.index.is_empty
            ]
        )

    def _hung_up(self, pending: PendingReply) -> None:
        self._waiting.discard(pending)
        self._served.discard(pending)

    def _begin(self) -> None:
        if self._parts is None and self._waiting:
            self._served, self._waiting = self._waiting, set()
            self._made = GrowingResponse()
            self._parts = self._encoded()
            self._go_on()

    def _go_on(self) -> None:
        """Encode for one slice, then let the loop look at its other sockets."""
        assert self._parts is not None
        assert self._made is not None
        slice_ends = time.perf_counter() + SLICE_S
        try:
            for part in self._parts if self._served else ():
                self._made.add(part)
                if time.perf_counter() >= slice_ends:
                    self._call_soon(self._go_on)
                    return
            response = self._made.finish()
        except Exception:  # the gate has let go of the request, so its rule is applied here
            _log.exception("a dump failed")
            response = error_reply(500, "internal error")
        self._made = self._parts = None
        served, self._served = self._served, set()
        for pending in served:
            pending.resolve(response)
        if self._waiting:
            self._call_soon(self._begin)
