"""Engines that only publish: real PUB sockets, caches that fill and evict.

Owns which blocks each engine holds and the messages that tell it, in each layout. Prompts go to the
engines in turn; evictions are the cache's own. Does not decide when messages are sent, but for
`paced`.
"""

import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import msgspec
import zmq

from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulated_engines import BlockCache
from loadtest.child_service import ENDING_SIGNALS, wait_until
from loadtest.duel.prompts import MODEL_NAME, Prompt, Prompts
from loadtest.duel.targets import Service
from loadtest.traces import prompt_tokens

ZONES = 4  # the workers' taints: zone-0 and on
EVENT_BLOCKS = 64  # blocks of one stored event: a prefill step of 1 024 tokens
_SETTLE_TIMEOUT_S = 120.0
_CONNECT_S = 0.02  # for each engine, until a service that was told of it listens to it
_MARKER_TOKENS = 1 << 31  # above every token of the trace
_PACE_S = 0.002
# Above what 512 reservations of the trace need: the reference parks requests while every rank has
# 16 times this much prefill (its default), ours never does by default. Neither shall.
_BATCHED_TOKENS = 1_000_000


class Layout(msgspec.Struct, frozen=True):
    """How engines write their events: as tagged maps or as arrays, and their names of blocks."""

    title: str
    is_map: bool
    name: Callable[[int], int | bytes] = int
    adapter: str | None = None
    is_read: bool = True  # by the references; they skip such events if not
    more: dict[str, object] = {}  # behind the other fields of a stored event

    def stored(
        self,
        names: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        size: int,
        medium: str = "GPU",
    ) -> object:
        fields: dict[str, object] = {
            "type": "BlockStored",
            "block_hashes": [self.name(name) for name in names],
            "parent_block_hash": None if parent is None else self.name(parent),
            "token_ids": tokens,
            "block_size": size,
            "lora_id": None,
            "medium": medium,
        }
        if self.adapter is not None:
            fields |= {"lora_name": self.adapter, "extra_keys": [[self.adapter]] * len(names)}
        return self._event(fields | self.more)

    def removed(self, names: Sequence[int]) -> object:
        written = [self.name(name) for name in names]
        return self._event({"type": "BlockRemoved", "block_hashes": written, "medium": "GPU"})

    def _event(self, fields: dict[str, object]) -> object:
        return fields if self.is_map else list(fields.values())


def _signed(name: int) -> int:
    return (name ^ 1 << 63) - (1 << 63)


def _digest(name: int) -> bytes:
    return bytes(24) + name.to_bytes(8, "big")


ARRAYS = Layout("arrays, unsigned hashes", is_map=False)
LAYOUTS = (
    Layout("maps (vLLM 0.33)", is_map=True, more={"lora_name": None, "group_idx": 0}),
    Layout("maps, signed hashes (SGLang 0.5.23)", is_map=True, name=_signed),
    Layout("maps, digests (vLLM without int hashes)", is_map=True, name=_digest, is_read=False),
    Layout("maps, an adapter", is_map=True, adapter="adapter"),
    ARRAYS,
    Layout("arrays, signed hashes", is_map=False, name=_signed),
)


class Message(msgspec.Struct, frozen=True):
    """One batch of one engine, encoded; the blocks it stores and removes."""

    engine: int
    payload: bytes
    stored: int
    removed: int


_encode = msgspec.msgpack.Encoder().encode


def _batch(events: Sequence[object]) -> bytes:
    return _encode([0.0, events, 0])


def names_of(engine: int, prompt: Prompt) -> list[int]:
    """An engine's own hashes of a prompt's blocks."""
    own = (engine + 1) * 0x9E3779B97F4A7C15 & (2**63 - 1)
    return [name ^ own for name in struct.unpack(f"<{prompt.blocks}Q", prompt.sequence)]


