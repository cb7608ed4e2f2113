"""The answers to GET /dump: small ones at once, large ones made in slices of the loop's turns.

Each may be as large as the index. Its text is `wire.dump`'s business.
"""

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

    def __init__(self, catalog: Catalog, watermarks: Watermarks, call_soon: CallSoon) -> None:
        """`call_soon` is the loop's."""
        self._catalog = catalog
        self._watermarks = watermarks
        self._sliced = SlicedAnswers("a dump", self._encoded, call_soon)

    def answer(self) -> Answer:
        partitions = self._catalog.partitions.values()
        blocks = sum(partition.index.total_blocks for partition in partitions)
        return self._sliced.answer(at_once=blocks <= _SMALL_BLOCKS)

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
