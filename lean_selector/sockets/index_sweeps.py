"""The loop's spare moments for the indexes that have memory to give back.

An index hides at once what it drops, and takes it apart in steps that somebody has to ask for. Here
they are asked for, in slices between which the loop serves. An index whose partition is gone is
kept until it is taken apart: otherwise all of it would be freed in one go.
"""

import logging
import time

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.sockets.ingest_turns import IngestTurns

logger = logging.getLogger("lean_selector.kv_events")

SLICE_S = 0.0005  # of each turn of the loop, beside the slice for events
_STEPS = 4  # between two looks at the clock


class IndexSweeps:
    """Sweeps every index that says that there is something to sweep. One per process."""

    def __init__(self) -> None:
        self._turns = IngestTurns(SLICE_S)

    def start(self, index: KvIndex) -> None:
        """Give its memory back from now on; what `KvIndex.on_sweep` is for."""

        def drain(deadline: float) -> bool:
            while index.sweep(_STEPS):
                if time.perf_counter() >= deadline:
                    return True
            return False

        self._turns.start(drain, _ended)


def _ended(error: Exception | None) -> None:
    if error is not None:  # our bug; what the index holds is as before
        logger.error("sweep of the index failed: %r", error)
