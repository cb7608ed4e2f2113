"""Engines publish on real sockets; what the service answers over HTTP is what they hold.

The engine is played by a PUB socket (XPUB, so that a test can see the subscription arrive). Worked
examples: spec indexer.md 3.5; the worker with two ranks is the source document's.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from tests.service.test_document_examples import WORKER
from tests.support.running_service import DEADLINE_S, RunningService, wait_until

BLOCK_SIZE = 4
MEDIUM = {"gpu": "GPU", "cpu": "CPU_PINNED", "disk": "DISK", "external": "EXTERNAL"}


class Engine:
    """One rank's PUB socket. Block `n` of its one prompt has hash 1000 + n and tokens 4n - 4 on."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._sequence = itertools.count()

    def wait_for_subscriber(self) -> None:
        assert self._socket.poll(int(DEADLINE_S * 1000)), "the service subscribes"
        assert self._socket.recv() == b"\x01"

    def publish(self, *events: dict[str, Any], dp_rank: int = 0) -> None:
        payload = msgspec.msgpack.encode([0.0, events, dp_rank])
        self._socket.send_multipart([b"", next(self._sequence).to_bytes(8, "big"), payload])

    def close(self) -> None:
        self._socket.close()


def stored(
    tier: str, blocks: list[int], block_size: int = BLOCK_SIZE, parent: int | None = None
) -> dict[str, Any]:
    """Blocks in a row, below the one before them unless told otherwise."""
    if parent is None and blocks[0] > 1:
        parent = 1000 + blocks[0] - 1
    return {
        "type": "BlockStored",
        "block_hashes": [1000 + block for block in blocks],
        "parent_block_hash": parent,
        "token_ids": [t for block in blocks for t in tokens_of(block, block_size)],
        "block_size": block_size,
        "lora_id": None,
        "medium": MEDIUM[tier],
    }


def removed(tier: str, blocks: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [1000 + block for block in blocks],
        "medium": MEDIUM[tier],
    }


def tokens_of(block: int, block_size: int) -> list[int]:
    return list(range((block - 1) * block_size, block * block_size))


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService() as running:
        yield running


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = [Engine(context), Engine(context)]
    yield made
    for engine in made:
        engine.close()
    context.term()


serial = itertools.count(1)


def register(service: RunningService, engines: list[Engine]) -> dict[str, Any]:
    """A worker of as many ranks as engines, in a partition of its own; returns its scope."""
    worker_id = next(serial)
    scope = {"model_name": f"model-{worker_id}"}
    status, record = service.post(
        "/workers",
        {
            **scope,
            "worker_id": worker_id,
            "endpoint": "http://w",
            "block_size": BLOCK_SIZE,
            "data_parallel_size": len(engines),
            "kv_events_endpoints": {
                str(rank): engine.endpoint for rank, engine in enumerate(engines)
            },
        },
    )
    assert (status, record["lifecycle"]) == (201, "schedulable")
    for engine in engines:
        engine.wait_for_subscriber()
    return scope


def rows(service: RunningService, scope: dict[str, Any], blocks: int) -> list[tuple[int, int, int]]:
    """Device, host-pinned and disk blocks of each rank, cumulative."""
    prompt = {**scope, "token_ids": list(range(blocks * BLOCK_SIZE))}
    status, scores = service.post("/overlap_scores", prompt)
    assert status == 200
    return [
        (row["device_blocks"], row["host_pinned_blocks"], row["disk_blocks"])
        for row in scores["workers"]
    ]


EXAMPLES = [
    pytest.param(
        [("gpu", [1, 2]), ("cpu", [3]), ("disk", [4]), ("external", [5])],
        *(6, (8, 12, 20), 11),
        id="1: every tier goes on where the one before ends",
    ),
    pytest.param([("gpu", [1, 2]), ("cpu", [1, 2])], 3, (8, 8, 8), 4, id="2: held twice"),
    pytest.param([("gpu", [1]), ("cpu", [1, 2, 3])], 4, (4, 12, 12), 6, id="3: cpu goes on"),
    pytest.param([("cpu", [1, 2, 3])], 4, (0, 12, 12), 7, id="4: cpu alone"),
    pytest.param([("disk", [1, 2, 3])], 4, (0, 0, 12), 13, id="5: disk alone"),
    pytest.param(
        [("disk", [1, 2]), ("cpu", [3])], 4, (0, 0, 8), 14, id="6: no step back from disk to cpu"
    ),
    pytest.param(
        [("gpu", [1]), ("disk", [2]), ("cpu", [3])], 4, (4, 4, 8), 11, id="7: nor after gpu"
    ),
    pytest.param([("external", [1, 2])], 3, (0, 0, 8), 10, id="10: external counts as disk"),
]


