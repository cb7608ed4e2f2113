"""What the answers say of what engines hold, from their events on: spec indexer.md 3.5.

How events come over sockets is in `tests/events/`.
"""

from typing import Any

import msgspec

from lean_selector.core.index.kv_ingest import KvIngest
from tests.support.gates import InProcess, selection_gate, selection_service
from tests.support.kv_batches import decode_batch

BLOCK_SIZE = 4
MEDIUM = {"gpu": "GPU", "cpu": "CPU_PINNED", "disk": "DISK", "external": "EXTERNAL"}


def stored(
    tier: str, blocks: list[int], block_size: int = BLOCK_SIZE, parent: int | None = None
) -> dict[str, Any]:
    """Blocks in a row, below the one before them unless told otherwise. Block `n` of the one prompt
    has hash 1000 + n."""
    if parent is None and blocks[0] > 1:
        parent = 1000 + blocks[0] - 1
    return {
        "type": "BlockStored",
        "block_hashes": [1000 + block for block in blocks],
        "parent_block_hash": parent,
        "token_ids": [
            t for block in blocks for t in range((block - 1) * block_size, block * block_size)
        ],
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM[tier],
    }


class Held:
    """A selector with worker 1, of two ranks, that is told what they hold."""

    def __init__(self, ranks: int = 1) -> None:
        service = selection_service()
        self.http = InProcess(selection_gate(service=service))
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": BLOCK_SIZE}
        assert self.http.post("/workers", {**worker, "data_parallel_size": ranks})[0] == 201
        (partition,) = service.selector.catalog.partitions.values()
        self._ingests = [KvIngest(partition.index, 1, rank) for rank in range(ranks)]

    def publish(self, *events: dict[str, Any], dp_rank: int = 0) -> None:
        payload = msgspec.msgpack.encode([0.0, events, dp_rank])
        self._ingests[dp_rank].apply(decode_batch(payload))

    def rows(self, blocks: int) -> list[tuple[int, int, int]]:
        """Device, host-pinned and disk blocks of each rank, cumulative."""
        prompt = {"token_ids": list(range(blocks * BLOCK_SIZE))}
        status, scores = self.http.post("/overlap_scores", prompt)
        assert status == 200
        return [
            (row["device_blocks"], row["host_pinned_blocks"], row["disk_blocks"])
            for row in scores["workers"]
        ]


def test_each_rank_is_scored_apart_and_the_worker_by_its_best() -> None:
    """Example 9; then one rank is cleared, on all tiers."""
    engine = Held(ranks=2)
    engine.publish(stored("gpu", [1, 2]), stored("cpu", [3]), stored("disk", [4, 5]))
    engine.publish(stored("gpu", [1]), stored("disk", [2]), dp_rank=1)
    assert engine.rows(6) == [(2, 3, 5), (1, 1, 2)]
    prompt = {"token_ids": list(range(24))}
    status, selection = engine.http.post("/select", prompt)
    assert (status, selection["dp_rank"]) == (200, 0)
    overlap = {"longest_matched": 20, "gpu": 8, "dp": {"0": 8, "1": 4}, "cpu": 12, "disk": 20}
    assert selection["overlap"] == overlap
    assert selection["effective_prefill_tokens"] == 11
    pinned = {**prompt, "pinned_worker": {"worker_id": 1, "dp_rank": 1}}
    status, selection = engine.http.post("/select", pinned)
    assert (status, selection["overlap"]) == (200, overlap)
    assert selection["effective_prefill_tokens"] == 24 - 5  # one block and a quarter
    engine.publish({"type": "AllBlocksCleared"}, dp_rank=1)
    assert engine.rows(6) == [(2, 3, 5), (0, 0, 0)]
