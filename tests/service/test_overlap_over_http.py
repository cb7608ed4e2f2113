"""What the answers say of what engines hold, from their events on.

Worked examples: spec indexer.md 3.5, played in process; the worker with two ranks is the source
document's, with engines on real sockets (XPUB, so that a test can see the subscription arrive).
"""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from lean_selector.core.index.kv_ingest import KvIngest
from tests.service.test_document_examples import WORKER
from tests.support.gates import InProcess, selection_gate, selection_service
from tests.support.kv_batches import decode_batch
from tests.support.running_service import DEADLINE_S, RunningService, wait_until

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


# -- over sockets ---------------------------------------------------------------------------------


class Engine:
    """The PUB socket of one rank."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.socket = context.socket(zmq.XPUB)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._sequence = itertools.count()

    def wait_for_subscriber(self) -> None:
        assert self.socket.poll(int(DEADLINE_S * 1000)), "the service subscribes"
        assert self.socket.recv() == b"\x01"

    def publish(self, *events: dict[str, Any], dp_rank: int = 0) -> None:
        payload = msgspec.msgpack.encode([0.0, events, dp_rank])
        self.socket.send_multipart([b"", next(self._sequence).to_bytes(8, "big"), payload])


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield [Engine(context), Engine(context)]
    context.destroy(linger=0)


def test_the_worker_of_the_source_document_hears_both_of_its_ranks(
    engines: list[Engine],
) -> None:
    """The printed registration, with sockets that exist in place of its hosts, and its answer."""
    with RunningService() as service:
        scope = {"model_name": WORKER["model_name"], "tenant_id": WORKER["tenant_id"]}
        endpoints = {str(rank): engine.endpoint for rank, engine in enumerate(engines)}
        worker = {**WORKER, "kv_events_endpoints": endpoints}
        del worker["replay_endpoint"]  # nobody answers there
        assert service.post("/workers", worker)[1]["lifecycle"] == "schedulable"
        for engine in engines:
            engine.wait_for_subscriber()
        size = WORKER["block_size"]
        engines[0].publish(
            stored("gpu", [1, 2, 3, 4], size),
            stored("cpu", [5, 6], size),
            stored("disk", [7, 8], size),
        )
        engines[1].publish(stored("gpu", [1, 2], size), dp_rank=1)
        prompt = {**scope, "token_ids": list(range(512))}

        def overlap() -> Any:
            status, selection = service.post("/select", prompt)
            assert status == 200
            return selection["overlap"]

        expected = {
            "longest_matched": 128,
            "gpu": 64,
            "dp": {"0": 64, "1": 32},
            "cpu": 96,
            "disk": 128,
        }
        wait_until(lambda: bool(overlap() == expected), f"the overlap becomes {expected}")
        assert service.request("DELETE", "/workers/1")[0] == 200
        assert service.post("/select", prompt)[0] == 503
