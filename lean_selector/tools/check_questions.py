"""What the check asks: the selector, event ports, replay endpoints, and a completion."""

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec

from lean_selector.core.index.shapes import BlockStored
from lean_selector.events.ingest_turns import IngestTurns
from lean_selector.events.kv_listener import KvReplay, ReplayEnd
from lean_selector.events.kv_sockets import replay_frames
from lean_selector.events.links import Links
from lean_selector.http.allowed_endpoints import base_without_version
from lean_selector.http.outbound import OutboundClient, OutboundFailed, Resolve
from lean_selector.tools.check_judgements import (
    Finding,
    Level,
    Readiness,
    SelectorFacts,
    WorkerRecord,
)
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.kv_events import NotABatch, batch_slices
from lean_selector.wire.selection_bodies import KvSource

# -- the selector ----------------------------------------------------------------------------------


class OverlapRow(msgspec.Struct):
    """One rank of POST /overlap_scores, in either dialect."""

    worker_id: int
    dp_rank: int
    device_blocks: int = 0


class OverlapScores(msgspec.Struct):
    workers: list[OverlapRow] = []


T = TypeVar("T")

_MOST_BYTES: Final = 256 << 20  # of an answer: a record takes a kilobyte
_NOT_SERVED: Final = (404, 405)


class NotASelector(Exception):
    """Nothing answers there, or no selection service; the message says which."""


class AskedSelector:
    """A running selection service at `url`, ours or the reference's."""

    def __init__(self, client: OutboundClient, url: str, timeout_s: float) -> None:
        self.url: Final = url.rstrip("/")
        self._client = client
        self._timeout_s = timeout_s

    async def facts(self) -> SelectorFacts:
        """Raises NotASelector."""
        try:
            ready = await self._client.get(f"{self.url}/ready", timeout_s=self._timeout_s)
            if ready.status in _NOT_SERVED:
                raise NotASelector(
                    f"GET {self.url}/ready: status {ready.status}: this is no selection service"
                )
            try:
                readiness = msgspec.json.decode(ready.body, type=Readiness)
            except msgspec.DecodeError:  # that of another service may be anything
                readiness = Readiness()
            workers = await self._told("/workers?detail=true", list[WorkerRecord])
            return SelectorFacts(
                ready.status == 200,
                workers,
                await self._told_if_served("/kv_sources", list[KvSource]),
                await self._told_if_served("/discovery", DiscoveryReport),
                readiness,
            )
        except OutboundFailed as error:
            raise NotASelector(error.message) from None

    async def _told_if_served(self, path: str, kind: type[T]) -> T | None:
        """None where it has no such route. Raises OutboundFailed and NotASelector."""
        try:
            return await self._told(path, kind)
        except OutboundFailed as error:
            if error.status in _NOT_SERVED:
                return None
            raise

    async def _told(self, path: str, kind: type[T]) -> T:
        """Raises OutboundFailed and NotASelector."""
        url = f"{self.url}{path}"
        try:
            text = await self._client.text(url, timeout_s=self._timeout_s, most_bytes=_MOST_BYTES)
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise NotASelector(
                f"GET {url}: this is no answer of a selection service: {error}"
            ) from None

    async def cached_blocks(
        self, worker: WorkerRecord, token_ids: list[int]
    ) -> dict[tuple[int, int], int]:
        """Cached blocks of this prompt by (worker_id, dp_rank), as the selector's index has it.

        Raises OutboundFailed, and DecodeError of msgspec.
        """
        body = {
            "model_name": worker.model_name,
            "tenant_id": worker.tenant_id,
            "routing_group": worker.tenant_id,  # the reference reads one name or the other
            "token_ids": token_ids,
        }
        url = f"{self.url}/overlap_scores"
        text = msgspec.json.encode(body)
        answer = await self._client.request("POST", url, text, timeout_s=self._timeout_s)
        if answer.status != 200:
            raise OutboundFailed(f"POST {url}: status {answer.status}", answer.status)
        rows = msgspec.json.decode(answer.body, type=OverlapScores).workers
        return {(row.worker_id, row.dp_rank): row.device_blocks for row in rows}


# -- event ports -----------------------------------------------------------------------------------
# Both sides of ZMTP greet at once. An HTTP server waits for a request, and answers ours, which no
# ZMQ socket takes for a greeting.

