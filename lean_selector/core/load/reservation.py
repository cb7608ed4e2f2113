"""An active request, as it is kept."""

import msgspec

from lean_selector.core.load.booking import Booking
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.records import ActiveRun


class Reservation(msgspec.Struct, eq=False, gc=False):
    """One active request. Read it anywhere; only Slots changes it (but `published_at`).

    Not tracked by the collector, so that a hundred thousand of them cost a collection nothing:
    Slots unlinks what it drops. Times are monotonic seconds.
    """

    request_id: str  # the booking's
    booking: Booking
    rank: RankLoad
    run: ActiveRun  # where the prompt ends in the trie; the root when it is empty
    block_count: int  # of the prompt, also when other requests hold the same blocks
    prefill_tokens: int  # outstanding: 0 from prefill_complete on
    touched_at: float  # booking, prefill_complete, output_block, touch
    published_at: float  # when peers last heard of it; kept by whoever publishes
    router_id: int | None  # the peer that admitted it; None: this replica did
    prefill_done: bool = False
    output_blocks: int = 0
    weighted_output_blocks: int = 0  # those that the last decay_fraction reached
    output_weight: float = 1.0  # the weight of those

    @property
    def is_replica(self) -> bool:
        return self.router_id is not None
