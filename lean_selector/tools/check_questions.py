"""Requests of `lean-selector check` to the selector, event ports and replay endpoints; and what is
wrong with a registration, compared with what the engine reports about itself."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lean_selector.api.header_warnings import endpoint_fault
from lean_selector.api.judgements import Level, subject_of
from lean_selector.core.index.shapes import BlockStored
from lean_selector.discovery.particulars import Particulars
from lean_selector.events.kv_listener import KvReplay, ReplayEnd, replay_frames
from lean_selector.http.outbound import OutboundClient, OutboundFailed, Resolve
from lean_selector.links.link import HTTP, first_bytes_at, is_greeting, why_unreachable
from lean_selector.links.links import Links
from lean_selector.links.turns import Turns
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.findings import CheckedReadiness, CheckedWorker, Finding, SelectorFacts
from lean_selector.wire.fleet import Fleet
from lean_selector.wire.kv_events import NotABatch, batch_slices
from lean_selector.wire.selection_bodies import KvSource

# -- the selector ----------------------------------------------------------------------------------


class _OverlapRow(msgspec.Struct):
    """A row (one rank) of the answer of POST /overlap_scores, as in Dynamo 1.3 or 1.6."""

    worker_id: int
    device_blocks: int = 0


class _OverlapScores(msgspec.Struct):
    workers: list[_OverlapRow] = []


_MOST_BYTES: Final = 256 << 20  # of an answer; a record takes a kilobyte
_NOT_SERVED: Final = (404, 405)


class NotASelector(Exception):
    """The URL does not answer as a selection service does. The message says why."""


class AskedSelector:
    """The selection service that is checked: lean-selector or Dynamo's. `url` is its address."""

    def __init__(self, client: OutboundClient, url: str, timeout_s: float) -> None:
        self.url: Final = url.rstrip("/")
        self._client = client
        self._timeout_s = timeout_s

    async def facts(self) -> SelectorFacts:
        """Queries readiness, workers, sources and discoveries. Raises NotASelector."""
        url = f"{self.url}/ready"
        try:
            ready = await self._client.get(url, timeout_s=self._timeout_s)
        except OutboundFailed as error:
            raise NotASelector(error.message) from None
        if ready.status in _NOT_SERVED:
            raise NotASelector(f"GET {url}: status {ready.status}: not a selection service")
        try:
            readiness = msgspec.json.decode(ready.body, type=CheckedReadiness)
        except msgspec.DecodeError:  # another service may answer anything
            readiness = CheckedReadiness()
        return SelectorFacts(
            ready.status == 200,
            await self._fetch("/workers?detail=true", list[CheckedWorker]),
            await self._fetch("/kv_sources", list[KvSource] | None),
            await self._fetch("/discovery", DiscoveryReport | None),
            readiness,
        )

    async def fleet(self) -> Fleet:
        """Return the answer of GET /fleet. Raises NotASelector."""
        fleet: Fleet = await self._fetch("/fleet", Fleet)
        return fleet

    async def _fetch(self, path: str, kind: Any) -> Any:
        """Return the answer as `kind`; as null if the path is not served. Raises NotASelector."""
        url, refusal = f"{self.url}{path}", ""
        try:
            text = await self._client.text(url, timeout_s=self._timeout_s, most_bytes=_MOST_BYTES)
        except OutboundFailed as error:
            if error.status not in _NOT_SERVED:
                raise NotASelector(error.message) from None
            text, refusal = b"null", error.message
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            what = f"GET {url}: not an answer of a selection service: {error}"
            raise NotASelector(refusal or what) from None

    async def holders(
        self,
        worker: CheckedWorker,
        token_ids: list[int],
        blocks: int,
        is_eagle: bool | None = None,
    ) -> set[int]:
        """Return the ids of workers for which the selector believes `blocks` or more blocks of the
        prompt `token_ids` to be cached. `is_eagle`, if given, overrides that of the registration.

        Raises OutboundFailed, and msgspec's DecodeError."""
        body: dict[str, object] = {
            "model_name": worker.model_name,
            "tenant_id": worker.tenant_id,
            "routing_group": worker.tenant_id,  # the reference reads one of the two names
            "token_ids": token_ids,
        }
        if is_eagle is not None:
            body["is_eagle"] = is_eagle
        url = f"{self.url}/overlap_scores"
        text = msgspec.json.encode(body)
        answer = await self._client.request("POST", url, text, timeout_s=self._timeout_s)
        if answer.status != 200:
            raise OutboundFailed(f"POST {url}: status {answer.status}", answer.status)
        rows = msgspec.json.decode(answer.body, type=_OverlapScores).workers
        return {row.worker_id for row in rows if row.device_blocks >= blocks}


@dataclass(frozen=True)
class Asked:
    """What a check queries: the selector, engines over HTTP, and event ports over ZMQ.

    `patience_s`: how many seconds to wait for each answer, and for the KV events of a probe.
    `turn`: limits how many engines are queried at a time."""

    selector: AskedSelector
    engines: OutboundClient
    links: Links
    resolve: Resolve
    patience_s: float
    turn: asyncio.Semaphore


# -- event ports -----------------------------------------------------------------------------------


async def judge_port(asked: Asked, subject: str, field: str, endpoint: str) -> Finding:
    """Tests whether ZMQ listens at `endpoint`, registered as the `field` of the rank `subject`."""
    level, what, mend = await _judged_port(asked, endpoint)
    return Finding(level, subject, f"{field} {endpoint}{what}", mend)


