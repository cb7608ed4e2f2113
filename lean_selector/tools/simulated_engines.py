"""Simulated inference engines: requests, a bounded KV cache, a timing model, and real KV events.

`EngineModel` only computes what an engine does with a request and how long that takes.
`SimulatedEngine` runs the model in real time, and publishes changes of the cache as vLLM does."""

import asyncio
import struct
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from lean_selector.core.hashing import local_hashes, sequence_hashes_bytes
from lean_selector.publisher import KvEventPublisher

# Engines hash blocks in their own ways. Here the engine's hash is the sequence hash with these bits
# flipped, so that nothing depends on both being equal. The sign bit is left unchanged.
_ENGINE_BITS = 0x2545_F491_4F6C_DD1D


class EngineRequest(msgspec.Struct, frozen=True):
    """A prompt, and the output that an engine generates for it.

    tokens: the prompt, followed by the output tokens that are known in advance. block_hashes and
    sequence_hashes have one signed 64-bit hash per full block of tokens; the first prompt_blocks
    blocks belong to the prompt. output_blocks: how many blocks the output fills."""

    request_id: str
    tokens: Sequence[int]
    isl_tokens: int
    prompt_blocks: int
    output_blocks: int
    block_hashes: Sequence[int]
    sequence_hashes: Sequence[int]


def make_request(
    request_id: str, tokens: list[int], isl_tokens: int, output_blocks: int, block_size: int
) -> EngineRequest:
    """Return a request with hashed tokens. The first isl_tokens of `tokens` are the prompt."""
    local = local_hashes(tokens, block_size)
    layout = f"<{len(local) // 8}q"
    return EngineRequest(
        request_id,
        tokens,
        isl_tokens,
        isl_tokens // block_size,
        output_blocks,
        struct.unpack(layout, local),
        struct.unpack(layout, sequence_hashes_bytes(local)),
    )


# -- the cache -------------------------------------------------------------------------------------


class HeldChain(msgspec.Struct, frozen=True):
    """How many of a request's blocks were cached already (`hit`) or were added (`stored`). The
    remaining blocks did not fit. evicted: hashes of the evicted blocks, in order."""

    hit: int
    stored: int
    evicted: list[int]


class BlockCache:
    """A paged KV cache of at most `capacity` blocks, which are identified by their chained hashes.

    A block that no request uses can be evicted. These blocks are evicted in the order in which
    requests released them. A request releases its last block first, so a block is evicted only
    after the blocks that follow it."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "an engine has at least one block"
        self.capacity = capacity
        self._users: dict[int, int] = {}  # block hash -> number of holders, >= 1
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._users) + len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._users or block in self._idle

    def has_room_for(self, chain: Sequence[int]) -> bool:
        """Whether all blocks of `chain` fit into the cache, beside the blocks in use."""
        users = self._users
        return sum(block not in users for block in chain) <= self.capacity - len(users)

    def hold(self, chain: Sequence[int]) -> HeldChain:
        """Pins the cached prefix of a request's blocks, and stores the other blocks while there is
        room.

        chain: distinct chained hashes. They begin with the first block of a sequence, or continue a
        chain on which the caller has already called `hold`."""
        users, idle = self._users, self._idle
        hit = 0
        for block in chain:
            if block in users:
                users[block] += 1
            elif block in idle:
                del idle[block]
                users[block] = 1
            else:
                break
            hit += 1
        stored = min(len(chain) - hit, self.capacity - len(users))
        excess = len(self) + stored - self.capacity
        evicted = [idle.popitem(last=False)[0] for _ in range(excess)]
        users.update(dict.fromkeys(chain[hit : hit + stored], 1))
        return HeldChain(hit, stored, evicted)

    def release(self, chain: Sequence[int]) -> None:
        """Unpins blocks that `hold` has pinned. The blocks stay cached until they are evicted."""
        for block in reversed(chain):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None


# -- engines ---------------------------------------------------------------------------------------


class EngineSpeed(msgspec.Struct, frozen=True):
    """The speed of an engine. Prompts are prefilled one at a time; decodes run concurrently."""

    prefill_tokens_per_s: float = 8_000.0
    decode_tokens_per_s: float = 160.0  # of one request


class RunningRequest(msgspec.Struct):
    """A request in an engine. held: how many of the request's first blocks are in the cache."""

    request: EngineRequest
    held: int
    hit_blocks: int
    prefill_done_at: float


