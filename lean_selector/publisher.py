"""KV event publishing for custom engines: reports the blocks of one rank over ZeroMQ.

Owns the PUB socket of one (worker, dp_rank), numbers the batches, and has a ROUTER socket that
replays recent batches to a service that missed them. Needs only pyzmq and msgspec, so that engines
import little. The format is vLLM's ("KV Event Publishing for Custom Engines" in Dynamo's router
examples): `[topic, sequence u64 BE, msgpack [ts, events, rank]]`."""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Self

import msgspec
import zmq

# The next three limits are vLLM's defaults (buffer_steps, hwm), so that all engines offer the same
# history and queue length.
PUB_SEND_HWM = 100_000  # messages queued per slow subscriber; above this PUB drops
REPLAY_BATCHES = 10_000
# vLLM bounds its replay buffer only by count; 10 000 batches of long prompts are over 600 MB.
REPLAY_BYTES = 256 * 1024 * 1024
# A reader of a replay that accepts no frames for this long is abandoned, because others wait.
REPLAY_SEND_TIMEOUT_MS = 2_000
LINGER_MS = 1_000  # close() waits at most this long for queued messages

DESCRIPTORS = 32  # must be free at start; a publisher uses up to 16

_END_OF_REPLAY = b"\xff" * 8
_I64_MAX = 2**63 - 1


_encode = msgspec.msgpack.Encoder().encode
_Event = dict[str, object]


def _given(**fields: object) -> _Event:
    return {name: value for name, value in fields.items() if value is not None}


def signed_hashes(hashes: Sequence[int]) -> list[int]:
    """Return 64-bit hashes as signed integers, the form in which they are sent.

    Accepts -2^63 to 2^64-1. Raises ValueError outside of this range."""
    if hashes and not (min(hashes) >= -(2**63) and max(hashes) < 2**64):
        raise ValueError("a block hash does not fit into 64 bits")
    return [value - 2**64 if value > _I64_MAX else value for value in hashes]


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of a data-parallel rank. For tcp, dp_rank is added to the port. Other
    endpoints get the suffix `_dp<rank>`. The endpoint is unchanged for rank 0, and for a port that
    the system chooses (`0` or `*`). Raises ValueError if the new tcp port is invalid."""
    head, _, port = endpoint.rpartition(":")
    if dp_rank == 0 or (endpoint.startswith("tcp:") and port in ("0", "*")):
        return endpoint
    if not endpoint.startswith("tcp:"):
        return f"{endpoint}_dp{dp_rank}"
    if not port.isdecimal() or int(port) + dp_rank > 65_535:
        raise ValueError(f"no port for dp_rank {dp_rank} in endpoint {endpoint}")
    return f"{head}:{int(port) + dp_rank}"


class _EventSink:
    def __init__(self, kv_block_size: int) -> None:
        if kv_block_size <= 0:
            raise ValueError("kv_block_size must be greater than 0")
        self.kv_block_size = kv_block_size  # tokens

    def _emit(self, event: _Event) -> None:
        raise NotImplementedError

    def publish_stored(
        self,
        event_id: int | None = None,
        token_ids: Sequence[int] = (),
        num_block_tokens: Sequence[int] | None = None,
        block_hashes: Sequence[int] = (),
        lora_id: int = 0,
        parent_hash: int | None = None,
        *,
        lora_name: str | None = None,
        medium: str | None = None,
        extra_keys: Sequence[object] | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Announces consecutive blocks of one sequence that the cache now holds.

        token_ids: the tokens of these blocks, in order; a full block has kv_block_size tokens.
        block_hashes: the engine's own cumulative hashes, signed or unsigned 64 bits.
        parent_hash: hash of the preceding block; None only at the start of a sequence.
        num_block_tokens: the number of tokens in each block; None if all are full. Blocks from
            the first partial block on are not sent, because no prompt could match them.
        lora_name: the adapter, which is part of a block's identity. lora_id is sent unchanged.
        medium: "GPU" (default), "CPU", "DISK".
        event_id has no effect: the batch's sequence number orders events. The parameter exists
        because Dynamo's documented signature has it.

        Raises ValueError when lengths disagree or a hash exceeds 64 bits; nothing is sent then."""
        count = len(block_hashes)
        if num_block_tokens is not None:
            if len(num_block_tokens) != count:
                raise ValueError(f"{len(num_block_tokens)} num_block_tokens for {count} blocks")
            full = (i for i, n in enumerate(num_block_tokens) if n != self.kv_block_size)
            count = next(full, count)
        if len(token_ids) < count * self.kv_block_size:
            raise ValueError(
                f"{len(token_ids)} token_ids for {count} blocks of {self.kv_block_size}"
            )
        if count == 0:
            return
        parent = None if parent_hash is None else signed_hashes([parent_hash])[0]
        self._emit(
            {
                "type": "BlockStored",
                "block_hashes": signed_hashes(block_hashes[:count]),
                "parent_block_hash": parent,
                "token_ids": list(token_ids[: count * self.kv_block_size]),
                "block_size": self.kv_block_size,
                "lora_id": lora_id or None,
                **_given(
                    medium=medium,
                    lora_name=lora_name,
                    extra_keys=None if extra_keys is None else extra_keys[:count],
                    cache_salt=cache_salt,
                ),
            }
        )

    def publish_removed(
        self,
        event_id: int | None = None,
        block_hashes: Sequence[int] = (),
        *,
        medium: str | None = None,
    ) -> None:
        """Announces blocks that the cache on this medium (default: the GPU) no longer holds.

        event_id has no effect, as in publish_stored. Raises ValueError for a hash beyond 64
        bits."""
        if block_hashes:
            hashes = signed_hashes(block_hashes)
            event = {"type": "BlockRemoved", "block_hashes": hashes, **_given(medium=medium)}
            self._emit(event)

    def publish_all_cleared(self) -> None:
        """Announces that this rank no longer has any blocks, on any medium."""
        self._emit({"type": "AllBlocksCleared"})