async def _judged_port(asked: Asked, endpoint: str) -> tuple[str, str, str | None]:
    if (fault := endpoint_fault(endpoint)) is not None:
        mend = "register tcp://HOST:PORT, with the host as the selector reaches it"
        return Level.ERROR, f" {fault}", mend
    if endpoint.startswith("ipc://"):
        return Level.NOTE, ": not checked from here", None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    why: str | None = "the name has no addresses"
    said = b""
    try:
        async with asyncio.timeout(asked.patience_s):
            for address in await asked.resolve(host.strip("[]"), int(port)):
                why = await why_unreachable(address)
                if why is None:
                    said = await first_bytes_at(address)
                    break
    except TimeoutError:
        why = f"no connection in {asked.patience_s:g} s"
    except OSError as error:
        why = error.strerror or str(error)
    if why is not None:
        mend = "start the engine with KV events on that port, or register where it publishes them"
        return Level.ERROR, f": {why}", mend
    if said == HTTP:
        mend = "use the port of --kv-events-config (vLLM: 5557), not that of the API"
        return Level.ERROR, ": an HTTP server listens there, not ZMQ", mend
    if is_greeting(said):
        return Level.OK, ": ZMQ listens", None
    mend = "register the port of the engine's --kv-events-config"
    return Level.ERROR, ": the listener does not speak ZMQ", mend


# -- replay endpoints ------------------------------------------------------------------------------

# No engine has so many batches, so a replay from this number on is only the end marker.
BEYOND_ALL: Final = 1 << 62
_MOST_BATCHES: Final = 10_000


class NoReplay(Exception):
    """An engine's replay of KV events stopped before its end. The message says why."""


async def stored_since(asked: Asked, endpoint: str, first: int) -> list[BlockStored]:
    """Requests a replay of the batches from sequence number `first` on. Return their events that
    stored blocks. Raises NoReplay if the engine sends nothing for the time of our patience."""
    payloads: list[bytes] = []

    def on_reply(frames: list[bytes]) -> bool:
        reply = replay_frames(frames)
        if reply is not None and reply[1]:
            payloads.append(reply[1])
            return len(payloads) == _MOST_BATCHES
        return reply is not None

    replay = KvReplay(
        asked.links,
        Turns(),
        endpoint,
        first,
        may_go_on=lambda deadline: True,
        on_reply=on_reply,
    )
    end = await replay.run(asked.patience_s)
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
            for event in batch.events
            if isinstance(event, BlockStored)
        ]
    except NotABatch:
        return []


# -- what engines report about themselves ----------------------------------------------------------


def judge_engine(worker: CheckedWorker, told: Particulars) -> Iterator[Finding]:
    """Compares a worker's registration with what its engine reports about itself (`told`)."""
    subject = f"worker {worker.worker_id}"
    faults = [Finding(level, subject, what, mend) for level, what, mend in _faults(worker, told)]
    yield from faults
    if not faults:
        model = told.model_name or "an unnamed model"
        size = (
            f"blocks of {told.block_size} tokens" if told.block_size else "block size not reported"
        )
        yield Finding(Level.OK, subject, f"the engine at {worker.endpoint} has {model}, {size}")


def _faults(worker: CheckedWorker, told: Particulars) -> Iterator[tuple[str, str, str]]:
    size, model, blocks = told.block_size, told.model_name, told.total_kv_blocks
    if size is not None and worker.block_size not in (None, size):
        what = f"registered with blocks of {worker.block_size} tokens, the engine has {size}"
        mend = f'DELETE it and all workers of its model, then POST them with "block_size": {size}'
        yield Level.ERROR, f"{what}: its events are skipped", mend
    if model is not None and model != worker.model_name:
        what = f"registered for model {worker.model_name}, the engine serves {model}"
        mend = (
            f'clients request "model_name": "{worker.model_name}"; register the name that they use'
        )
        yield Level.WARNING, what, mend
    if blocks is not None and worker.total_kv_blocks != blocks:
        mend = f'PATCH /workers/{worker.worker_id} {{"total_kv_blocks": {blocks}}}'
        if worker.total_kv_blocks is None:
            what = "registered without total_kv_blocks: busy thresholds on blocks do not apply"
            yield Level.NOTE, f"{what} to it", mend
        else:
            what = f"total_kv_blocks {worker.total_kv_blocks}, the engine has {blocks}"
            yield Level.WARNING, f"registered with {what}", mend


def judge_ports(
    worker: CheckedWorker, told: Particulars, sources: Sequence[KvSource]
) -> Iterator[Finding]:
    """Compares a worker's registered event and replay endpoints with those in its engine's report.

    A different port may be correct, for example if a container's port is mapped. An endpoint that
    is registered for another worker is an error."""
    for source in sources:
        if source.worker_id != worker.worker_id:
            continue
        for field, reported, registered in (
            ("kv_events_endpoint", told.kv_events_endpoints, source.endpoint),
            ("replay_endpoint", told.replay_endpoints, source.replay_endpoint),
        ):
            own = (reported or {}).get(source.dp_rank)
            if own is not None and registered is not None and own != registered:
                yield from _judge_port(source, sources, field, own, registered)


def _judge_port(
    source: KvSource, sources: Sequence[KvSource], field: str, own: str, registered: str
) -> Iterator[Finding]:
    others = [
        each.worker_id
        for each in sources
        if own in (each.endpoint, each.replay_endpoint) and each.worker_id != source.worker_id
    ]
    what = f"{field} {registered} is registered, but the engine reports {own}"
    if others:
        what += f", which is registered for worker {others[0]}"
        mend = f"register {own} for worker {source.worker_id}, or correct its endpoint"
        yield Finding(Level.ERROR, subject_of(source), what, mend)
    elif own.rpartition(":")[2] != registered.rpartition(":")[2]:
        yield Finding(Level.NOTE, subject_of(source), f"{what}: correct only if a port is mapped")