# The first ten bytes of ZMTP 2.0 and later: 0xff, eight that do not matter, 0x7f (spec 23/ZMTP).
_SIGNATURE_BYTES: Final = 10
_HTTP_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"
_HTTP_ANSWER: Final = b"HTTP/"


async def judge_port(
    resolve: Resolve, subject: str, field: str, endpoint: str, timeout_s: float
) -> Finding:
    """Whether ZMQ listens at `endpoint`, which stands in the worker's `field`."""
    level, what, mend = await _judged_port(resolve, endpoint, timeout_s)
    return Finding(level, subject, f"{field} {endpoint}{what}", mend)


async def _judged_port(
    resolve: Resolve, endpoint: str, timeout_s: float
) -> tuple[Level, str, str | None]:
    place = _place(endpoint)
    if place is None and endpoint.startswith("ipc://"):
        return Level.NOTE, ": not looked at from here", None
    if place is None:
        mend = "register tcp://HOST:PORT, with the host as the selector reaches it"
        return Level.ERROR, " is no address that can be connected to", mend
    try:
        async with asyncio.timeout(timeout_s):
            said = await _first_words(resolve, *place)
    except OSError as error:  # a timeout is one
        late = f"no connection in {timeout_s:g} s"
        why = late if isinstance(error, TimeoutError) else error.strerror or str(error)
        mend = "start the engine with KV events on that port, or register where it publishes them"
        return Level.ERROR, f": {why}", mend
    if said[:1] == b"\xff" and said[9:10] == b"\x7f":
        return Level.OK, ": ZMQ listens", None
    if said.startswith(_HTTP_ANSWER):
        mend = "the port of --kv-events-config is meant (vLLM: 5557), not that of the API"
        return Level.ERROR, ": an HTTP server listens there, no ZMQ", mend
    mend = "register the port of the engine's --kv-events-config"
    return Level.ERROR, ": what listens there is no ZMQ", mend


def _place(endpoint: str) -> tuple[str, int] | None:
    if not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host in ("", "*", "0.0.0.0", "::") or not (port.isascii() and port.isdigit()):
        return None
    return (host, int(port)) if 1 <= int(port) <= 0xFFFF else None


async def _first_words(resolve: Resolve, host: str, port: int) -> bytes:
    """What comes by itself, or for an HTTP request where nothing does."""
    failure = OSError("the name has no addresses")
    for _, address in await resolve(host, port):
        ip, at = str(address[0]), int(address[1])
        try:
            said = await _heard(ip, at, b"")
            return said or await _heard(ip, at, _HTTP_REQUEST)
        except OSError as error:
            failure = error
    raise failure


async def _heard(ip: str, port: int, request: bytes, patience_s: float = 0.5) -> bytes:
    reader, writer = await asyncio.open_connection(ip, port)
    try:
        writer.write(request)
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(patience_s):
                while len(heard) < _SIGNATURE_BYTES and (
                    more := await reader.read(_SIGNATURE_BYTES - len(heard))
                ):
                    heard += more
        return heard
    finally:
        writer.transport.abort()


# -- replay endpoints ------------------------------------------------------------------------------

# No engine has numbered so many batches: the answer is the end alone.
BEYOND_ALL: Final = 1 << 62
_MOST_BATCHES: Final = 10_000


class NoReplay(Exception):
    """No end of a replay came; the message says why in a few words."""


