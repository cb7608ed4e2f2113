"""The catalog of a selector as a file, and back: workers, partitions, thresholds, peers.

A worker keeps to whom it belongs: one that a discovery named is a discovery's again (D33).
"""

from collections.abc import Collection, Iterable
from typing import Final, Protocol

import msgspec

from lean_selector.core.errors import SelectorError
from lean_selector.core.selection.restoring import restore_partition
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.workers import WorkerSpec
from lean_selector.state.catalog_text import catalog_text, read_rows
from lean_selector.state.peers import PeersByHttp
from lean_selector.state.shapes import CatalogFile, PartitionRow, ThresholdRow
from lean_selector.wire.discovery_states import KeptWorker

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkerSpec).decode


class Roster(Protocol):
    """The workers of discoveries, as far as they outlive the process."""

    def kept(self) -> list[KeptWorker]: ...

    def take_back(self, kept: KeptWorker, spec: WorkerSpec | None) -> None: ...


class _Line:
    """A worker, encoded."""

    __slots__ = ("spec", "text")

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.text = _encode(spec)


class SelectorCatalog:
    """What is written of a selector."""

    service: Final = "selector"

    def __init__(
        self,
        selector: Selector,
        peers: PeersByHttp,
        roster: Roster | None = None,
        discoveries: Collection[str] = (),
    ) -> None:
        """`discoveries` are those that run now, and tell the `roster`."""
        self._selector = selector
        self._peers = peers
        self._roster = roster
        self._discoveries = discoveries
        self._lines: dict[int, _Line] = {}

    @property
    def revision(self) -> int:
        """Grows with each change of a worker."""
        return self._selector.catalog.revision

    def text(self) -> bytes:
        """The file as it should be now. A worker is encoded when it has changed."""
        found = [] if self._roster is None else self._roster.kept()
        selector, kept = self._selector, dict[int, _Line]()
        for worker_id, worker in selector.catalog.workers.items():
            line = self._lines.get(worker_id)
            kept[worker_id] = (
                _Line(worker.spec) if line is None or line.spec is not worker.spec else line
            )
        self._lines = kept
        added, removed = self._peers.changes()
        head = CatalogFile(
            version=1,
            service=self.service,
            partitions=[
                PartitionRow(*key, each.block_size, each.is_eagle, sorted(each.members))
                for key, each in selector.catalog.partitions.items()
                if each.members
            ],
            thresholds=[ThresholdRow(*key, threshold) for key, threshold in selector.limits.own()],
            found=found,
            peers_added=added,
            peers_removed=removed,
        )
        return catalog_text(head, [line.text for line in kept.values()])

    def restore(self, file: CatalogFile, now: float) -> list[str]:
        """Puts it back into a selector that has just been made. Returns what did not fit."""
        problems = self._peers.restore(file.peers_added, file.peers_removed)
        selector = self._selector
        for row in file.thresholds:
            try:
                selector.limits.restore((row.model_name, row.tenant_id), row.threshold)
            except SelectorError as error:
                problems.append(f"threshold of {row.model_name}: {error.message}")
        sought = dict[int, KeptWorker]()
        for kept in file.found:
            names = [name for name in kept.discoveries if name in self._discoveries]
            if names:
                sought[kept.worker_id] = msgspec.structs.replace(kept, discoveries=names)
        specs = read_rows(file.workers, _decode, problems)
        ours = {kept.worker_id for kept in file.found if not kept.is_removed}
        workers = {
            spec.worker_id: spec
            for spec in specs
            if spec.worker_id not in ours or spec.worker_id in sought
        }
        for part in file.partitions:
            key = part.model_name, part.tenant_id
            members = [
                each for each in part.members if each in workers and workers[each].key == key
            ]
            if members:
                restore_partition(selector.catalog, key, part.block_size, part.is_eagle, members)
        for spec in workers.values():
            try:
                selector.upsert_worker(spec, now)
            except SelectorError as error:
                problems.append(f"worker {spec.worker_id}: {error.message}")
                self._not_a_member(spec)
        self._hand_back(sought.values())
        return problems

    def _not_a_member(self, spec: WorkerSpec) -> None:
        """It could not be registered: it holds no block size, nor the partition."""
        partitions = self._selector.catalog.partitions
        if (partition := partitions.get(spec.key)) is not None:
            partition.members.discard(spec.worker_id)
            if not partition.members:
                del partitions[spec.key]

    def _hand_back(self, sought: Iterable[KeptWorker]) -> None:
        """To the discoveries that named them, as if they had just done so."""
        if self._roster is None:
            return
        for kept in sought:
            worker = self._selector.catalog.workers.get(kept.worker_id)
            if kept.is_removed:
                self._roster.take_back(kept, None)
            elif worker is not None:
                self._roster.take_back(kept, worker.spec)