class EngineModel:
    """An engine. For each request, call admit, then decode_block per output block, then finish."""

    def __init__(self, capacity_blocks: int, block_size: int, speed: EngineSpeed) -> None:
        self.cache = BlockCache(capacity_blocks)
        self.block_size = block_size
        self.speed = speed
        self.active = 0  # admitted requests that are not finished
        self.prompt_blocks = 0
        self.hit_blocks = 0  # prompt blocks that were cached; <= prompt_blocks
        self.requests = 0
        self.ttft_s = 0.0  # of all requests together
        self._prefill_free_at = 0.0

    @property
    def decode_block_s(self) -> float:
        """The time in seconds that an engine needs to generate one block of a request's output."""
        return self.block_size / self.speed.decode_tokens_per_s

    def admit(self, request: EngineRequest, now: float) -> tuple[RunningRequest, HeldChain]:
        """Stores the prompt in the cache, and queues its uncached part for prefill."""
        placed = self.cache.hold(request.sequence_hashes[: request.prompt_blocks])
        uncached = request.isl_tokens - placed.hit * self.block_size
        started = max(now, self._prefill_free_at)
        self._prefill_free_at = started + uncached / self.speed.prefill_tokens_per_s
        self.active += 1
        self.prompt_blocks += request.prompt_blocks
        self.hit_blocks += placed.hit
        self.requests += 1
        self.ttft_s += self._prefill_free_at - now
        running = RunningRequest(
            request, placed.hit + placed.stored, placed.hit, self._prefill_free_at
        )
        return running, placed

    def decode_block(self, running: RunningRequest, index: int) -> HeldChain | None:
        """Caches output block `index`. Return None if the block's tokens are unknown, or if an
        earlier block of the request is not in the cache."""
        at = running.request.prompt_blocks + index
        if running.held != at or at >= len(running.request.sequence_hashes):
            return None
        placed = self.cache.hold(running.request.sequence_hashes[at : at + 1])
        running.held += placed.hit + placed.stored
        return placed

    def finish(self, running: RunningRequest) -> None:
        """Unpins the blocks of a request that has ended. The blocks stay cached until evicted."""
        self.cache.release(running.request.sequence_hashes[: running.held])
        self.active -= 1


def hit_rate(engines: Sequence[EngineModel]) -> float:
    """Return the fraction of all requests' prompt blocks that were cached; 0 without prompts."""
    return sum(e.hit_blocks for e in engines) / max(1, sum(e.prompt_blocks for e in engines))


def mean_ttft_s(engines: Sequence[EngineModel]) -> float:
    """Return the mean time to first token of all requests, in seconds; 0 without requests."""
    return sum(e.ttft_s for e in engines) / max(1, sum(e.requests for e in engines))


class SimulatedEngine(EngineModel):
    """An engine that takes real time for requests, and publishes KV events on its own sockets.

    `sleep` waits the given seconds, or less if the program stops. None: requests take no time."""

    def __init__(
        self,
        worker_id: int,
        capacity_blocks: int,
        block_size: int,
        speed: EngineSpeed,
        sleep: Callable[[float], Awaitable[None]] | None,
        endpoint: str = "tcp://127.0.0.1:0",
        replay_endpoint: str | None = "tcp://127.0.0.1:0",
    ) -> None:
        super().__init__(capacity_blocks, block_size, speed)
        self.worker_id = worker_id
        self._sleep = sleep
        self._publisher = KvEventPublisher(
            worker_id=worker_id,
            kv_block_size=block_size,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
        )

    def registration(self) -> dict[str, object]:
        """Return the body of POST /workers that registers this engine."""
        return {
            "worker_id": self.worker_id,
            "endpoint": f"http://127.0.0.1:{9_000 + self.worker_id}",  # never connected to
            "block_size": self.block_size,
            "max_num_batched_tokens": 8_192,
            "total_kv_blocks": self.cache.capacity,
            "kv_events_endpoints": {"0": self._publisher.endpoint},
            "replay_endpoint": self._publisher.replay_endpoint,
        }

    def begin(self, request: EngineRequest, now: float) -> RunningRequest:
        """Admits a request at the time `now`, and publishes the changes of the cache."""
        running, placed = self.admit(request, now)
        self._publish(request, 0, placed)
        return running

    async def prefill(self, request: EngineRequest) -> RunningRequest:
        """Admits a request, and waits until the request's prompt is computed."""
        now = asyncio.get_running_loop().time()
        running = self.begin(request, now)
        if self._sleep is not None:
            await self._sleep(running.prefill_done_at - now)
        return running

    async def decode(self, running: RunningRequest, index: int) -> None:
        """Waits until output block `index` is full, then publishes the block."""
        if self._sleep is not None:
            await self._sleep(self.decode_block_s)
        placed = self.decode_block(running, index)
        if placed is not None:
            self._publish(running.request, running.request.prompt_blocks + index, placed)

    def _publish(self, request: EngineRequest, first: int, placed: HeldChain) -> None:
        """Publishes, as one batch, which blocks were evicted and stored. `placed` is what
        BlockCache.hold returned for the blocks of `request` from index `first` on."""
        hashes, size = request.sequence_hashes, self.block_size
        start = first + placed.hit
        stop = start + placed.stored
        with self._publisher.batch() as batch:
            batch.publish_removed(block_hashes=[h ^ _ENGINE_BITS for h in placed.evicted])
            batch.publish_stored(
                token_ids=request.tokens[start * size : stop * size],
                block_hashes=[h ^ _ENGINE_BITS for h in hashes[start:stop]],
                parent_hash=hashes[start - 1] ^ _ENGINE_BITS if start else None,
            )

    def close(self) -> None:
        self._publisher.close()
