"""Bookings that were live when the process before this one ended, booked once more.

Nobody is told of them: peers heard of them when they were made. Time is an argument, in monotonic
seconds of this process, and may lie before its begin.
"""

from lean_selector.core.replication.events import ReplicaTarget
from lean_selector.core.replication.records import LiveBooking


def restore(target: ReplicaTarget, live: LiveBooking, router_id: int | None) -> bool:
    """Books it as of `live.touched_at`. Call it oldest first, for expiry goes by that order.

    `router_id`: the peer that admitted it, None if this replica did. False, with nothing booked:
    its rank is not registered, its id is live already, or the block size is another.
    """
    slots, booking = target.slots, live.booking
    request_id = booking.request_id
    if (
        live.block_size != target.block_size
        or (booking.worker_id, booking.dp_rank) not in slots.ranks
        or request_id in slots.reservations
    ):
        return False
    slots.book(booking, live.sequence_hashes, live.touched_at, router_id)
    if live.prefill_done:
        slots.prefill_complete(request_id, live.touched_at)
    return True
