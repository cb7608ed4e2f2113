"""What the answers say of what engines hold: spec indexer.md 3.5.

How events come over sockets is in `tests/events/`, what the index learns of them in `core/index/`.
"""

from lean_selector.core.index.shapes import Tier
from tests.support.driven_selector import pack
from tests.support.gates import InProcess, selection_gate, selection_service

BLOCKS = [1, 2, 3, 4, 5, 6]
PROMPT = {"block_hashes": BLOCKS, "sequence_hashes": BLOCKS, "isl_tokens": 24}


def test_each_rank_is_scored_apart_and_the_worker_by_its_best() -> None:
    """Example 9; then one rank is cleared, on all tiers."""
    service = selection_service()
    http = InProcess(selection_gate(service=service))
    worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 4, "data_parallel_size": 2}
    assert http.post("/workers", worker)[0] == 201
    index = service.selector.catalog.partitions["default", "default"].index
    for dp_rank, tier, blocks in (
        *((0, Tier.DEVICE, [1, 2]), (0, Tier.HOST_PINNED, [3]), (0, Tier.DISK, [4, 5])),
        *((1, Tier.DEVICE, [1]), (1, Tier.DISK, [2])),
    ):
        index.store(1, dp_rank, tier, blocks[0] - 1 or None, blocks, pack(blocks))

    def rows() -> list[tuple[int, int, int]]:
        """Device, host-pinned and disk blocks of each rank, cumulative."""
        names = ("device_blocks", "host_pinned_blocks", "disk_blocks")
        scores = http.post("/overlap_scores", PROMPT)[1]["workers"]
        return [(row[names[0]], row[names[1]], row[names[2]]) for row in scores]

    assert rows() == [(2, 3, 5), (1, 1, 2)]
    status, selection = http.post("/select", PROMPT)
    assert (status, selection["dp_rank"]) == (200, 0)
    overlap = {"longest_matched": 20, "gpu": 8, "dp": {"0": 8, "1": 4}, "cpu": 12, "disk": 20}
    assert selection["overlap"] == overlap
    assert selection["effective_prefill_tokens"] == 11
    pinned = {**PROMPT, "pinned_worker": {"worker_id": 1, "dp_rank": 1}}
    status, selection = http.post("/select", pinned)
    assert (status, selection["overlap"]) == (200, overlap)
    assert selection["effective_prefill_tokens"] == 24 - 5  # one block and a quarter
    index.clear(1, 1)
    assert rows() == [(2, 3, 5), (0, 0, 0)]