class Replays:
    """Over links of its own. From the thread of the loop only."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._turns = IngestTurns()

    async def stored_since(self, endpoint: str, first: int, idle_s: float) -> list[BlockStored]:
        """What batches from number `first` on stored; the engine may be silent for `idle_s`.

        Raises NoReplay.
        """
        payloads: list[bytes] = []

        def on_reply(frames: list[bytes]) -> bool:
            reply = replay_frames(frames)
            if reply is not None and reply[1]:
                payloads.append(reply[1])
                return len(payloads) == _MOST_BATCHES
            return reply is not None

        replay = KvReplay(
            self._links,
            self._turns,
            endpoint,
            first,
            may_go_on=lambda deadline: True,
            on_reply=on_reply,
        )
        end = await replay.run(idle_s)
        closing = replay.link.close()
        if closing is not None:
            await asyncio.gather(closing, return_exceptions=True)
        if end is ReplayEnd.STOPPED:
            raise NoReplay(replay.why_not())
        return [event for payload in payloads for event in _stored_in(payload)]


def _stored_in(payload: bytes) -> list[BlockStored]:
    try:
        return [
            event
            for batch in batch_slices(payload)
            if batch is not None
            for event in batch.events
            if isinstance(event, BlockStored)
        ]
    except NotABatch:
        return []


# -- a probe ---------------------------------------------------------------------------------------
# The prompt is new each time, made of small token ids that every vocabulary has, and equal for all
# engines, so that their hashes of its first block can be compared.

BLOCKS: Final = 2  # full ones; one token more, so that an engine keeps both
_TOKEN_IDS: Final = range(10, 100)
_LOOK_EVERY_S: Final = 0.1
_SAID_CHARACTERS: Final = 200


@dataclass(eq=False)
class Probe:
    """A probe of all engines whose blocks have `block_size` tokens."""

    selector: AskedSelector
    engines: OutboundClient
    replays: Replays
    block_size: int
    patience_s: float

    def __post_init__(self) -> None:
        self.prompt = random.choices(_TOKEN_IDS, k=BLOCKS * self.block_size + 1)

    async def run(self, worker: WorkerRecord) -> Finding:
        """A completion, then patience until the index has its blocks at this worker."""
        subject = f"worker {worker.worker_id}"
        try:
            await self._complete(worker)
        except OutboundFailed as error:
            mend = "check the engine, its model name and --worker-token-file"
            return Finding(Level.ERROR, subject, f"no completion: {error.message}", mend)
        try:
            async with asyncio.timeout(self.patience_s):
                while not await self._is_known(worker):  # noqa: ASYNC110  it is asked, not told
                    await asyncio.sleep(_LOOK_EVERY_S)
        except TimeoutError:
            return Finding(
                Level.ERROR,
                subject,
                f"a completion of {BLOCKS} blocks was answered, and no event of them came "
                f"in {self.patience_s:g} s",
                "start the engine with prefix caching and KV events (vLLM: "
                "--enable-prefix-caching --kv-events-config, SGLang: --kv-events-config)",
            )
        except (OutboundFailed, msgspec.DecodeError) as error:
            return Finding(Level.ERROR, "selector", f"POST /overlap_scores: {error}")
        what = f"the {BLOCKS} blocks of a completion came into the index as events"
        return Finding(Level.OK, subject, what)

    async def _complete(self, worker: WorkerRecord) -> None:
        body = {"model": worker.model_name, "prompt": self.prompt, "max_tokens": 1}
        url = f"{base_without_version(worker.endpoint or '')}/v1/completions"
        answer = await self.engines.request(
            "POST", url, msgspec.json.encode(body), timeout_s=max(self.patience_s, 30.0)
        )
        if answer.status != 200:
            said = answer.body[:_SAID_CHARACTERS].decode(errors="replace")
            raise OutboundFailed(f"POST {url}: status {answer.status}: {said}", answer.status)

    async def _is_known(self, worker: WorkerRecord) -> bool:
        cached = await self.selector.cached_blocks(worker, self.prompt)
        return any(
            blocks >= BLOCKS
            for (worker_id, _), blocks in cached.items()
            if worker_id == worker.worker_id
        )

    async def first_hash(self, source: KvSource) -> int | None:
        """What this engine calls the prompt's first block; None when its replay does not tell."""
        if source.replay_endpoint is None:
            return None
        first = 0 if source.last_seq is None else source.last_seq + 1
        try:
            stored = await self.replays.stored_since(source.replay_endpoint, first, self.patience_s)
        except NoReplay:
            return None
        for event in stored:
            if event.parent_hash is None and event.token_ids == self.prompt[: len(event.token_ids)]:
                return event.block_hashes[0]
        return None


def judge_hashes(hashes: dict[str, int]) -> Finding | None:
    """`hashes`: of one block, by engine."""
    if len(hashes) < 2:
        return None
    if len(set(hashes.values())) == 1:
        return Finding(Level.OK, "engines", f"{len(hashes)} of them name the same block alike")
    return Finding(
        Level.NOTE,
        "engines",
        "they name the same block differently, as each start of vLLM without PYTHONHASHSEED does: "
        "no matter here, where blocks are known by their tokens; a shared cache needs one seed",
    )