@pytest.mark.parametrize(("held", "blocks", "overlap", "effective"), EXAMPLES)
def test_a_worked_example_of_the_tiers(
    service: RunningService,
    engines: list[Engine],
    held: list[tuple[str, list[int]]],
    blocks: int,
    overlap: tuple[int, int, int],
    effective: int,
) -> None:
    scope = register(service, engines[:1])
    engines[0].publish(*(stored(tier, of_tier) for tier, of_tier in held))
    expected = [tuple(tokens // BLOCK_SIZE for tokens in overlap)]
    wait_until(lambda: rows(service, scope, blocks) == expected, f"rows become {expected}")
    prompt = {**scope, "token_ids": list(range(blocks * BLOCK_SIZE))}
    status, selection = service.post("/select", prompt)
    assert status == 200
    gpu, cpu, disk = overlap
    assert selection["overlap"] == {
        "longest_matched": max(overlap),
        "gpu": gpu,
        "dp": {"0": gpu},
        "cpu": cpu,
        "disk": disk,
    }
    assert selection["effective_prefill_tokens"] == effective


def test_a_removed_block_ends_what_the_tier_matches(
    service: RunningService, engines: list[Engine]
) -> None:
    """Example 8."""
    scope = register(service, engines[:1])
    engines[0].publish(stored("gpu", [1, 2, 3]), stored("cpu", [2]), removed("gpu", [2]))
    wait_until(lambda: rows(service, scope, 4) == [(1, 2, 2)], "the removal is seen")
    engines[0].publish(removed("cpu", [2]))
    wait_until(lambda: rows(service, scope, 4) == [(1, 1, 1)], "the other removal is seen")
    engines[0].publish(stored("gpu", [2]))
    wait_until(lambda: rows(service, scope, 4) == [(3, 3, 3)], "block 3 counts again")


def test_a_lower_tier_goes_on_from_the_engines_own_hash_only(
    service: RunningService, engines: list[Engine]
) -> None:
    """Example 11: the disk block hangs below a hash that is not the first block's."""
    scope = register(service, engines[:1])
    engines[0].publish(stored("disk", [2], parent=77), stored("gpu", [1]))
    wait_until(lambda: rows(service, scope, 2) == [(1, 1, 1)], "only the device block counts")


def test_each_rank_is_scored_apart_and_the_worker_by_its_best(
    service: RunningService, engines: list[Engine]
) -> None:
    """Example 9."""
    scope = register(service, engines)
    engines[0].publish(stored("gpu", [1, 2]), stored("cpu", [3]), stored("disk", [4, 5]))
    engines[1].publish(stored("gpu", [1]), stored("disk", [2]), dp_rank=1)
    expected = [(2, 3, 5), (1, 1, 2)]
    wait_until(lambda: rows(service, scope, 6) == expected, f"rows become {expected}")
    prompt = {**scope, "token_ids": list(range(24))}
    status, selection = service.post("/select", prompt)
    assert (status, selection["dp_rank"]) == (200, 0)
    overlap = {"longest_matched": 20, "gpu": 8, "dp": {"0": 8, "1": 4}, "cpu": 12, "disk": 20}
    assert selection["overlap"] == overlap
    assert selection["effective_prefill_tokens"] == 11
    pin = {"worker_id": selection["worker_id"], "dp_rank": 1}
    status, pinned = service.post("/select", {**prompt, "pinned_worker": pin})
    assert (status, pinned["overlap"]) == (200, overlap)
    assert pinned["effective_prefill_tokens"] == 24 - 5  # one block and a quarter


def test_a_clear_empties_one_rank_on_all_tiers(
    service: RunningService, engines: list[Engine]
) -> None:
    scope = register(service, engines)
    for rank, engine in enumerate(engines):
        engine.publish(stored("gpu", [1]), stored("cpu", [2]), dp_rank=rank)
    wait_until(lambda: rows(service, scope, 2) == [(1, 2, 2)] * 2, "both hold two blocks")
    engines[1].publish({"type": "AllBlocksCleared"}, dp_rank=1)
    wait_until(lambda: rows(service, scope, 2) == [(1, 2, 2), (0, 0, 0)], "one holds nothing")


def test_a_booking_counts_what_is_not_cached(
    service: RunningService, engines: list[Engine]
) -> None:
    scope = register(service, engines)
    engines[1].publish(stored("gpu", [1, 2, 3]), dp_rank=1)
    wait_until(lambda: rows(service, scope, 4)[1] == (3, 3, 3), "rank 1 holds three blocks")
    prompt = {**scope, "token_ids": list(range(18)), "reservation_id": f"on {scope}"}
    status, selection = service.post("/select_and_reserve", prompt)
    assert (status, selection["dp_rank"], selection["effective_prefill_tokens"]) == (200, 1, 6)
    _, (entry,) = service.get(f"/loads?model_name={scope['model_name']}")
    assert [row["potential_prefill_tokens"] for row in entry["loads"]] == [0, 6]
    assert [row["potential_decode_blocks"] for row in entry["loads"]] == [0, 4]


def test_the_source_documents_worker_hears_both_of_its_ranks(
    service: RunningService, engines: list[Engine]
) -> None:
    """The printed registration, with sockets that exist in place of its hosts, and its answer."""
    worker_id = next(serial)
    scope = {"model_name": WORKER["model_name"], "tenant_id": WORKER["tenant_id"]}
    endpoints = {str(rank): engine.endpoint for rank, engine in enumerate(engines)}
    worker = {**WORKER, "worker_id": worker_id, "kv_events_endpoints": endpoints}
    del worker["replay_endpoint"]  # nobody answers there
    assert service.post("/workers", worker)[1]["lifecycle"] == "schedulable"
    for engine in engines:
        engine.wait_for_subscriber()
    size = WORKER["block_size"]
    engines[0].publish(
        stored("gpu", [1, 2, 3, 4], size), stored("cpu", [5, 6], size), stored("disk", [7, 8], size)
    )
    engines[1].publish(stored("gpu", [1, 2], size), dp_rank=1)
    prompt = {**scope, "token_ids": list(range(512))}

    def overlap() -> Any:
        status, selection = service.post("/select", prompt)
        assert status == 200
        return selection["overlap"]

    expected = {"longest_matched": 128, "gpu": 64, "dp": {"0": 64, "1": 32}, "cpu": 96, "disk": 128}
    wait_until(lambda: bool(overlap() == expected), f"the overlap becomes {expected}")
    assert service.request("DELETE", f"/workers/{worker_id}")[0] == 200
    assert service.post("/select", prompt)[0] == 503
