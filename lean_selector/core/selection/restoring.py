"""Restore the state of an earlier process into a new selector.

Partitions are restored before their workers, workers before their reservations. Peers are not
told."""

from collections.abc import Iterable

from lean_selector.core.replication.events import restore
from lean_selector.core.replication.shapes import LiveReservation
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import PartitionKey


def restore_partition(
    catalog: Catalog, key: PartitionKey, block_size: int, is_eagle: bool, members: Iterable[int]
) -> None:
    """Restore a partition of an earlier process. Workers with another block size are refused while
    one of `members`, the workers that were once schedulable in the partition, has this one (D3)."""
    partition = catalog.partitions[key] = catalog.new_partition(key, block_size, is_eagle)
    partition.restore(members)


def restore_reservation(selector: Selector, live: LiveReservation, router_id: int | None) -> bool:
    """Restore a reservation of an earlier process. `router_id`: the replica that admitted the
    request; None: this replica. Return False if the reservation could not be restored."""
    partition = selector.scheduling_partition(live.model_name, live.tenant_id)
    if partition is None:
        return False
    request_id, reservations = live.spec.request_id, selector.reservations
    if router_id is not None:
        return restore(partition, live, router_id)
    if reservations.local_holder(request_id) is not None or not restore(partition, live, None):
        return False
    reservations.restored(partition, request_id)
    return True