class SentBatch(_EventSink):
    """The batch of KvEventPublisher.batch(): events that are sent in one message."""

    def __init__(self, kv_block_size: int) -> None:
        super().__init__(kv_block_size)
        self.events: list[_Event] = []

    def _emit(self, event: _Event) -> None:
        self.events.append(event)


class KvEventPublisher(_EventSink):
    """Publishes the KV events of one (worker, dp_rank). Any thread may publish. Never blocks.

    PUB and ROUTER bind, because the service connects to the registered `kv_events_endpoints` and
    `replay_endpoint`. PUB drops messages for a subscriber that is more than PUB_SEND_HWM messages
    behind or not connected yet. With a replay endpoint, the service requests missed messages."""

    def __init__(
        self,
        component: object = None,
        worker_id: int = 0,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        *,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
    ) -> None:
        """Binds the sockets. dp_rank is added to the tcp ports of the endpoints (`rank_endpoint`).

        component and enable_local_indexer have no effect: there is no runtime to join, and no
        indexer inside the engine. worker_id is not sent, because the service identifies a worker by
        the endpoint that was registered for it.

        Raises ValueError for a bad block size or port, OSError if too few files can be opened,
        zmq.ZMQError if an address is in use."""
        super().__init__(kv_block_size)
        self.worker_id = worker_id
        self.data_parallel_rank = dp_rank
        self.sequence = 0  # number of the next batch, counted from 0
        self._topic = topic.encode()
        self._lock = threading.Lock()  # held while a batch is numbered, sent and stored
        self._kept: deque[tuple[int, bytes]] = deque()  # newest batches, numbered consecutively
        self._kept_bytes = 0
        self._replay: threading.Thread | None = None
        _need_descriptors()
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.set_hwm(PUB_SEND_HWM)
            self._pub.linger = LINGER_MS
            self._pub.bind(rank_endpoint(endpoint, dp_rank))
            #: Where the socket is bound, with the real port if the system chose it.
            self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint: str | None = None
            if replay_endpoint is not None:
                self._start_replay(rank_endpoint(replay_endpoint, dp_rank))
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _emit(self, event: _Event) -> None:
        self._send([event])

    @contextmanager
    def batch(self) -> Iterator[SentBatch]:
        """Collects events, and sends them as one message, even if the `with` block raises.

        Events before the exception are sent, because the cache has changed already."""
        batch = SentBatch(self.kv_block_size)
        try:
            yield batch
        finally:
            if batch.events:
                self._send(batch.events)

    def _send(self, events: list[_Event]) -> None:
        payload = _encode([time.time(), events, self.data_parallel_rank])
        with self._lock:
            number = self.sequence
            frames = [self._topic, number.to_bytes(8, "big"), payload]
            self._pub.send_multipart(frames, zmq.NOBLOCK)
            self.sequence = number + 1
            if self._replay is not None:
                self._keep(number, payload)

    def _keep(self, number: int, payload: bytes) -> None:
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _start_replay(self, endpoint: str) -> None:
        """Binds the ROUTER socket, and starts the thread that answers replay requests."""
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0  # a replay that close() interrupts is requested again
        router.sndtimeo = REPLAY_SEND_TIMEOUT_MS
        router.router_mandatory = True  # wait for a slow reader instead of dropping silently
        router.bind(endpoint)
        self.replay_endpoint = router.get_string(zmq.LAST_ENDPOINT)
        name = f"kv-replay-{self.worker_id}-{self.data_parallel_rank}"
        self._replay = threading.Thread(
            target=self._serve_replay, args=(router,), name=name, daemon=True
        )
        self._replay.start()

    def _serve_replay(self, router: "zmq.Socket[bytes]") -> None:
        """Answers replay requests `[identity, "", first sequence]` until the context ends."""
        with router:
            while True:
                try:
                    frames = router.recv_multipart()
                    if len(frames) == 3 and len(frames[2]) == 8:
                        self._answer(router, frames[0], int.from_bytes(frames[2], "big"))
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError:
                    continue  # the reader is gone or stopped reading; it may ask again

    def _answer(self, router: zmq.Socket[bytes], identity: bytes, start: int) -> None:
        # Replies have no topic frame: every known reader supports this form.
        with self._lock:
            oldest = self._kept[0][0] if self._kept else 0
            wanted = list(islice(self._kept, max(0, start - oldest), None))
        for number, payload in wanted:
            router.send_multipart([identity, b"", number.to_bytes(8, "big"), payload])
        router.send_multipart([identity, b"", _END_OF_REPLAY, b""])

    def close(self) -> None:
        """Sends queued events (for at most a second), stops the replay thread, frees the ports."""
        with self._lock:
            self._pub.close()
        self._context.term()  # wakes the replay thread, and waits for its socket
        if self._replay is not None:
            self._replay.join()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _need_descriptors() -> None:
    """Raises OSError if too few file descriptors are free. (libzmq would abort the process.)"""
    with ExitStack() as taken:
        for _ in range(DESCRIPTORS):
            taken.enter_context(open(os.devnull, "rb"))


class ZmqKvEventPublisher(KvEventPublisher):
    """A publisher with the name and signature that Dynamo documents. Rank 0 only, no replay."""

    def __init__(self, zmq_endpoint: str, kv_block_size: int, topic: str = "") -> None:
        """Binds zmq_endpoint. Raises ValueError, OSError or zmq.ZMQError, like the base class."""
        super().__init__(kv_block_size=kv_block_size, endpoint=zmq_endpoint, topic=topic)
