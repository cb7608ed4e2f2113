"""What the process before this one knew, put back into a selector that has just been made.

Partitions come before their workers, workers before their bookings. Nobody is told of any of it.
"""

from collections.abc import Iterable

from lean_selector.core.replication.events import restore
from lean_selector.core.replication.shapes import LiveBooking
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.workers import PartitionKey


def restore_partition(
    catalog: Catalog, key: PartitionKey, block_size: int, is_eagle: bool, members: Iterable[int]
) -> None:
    """One that was established, so that who was refused for its block size is so again.

    `members` are the workers that were schedulable in it once: they hold its block size (D3).
    """
    partition = catalog.partitions[key] = catalog.new_partition(key, block_size, is_eagle)
    partition.established = True
    partition.members.update(members)


def restore_booking(selector: Selector, live: LiveBooking, router_id: int | None) -> bool:
    """As `core.replication.restoring.restore`; ids of our own stay unique in the process (D4)."""
    partition = selector.scheduling_partition(live.model_name, live.tenant_id)
    if partition is None:
        return False
    request_id, bookings = live.booking.request_id, selector.bookings
    if router_id is not None:
        return restore(partition, live, router_id)
    if bookings.local_holder(request_id) is not None or not restore(partition, live, None):
        return False
    bookings.restored(partition, request_id)
    return True