class Engines(AbstractContextManager["Engines"]):
    """Engines 1 to `count`, each with a cache of `capacity` blocks and a socket.

    A stored event tells of at most `event_blocks` blocks; None: of all that a prompt adds.
    """

    def __init__(
        self,
        prompts: Prompts,
        count: int,
        capacity: int,
        event_blocks: int | None = EVENT_BLOCKS,
        *,
        offloads: bool = False,
        listened: bool = True,
        layout: Layout = ARRAYS,
        batch_events: int = 1,
    ) -> None:
        """`offloads`: what is stored is told of the host, too, which evicts nothing. `listened`:
        services are told where to hear them. `batch_events`: stored events in a message, at most.
        """
        self._event_blocks, self._layout, self._batch_events = event_blocks, layout, batch_events
        self._prompts = prompts
        self._offloads, self._listened = offloads, listened
        self.count = count
        self._capacity = capacity
        self._caches = [BlockCache(capacity) for _ in range(count)]
        self.used = 0  # prompts placed so far, of the trace in its order
        self._markers = 0
        self._sequence = [0] * count
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 16)
        self._sockets = [self._context.socket(zmq.PUB) for _ in range(count if listened else 0)]
        for socket in self._sockets:
            socket.set_hwm(0)  # what one of several slow readers has not read yet is never dropped
            socket.linger = 0
            socket.bind("tcp://127.0.0.1:*")

    @property
    def holdings(self) -> int:
        """Blocks held, each engine's counted."""
        return sum(map(len, self._caches))

    def register(self, service: Service) -> None:
        """Make every engine a worker of a service, and wait until none of its events is missed.

        Raises ServiceError when a worker is not schedulable or not heard.
        """
        for engine in range(self.count):
            worker: dict[str, object] = {
                "worker_id": engine + 1,
                "model_name": MODEL_NAME,
                "endpoint": f"http://127.0.0.1:{9_000 + engine}",  # named, never contacted
                "block_size": self._prompts.block_size,
                "max_num_batched_tokens": _BATCHED_TOKENS,
                "total_kv_blocks": self._capacity,
                "kv_events_endpoints": {},
                "taints": [f"zone-{engine % ZONES}"],
            }
            if self._listened:
                endpoint = self._sockets[engine].get_string(zmq.LAST_ENDPOINT)
                worker["kv_events_endpoints"] = {"0": endpoint}
            record = service.call("POST", "/workers", worker)
            if record["lifecycle"] != "schedulable":
                raise ServiceError(f"{service.name}: {record}")
        if not self._listened:
            return
        # What is told before the service listens is lost: tell again, the more seldom the larger.
        tokens, again_at = list[int](), 0.0

        def is_heard() -> bool:
            nonlocal tokens, again_at
            if (now := time.monotonic()) > again_at:
                tokens, again_at = self.mark(), now + _CONNECT_S * self.count
            return self._heard(service, tokens)

        wait_until(is_heard, f"{service.name}: all engines are heard", _SETTLE_TIMEOUT_S)

    def book(self, service: Service) -> None:
        """Put a reservation on every worker, no two alike, so that no two have the same load."""
        for engine in range(self.count):
            load = (engine * 37 + 11) % self.count  # apart from the order of the workers
            blocks = [(engine + 1) << 32 | at for at in range(load % 23)]
            service.book(f"held-{engine}", engine + 1, load, blocks)

    # -- what the engines do -----------------------------------------------------------------------

    def place(self) -> list[Message]:
        """The next prompt of the trace goes to the next engine: the messages that this makes."""
        engine, prompt = self.used % self.count, self._prompts.at(self.used)
        self.used += 1
        names = names_of(engine, prompt)
        cache = self._caches[engine]
        placed = cache.hold(names)
        cache.release(names[: placed.hit + placed.stored])
        size = self._prompts.block_size
        tokens = prompt_tokens(prompt.line) if placed.stored else []
        messages = list(self._removals(engine, placed.evicted))
        end = placed.hit + placed.stored
        step = self._event_blocks or max(1, placed.stored)
        media = ("GPU", "CPU") if self._offloads else ("GPU",)
        for first in range(placed.hit, end, step * self._batch_events):
            last = min(first + step * self._batch_events, end)
            events = []
            for at in range(first, last, step):
                to = min(at + step, last)
                told = names[at:to], names[at - 1] if at else None, tokens[at * size : to * size]
                events += [self._layout.stored(*told, size, medium) for medium in media]
            messages.append(Message(engine, _batch(events), last - first, 0))
        return messages

    def fill(self, holdings: int) -> Iterator[Message]:
        """Place prompts until this much is held; less than the caches' capacity."""
        if not self._listened:
            return
        assert holdings < self.count * self._capacity, "the caches never hold this much"
        while self.holdings < holdings:
            yield from self.place()

    def churn(self, blocks: int) -> list[Message]:
        """Place prompts until this many blocks were stored; full caches evict as many."""
        messages = list[Message]()
        stored = 0
        while stored < blocks:
            placed = self.place()
            messages += placed
            stored += sum(message.stored for message in placed)
        return messages

    def empty(self, engines: Iterable[int]) -> Iterator[Message]:
        """These engines remove all that they hold, least recently used first. Call it last."""
        for engine in engines:
            cache = self._caches[engine]
            evicted = cache.hold(range(self._capacity)).evicted  # makes room for something else
            yield from self._removals(engine, evicted)

    def _removals(self, engine: int, names: Sequence[int]) -> Iterator[Message]:
        """As vLLM tells it: an event per block, those of one step in one batch."""
        for at in range(0, len(names), EVENT_BLOCKS):
            part = names[at : at + EVENT_BLOCKS]
            events = [self._layout.removed([name]) for name in part]
            yield Message(engine, _batch(events), 0, len(part))

    # -- how it is told ----------------------------------------------------------------------------

    def send(self, messages: Iterable[Message]) -> int:
        """Send at full speed; the blocks stored and removed."""
        blocks = 0
        for message in messages:
            self._send(message.engine, message.payload)
            blocks += message.stored + message.removed
        return blocks

    def _send(self, engine: int, payload: bytes) -> None:
        number = self._sequence[engine]
        self._sockets[engine].send_multipart([b"", number.to_bytes(8, "big"), payload])
        self._sequence[engine] = number + 1

    def mark(self) -> list[int]:
        """Every engine stores one block that is new: its tokens, for `settle`."""
        self._markers += 1
        size = self._prompts.block_size
        tokens = [_MARKER_TOKENS + self._markers] * size
        for engine in range(self.count):
            stored = ARRAYS.stored([(1 << 62) + self._markers], None, tokens, size)
            self._send(engine, _batch([stored]))
        return tokens

    def _heard(self, service: Service, tokens: list[int]) -> bool:
        body = {"model_name": MODEL_NAME, "token_ids": tokens}
        rows = service.call("POST", "/overlap_scores", body)["workers"]
        return len([row for row in rows if row["device_blocks"]]) == self.count

    def settle(self, *services: Service) -> None:
        """Return when the services have applied all that was sent. Raises ServiceError.

        Events of an engine are applied in order, so a block that is told last is enough to ask for.
        """
        if not self._listened:
            return
        tokens = self.mark()
        for service in services:
            is_heard = partial(self._heard, service, tokens)
            wait_until(is_heard, f"{service.name}: events are applied", _SETTLE_TIMEOUT_S)

    @contextmanager
    def paced(self, messages: Sequence[Message], blocks_per_s: float) -> Iterator[None]:
        """Send this many stored blocks a second meanwhile; at the end at once what is left."""
        stop = threading.Event()
        thread = threading.Thread(target=self._send_paced, args=(messages, blocks_per_s, stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            # What was not sent belongs to caches that have it already: the index must have it too.

    def _send_paced(
        self, messages: Sequence[Message], blocks_per_s: float, stop: threading.Event
    ) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)  # they are for the main thread
        started, stored = time.monotonic(), 0
        for at, message in enumerate(messages):
            while stored > (time.monotonic() - started) * blocks_per_s:
                if stop.wait(_PACE_S):
                    self.send(messages[at:])
                    return
            self._send(message.engine, message.payload)
            stored += message.stored

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)
