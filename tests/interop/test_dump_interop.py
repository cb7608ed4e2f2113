"""Recovery between this service and the reference's selectors and indexers, in both directions.

Each side is told the same KV events or recovers them from the other; then each must answer the same
overlaps for the same prompts, on all tiers.
"""

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lean_selector.publisher import KvEventPublisher
from loadtest.child_service import JSON, asked
from tests.support.running_service import RunningService, wait_until
from tests.support.side_by_side import running

BLOCK_SIZE = 4
MODEL, TENANT = "org/m", "t"
RANKS = [(1, 0), (1, 1), (2, 0)]
TIERS = {"GPU": "device", "CPU_PINNED": "host_pinned", "DISK": "disk", "EXTERNAL": "external"}
MEDIA = list(TIERS)
SCOPE = {"model_name": MODEL, "tenant_id": TENANT, "routing_group": TENANT}
PROMPTS = 200

Chain = list[tuple[int, list[int]]]  # (engine hash, tokens) of each block
Overlaps = dict[tuple[int, int], tuple[int, int, int]]  # rank -> device, then + host, + disk


class Engines:
    """One publisher per rank, and the prompts that their blocks come from."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.publishers = {
            rank: KvEventPublisher(
                worker_id=rank[0],
                dp_rank=rank[1],
                kv_block_size=BLOCK_SIZE,
                endpoint="tcp://127.0.0.1:*",
                replay_endpoint="tcp://127.0.0.1:*",
            )
            for rank in RANKS
        }
        self.chains = [self._chain() for _ in range(12)]
        for _ in range(12):  # prompts that part from another somewhere
            chain = self._rng.choice(self.chains)
            self.chains.append(self._chain(chain[: self._rng.randrange(1, len(chain))]))
        self.first, self.last = self._chain(), self._chain()
        self.held: set[tuple[tuple[int, int], str, int]] = set()  # all that was ever stored

    def _chain(self, prefix: Chain | None = None) -> Chain:
        chain = list(prefix or [])
        for _ in range(self._rng.randrange(2, 12)):
            tokens = [self._rng.randrange(50_000) for _ in range(BLOCK_SIZE)]
            chain.append((self._rng.getrandbits(64), tokens))
        return chain

    def store_all(self) -> None:
        """Each rank holds the start of each prompt: device, then host, disk and external blocks."""
        for rank, publisher in self.publishers.items():
            for chain in self.chains:
                cuts = sorted(self._rng.randrange(len(chain) + 1) for _ in MEDIA)
                at, parent = 0, None
                for end, medium in zip(cuts, MEDIA, strict=True):
                    hashes = [name for name, _ in chain[at:end]]
                    if hashes:
                        tokens = [token for _, block in chain[at:end] for token in block]
                        publisher.publish_stored(
                            None, tokens, None, hashes, 0, parent, medium=medium
                        )
                        self.held.update((rank, TIERS[medium], name) for name in hashes)
                        at, parent = end, hashes[-1]

    def evict_some(self) -> None:
        """Also out of the middle, so that blocks are left that nothing leads to."""
        for publisher in self.publishers.values():
            for _ in range(8):
                name, _ = self._rng.choice(self._rng.choice(self.chains))
                publisher.publish_removed(None, [name], medium=self._rng.choice(MEDIA))

    def tell(self, chain: Chain) -> None:
        """Every rank stores the first block of this one."""
        name, tokens = chain[0]
        for rank, publisher in self.publishers.items():
            publisher.publish_stored(None, tokens, None, [name])
            self.held.add((rank, "device", name))

    def prompts(self) -> list[list[int]]:
        prompts = []
        for _ in range(PROMPTS):
            chain = self._rng.choice(self.chains)
            tokens = [token for _, block in chain for token in block]
            prompts.append(tokens[: self._rng.randrange(1, len(tokens) + 1)] + [7] * 3)
        return prompts

    def close(self) -> None:
        for publisher in self.publishers.values():
            publisher.close()


class Selector:
    """A selection service of ours or of the reference, as its clients see it."""

    def __init__(self, port: int) -> None:
        self.port = port

    def register(self, engines: Engines) -> None:
        for worker_id in sorted({worker_id for worker_id, _ in RANKS}):
            of = {
                rank: p for (worker, rank), p in engines.publishers.items() if worker == worker_id
            }
            body = {
                **SCOPE,
                "worker_id": worker_id,
                "endpoint": "http://worker:8000",
                "block_size": BLOCK_SIZE,
                "data_parallel_size": len(of),
                "max_num_batched_tokens": 8192,
                "kv_events_endpoints": {str(rank): p.endpoint for rank, p in of.items()},
            }
            if len(of) == 1:  # several ranks of one replay endpoint are not what all understand
                body["replay_endpoint"] = of[0].replay_endpoint
            status, answer = ask(self.port, "POST", "/workers", body)
            assert (status, answer["lifecycle"]) == (201, "schedulable"), answer

    def overlaps(self, tokens: list[int]) -> Overlaps:
        body = {**SCOPE, "token_ids": tokens}
        status, answer = ask(self.port, "POST", "/overlap_scores", body)
        assert status == 200, answer
        return {
            (row["worker_id"], row["dp_rank"]): (
                row["device_blocks"],
                row["host_pinned_blocks"],
                row["disk_blocks"],
            )
            for row in answer["workers"]
            if row["disk_blocks"]
        }


class Indexer:
    """The reference's standalone indexer; its answers are per instance, the best of its ranks."""

    def __init__(self, port: int) -> None:
        self.port = port

    def register(self, engines: Engines) -> None:
        for (worker_id, dp_rank), publisher in engines.publishers.items():
            body = {
                **SCOPE,
                "instance_id": worker_id,
                "dp_rank": dp_rank,
                "endpoint": publisher.endpoint,
                "replay_endpoint": publisher.replay_endpoint,
                "block_size": BLOCK_SIZE,
            }
            status, answer = ask(self.port, "POST", "/register", body)
            assert status == 201, answer

    def overlaps(self, tokens: list[int]) -> Overlaps:
        status, answer = ask(self.port, "POST", "/query", {**SCOPE, "token_ids": tokens})
        assert status == 200, answer
        return {
            (int(instance), -1): tuple(of[tier] // BLOCK_SIZE for tier in ("gpu", "cpu", "disk"))
            for instance, of in answer["instances"].items()
        }


Service = Selector | Indexer


def ask(port: int, method: str, path: str, body: object = None) -> tuple[int, Any]:
    status, text = asked(port, method, path, json.dumps(body).encode(), JSON)
    return status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()


@contextlib.contextmanager
def reference(python: Path, module: str, *flags: str) -> Iterator[Service]:
    with running([str(python), "-m", f"dynamo.{module}"], {}, *flags) as child:
        yield (Indexer if module == "indexer" else Selector)(child.port)


@contextlib.contextmanager
def ours(*flags: str) -> Iterator[Selector]:
    with RunningService(*flags) as running:
        yield Selector(running.port)


def url(service: Service) -> str:
    return f"http://127.0.0.1:{service.port}"


def best_of_ranks(overlaps: Overlaps) -> Overlaps:
    best: dict[int, tuple[int, int, int]] = {}
    for (worker_id, _), (device, host, disk) in overlaps.items():
        least = best.get(worker_id, (0, 0, 0))
        best[worker_id] = max(device, least[0]), max(host, least[1]), max(disk, least[2])
    return {(worker_id, -1): blocks for worker_id, blocks in best.items()}


def assert_same_answers(one: Service, other: Service, prompts: list[list[int]]) -> None:
    per_instance = isinstance(one, Indexer) or isinstance(other, Indexer)
    hits = 0
    for tokens in prompts:
        left, right = one.overlaps(tokens), other.overlaps(tokens)
        if per_instance:
            left, right = (
                overlaps if isinstance(service, Indexer) else best_of_ranks(overlaps)
                for service, overlaps in ((one, left), (other, right))
            )
        assert left == right, tokens
        hits += bool(left)
    assert hits > PROMPTS / 2


def is_held_everywhere(service: Service, chain: Chain) -> bool:
    """Every rank is known to hold the chain's first block."""
    held = service.overlaps(chain[0][1])
    ranks = {(rank[0], -1) for rank in RANKS} if isinstance(service, Indexer) else set(RANKS)
    return set(held) == ranks


def connect(service: Service, engines: Engines) -> None:
    """Register the engines, and wait until nothing that they tell is lost any more."""
    service.register(engines)

    def is_heard() -> bool:
        engines.tell(engines.first)
        return is_held_everywhere(service, engines.first)

    wait_until(is_heard, "the engines are heard")


def dumped(service: Service) -> set[tuple[tuple[int, int], str, int]]:
    """(rank, tier, engine hash) of every block that the service tells its peers."""
    status, dump = ask(service.port, "GET", "/dump")
    assert status == 200, dump
    return {
        (
            (event["worker_id"], event["event"]["dp_rank"]),
            event["storage_tier"],
            block["block_hash"],
        )
        for entry in dump.values()
        for event in entry["events"]
        for block in event["event"]["data"]["stored"]["blocks"]
    }


@pytest.fixture
def engines() -> Iterator[Engines]:
    engines = Engines(seed=5)
    yield engines
    engines.close()


@pytest.fixture
def told(engines: Engines) -> Iterator[Selector]:
    """A service of ours that holds blocks on all tiers, holes and all."""
    with ours() as service:
        connect(service, engines)
        engines.store_all()
        wait_until(lambda: dumped(service) == engines.held, "everything told is in the dump")
        engines.evict_some()
        engines.tell(engines.last)
        wait_until(lambda: is_held_everywhere(service, engines.last), "evictions told")
        yield service


@pytest.fixture(params=["1.3.1", "1.6.1"])
def python(request: pytest.FixtureRequest) -> Path:
    version = request.param.replace(".", "")
    path: Path = request.getfixturevalue(f"reference_{version}")
    return path


@pytest.mark.reference
@pytest.mark.parametrize(
    ("module", "flag"), [("select_service", "--indexer-peers"), ("indexer", "--peers")]
)
def test_the_reference_recovers_what_we_dump(
    python: Path, module: str, flag: str, told: Selector, engines: Engines
) -> None:
    with reference(python, module, flag, url(told)) as peer:
        assert dumped(peer) == dumped(told)
        peer.register(engines)
        assert_same_answers(told, peer, engines.prompts())


@pytest.mark.reference
@pytest.mark.parametrize("module", ["select_service", "indexer"])
def test_we_recover_what_the_reference_dumps(python: Path, module: str, engines: Engines) -> None:
    with reference(python, module) as peer:
        connect(peer, engines)
        engines.store_all()
        wait_until(lambda: dumped(peer) == engines.held, "everything told is in the dump")
        with ours("--indexer-peers", url(peer)) as service:
            wait_until(lambda: not is_recovering(service), "recovery is over")
            assert dumped(service) == dumped(peer)
            service.register(engines)
            wait_until(lambda: is_replayed(service), "a replay has replaced what was copied")
            assert_same_answers(peer, service, engines.prompts())


def test_we_recover_what_we_dump(told: Selector, engines: Engines) -> None:
    with ours("--indexer-peers", url(told)) as service:
        wait_until(lambda: not is_recovering(service), "recovery is over")
        assert ask(service.port, "GET", "/dump") == ask(told.port, "GET", "/dump")
        service.register(engines)
        assert_same_answers(told, service, engines.prompts())


def is_replayed(service: Selector) -> bool:
    """Whether each engine that has a replay has told all that it keeps."""
    sources = ask(service.port, "GET", "/kv_sources")[1]
    asked = [each for each in sources if each["replay_endpoint"]]
    return all(each["replayed_batches"] and each["state"] in ("live", "idle") for each in asked)


def is_recovering(service: Service) -> bool:
    return bool(ask(service.port, "GET", "/ready")[1].get("recovering"))
