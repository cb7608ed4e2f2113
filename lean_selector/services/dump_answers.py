"""The answers to GET /dump: small ones at once, large ones made in slices of the loop's turns.

Each may be as large as the index. Its text is `wire.dump`'s business.
"""

import time
from collections.abc import Callable, Iterator

from lean_selector.core.index.kv_index import RankKey
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition
from lean_selector.services.replies import Answer
from lean_selector.services.sliced_answers import CallSoon, SlicedAnswers
from lean_selector.wire.dump import encode_dump
from lean_selector.wire.dump_shapes import PartitionDump

_SMALL_BLOCKS = 1000  # up to a millisecond

Watermarks = Callable[[Partition], dict[RankKey, int]]


class DumpAnswers:
    """Only from the thread of the loop."""

    def __init__(
        self,
        catalog: Catalog,
        watermarks: Watermarks,
        call_soon: CallSoon,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`call_soon` is the loop's."""
        self._catalog = catalog
        self._watermarks = watermarks
        self._sliced = SlicedAnswers("a dump", self.parts, call_soon, clock=clock)
        self._sliced_16 = SlicedAnswers(
            "a dump", lambda: self.parts(as_1_6=True), call_soon, clock=clock
        )

    def answer(self) -> Answer:
        return self._sliced.answer(at_once=self._is_small())

    def answer_16(self) -> Answer:
        """As 1.6 has it, without what only our own replicas read."""
        return self._sliced_16.answer(at_once=self._is_small())

    def _is_small(self) -> bool:
        partitions = self._catalog.partitions.values()
        return sum(partition.index.total_blocks for partition in partitions) <= _SMALL_BLOCKS

    def parts(self, *, as_1_6: bool = False) -> Iterator[bytes]:
        """The body, to be joined; each part is small. `as_1_6`: as 1.6 has it."""
        return encode_dump(
            [
                PartitionDump(*key, partition.block_size, partition.index.dump(), watermarks)
                for key, partition in sorted(self._catalog.partitions.items())
                if (watermarks := self._watermarks(partition))
                or partition.established
                or not partition.index.is_empty
            ],
            as_1_6=as_1_6,
        )
