"""Creates the replica sync of a service: its sockets, receivers and publishers.

The selector and the slot tracker use this module."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq.asyncio

from lean_selector.api.replies import Answer, SlicedAnswers
from lean_selector.app.host import StartError
from lean_selector.app.peer_access import credentials_of
from lean_selector.app.service_flags import ReplicaFlags, ServiceConfig
from lean_selector.core.replication.catch_up import CatchUp, Fate
from lean_selector.core.replication.events import (
    ReplicaApplier,
    ReplicaEvents,
    Verdict,
)
from lean_selector.core.replication.ledger import ReplicaTarget, copies_expire_s
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.peer_sessions import PeerSessions
from lean_selector.core.sessions.shapes import SessionEvent, SessionVerdict
from lean_selector.core.trackers import Trackers
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.curve_keys import CurveGate, check_curve, read_list, read_pair
from lean_selector.links.links import Links
from lean_selector.links.pub_socket import ReplicaSyncError
from lean_selector.parts import Part
from lean_selector.replicas.mesh import ReplicaSync
from lean_selector.replicas.snapshot_requests import CatchingUp
from lean_selector.tasks import supervise
from lean_selector.wire.exposition import Families, Sample, by, labels, table
from lean_selector.wire.replica_shapes import CurveState, PublisherState, SyncState
from lean_selector.wire.replica_snapshot import (
    encode_session_list,
    encode_snapshot,
    live_lines,
)

if TYPE_CHECKING:
    from lean_selector.app.selector_parts import SelectorCore

log = logging.getLogger("lean_selector.replica")

T = TypeVar("T")
Lookup = Callable[[str, str], ReplicaTarget | None]
_SMALL_SNAPSHOT = 100  # encoding takes up to a millisecond
_KIND_NAMES = {kind: kind.name.lower() for kind in EventKind}
_REASONS = [verdict for verdict in Verdict if verdict is not Verdict.APPLIED]


def _curve_state(gate: CurveGate | None) -> CurveState | msgspec.UnsetType:
    if gate is None:
        return msgspec.UNSET
    public = gate.pair.public.decode()
    return CurveState(public, len(gate.admitted), gate.refused, gate.last_refused)


def replica_gate(context: zmq.asyncio.Context, flags: ReplicaFlags) -> CurveGate:
    """Return the gate, which admits subscribing replicas by CURVE key. Raises StartError."""
    from zmq.auth.asyncio import AsyncioAuthenticator

    pair = _keys_in(flags.secret_key_file, "--replica-sync-curve-secret-key-file", read_pair)
    admitted: tuple[bytes, ...] = (pair.public,)
    if flags.peer_keys_file is not None:
        admitted = _keys_in(flags.peer_keys_file, "--replica-sync-curve-peer-keys-file", read_list)
    return CurveGate(AsyncioAuthenticator(context), pair, admitted)


def _keys_in(path: str | None, flag: str, read: Callable[[str], T]) -> T:
    assert path is not None
    try:
        check_curve()
        return read(path)
    except OSError as error:
        raise StartError(f"{flag}: {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise StartError(f"{flag}: {error}") from None


class Replication(Part):
    """Exchanges events about reservations with other replicas. Construction may raise StartError.
    Calls `on_applied(event, now)` after a peer's event has changed this replica's state."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        config: ServiceConfig,
        links: Links,
        router_id: int,
        lookup: Lookup,
        targets: Callable[[], Iterable[ReplicaTarget]],
        on_applied: Callable[[ReplicaEvent, float], None] = lambda event, now: None,
        sessions: PeerSessions | None = None,
    ) -> None:
        """`links` holds the process's outgoing ZMQ connections; `router_id` is this replica's id.
        `lookup` returns the partition of a model and tenant; `targets` returns all partitions. With
        `sessions`, their bindings to ranks are exchanged too."""
        self._lookup = lookup
        self._credentials = credentials_of(config.peers)  # for HTTP requests to peers
        self._allowed = links.allowed
        self._resolve = links.resolver.resolve
        self._targets = targets
        self._copies_expire_s = copies_expire_s(config.reservations.reservation_expiry_s)
        replica = config.replica
        assert replica.endpoint is not None
        self.advertise = replica.advertise
        self._given_urls = replica.catch_up
        self._catch_up_urls = list(replica.catch_up)  # including discovered peers
        self._catching_up: CatchingUp | None = None
        self._catching_up_task: asyncio.Task[None] | None = None
        self._snapshots = SlicedAnswers(
            "a snapshot", self._snapshot, asyncio.get_running_loop().call_soon
        )
        self._sessions = sessions
        self._session_lists = SlicedAnswers(
            "a list of sessions", self._session_list, asyncio.get_running_loop().call_soon
        )
        self.router_id = router_id
        self.applier = ReplicaApplier(self.router_id, lookup)
        self._on_applied = on_applied
        gate = None
        if replica.secret_key_file is not None:
            gate = replica_gate(context, replica)
        try:
            self.sync = ReplicaSync(
                context,
                replica.endpoint,
                replica.peers,
                self._on_event,
                router_id=self.router_id,
                advertise=replica.advertise,
                links=links,
                on_connected=self._want_catch_up,
                on_missed=self._want_catch_up,
                on_session=None if sessions is None else self._on_session,
                gate=gate,
            )
        except ReplicaSyncError as error:
            raise StartError(str(error)) from None
        self.events = ReplicaEvents(self.router_id, self._publish)

    def start(self) -> None:
        """Starts to receive events of peers. Call this on the running event loop."""
        self.sync.start()
        log.info(
            "replica sync is on at %s, process_id=%d", self.sync.bound_endpoint, self.router_id
        )

        if self._catch_up_urls:
            self._begin_catch_up()

    def catch_up_from(self, urls: list[str]) -> None:
        """Sets the URLs of discovered peers. Starts the task that copies reservations from peers,
        unless the task was started before or no URL is known."""
        self._catch_up_urls[:] = dict.fromkeys((*self._given_urls, *urls))
        if self._catch_up_urls and self._catching_up is None:
            self._begin_catch_up()

    def _begin_catch_up(self) -> None:
        self._catching_up = CatchingUp(
            CatchUp(self.router_id, self._lookup, self._copies_expire_s),
            self.sync,
            self._catch_up_urls,
            self._targets,
            self._on_event,
            self._sessions,
            client=self._client,
        )
        self._catching_up_task = supervise("catch-up", self._catching_up.run)

    def _client(self, url: str) -> OutboundClient:
        """Creates the client for a peer. The allowlist is checked unless a flag names the URL."""
        allowed = None if url in self._given_urls else self._allowed
        return OutboundClient(self._resolve, self._credentials, allowed)

    def _want_catch_up(self) -> None:
        if self._catching_up is not None:
            self._catching_up.request()

    async def close(self) -> None:
        if self._catching_up_task is not None:
            self._catching_up_task.cancel()
            await asyncio.gather(self._catching_up_task, return_exceptions=True)
        await self.sync.close()

    def _publish(self, event: ReplicaEvent) -> None:
        if self._catching_up is not None:
            self._catching_up.note(event)
        self.sync.publish(event)

    def _on_event(self, event: ReplicaEvent, now: float) -> Verdict:
        verdict = self.applier.apply(event, now)
        if self._catching_up is not None and verdict is not Verdict.OWN:
            self._catching_up.note(event)
        if verdict is Verdict.APPLIED or verdict is Verdict.UNKNOWN_REQUEST:
            self._on_applied(event, now)  # of a request that is not known, its leg may be
        return verdict

    def _on_session(self, event: SessionEvent, now: float) -> SessionVerdict:
        return SessionVerdict.OFF if self._sessions is None else self._sessions.apply(event, now)

    def session_list(self) -> Answer:
        """Return the answer to a replica that requests our bindings of sessions to ranks."""
        return self._session_lists.answer(at_once=self._sessions is None)

    def _session_list(self) -> Iterator[bytes]:
        sessions = self._sessions
        yield from encode_session_list(() if sessions is None else sessions.live(time.monotonic()))

    def register_peer(self, endpoint: str) -> bool:
        return self.sync.register_peer(endpoint)

    def deregister_peer(self, endpoint: str) -> bool:
        return self.sync.deregister_peer(endpoint)

    def peers(self) -> list[str]:
        return self.sync.peers()

    def snapshot(self) -> Answer:
        """Return the answer to a replica that requests our live reservations."""
        live = sum(len(target.slots.reservations) for target in self._targets())
        return self._snapshots.answer(at_once=live <= _SMALL_SNAPSHOT)

    def _snapshot(self) -> Iterator[bytes]:
        # Read the number first: then the snapshot contains all events up to it, and perhaps later
        # ones.
        sequence = self.sync.sequence
        lines = live_lines(self._targets(), self.router_id, time.monotonic())
        return encode_snapshot(self.router_id, sequence, lines)

    def families(self) -> Families:
        sync, applier, events = self.sync, self.applier, self.events

        def exchanged() -> Iterator[Sample]:
            for kind, name in _KIND_NAMES.items():
                yield labels(direction="out", kind=name, result="published"), events.counts[kind]
                for verdict in Verdict:
                    result = verdict.name.lower()
                    count = applier.counts[kind][verdict]
                    yield labels(direction="in", kind=name, result=result), count
            for result, count in (("undecodable", sync.undecodable), ("too_big", sync.too_big)):
                yield labels(direction="in", kind="unknown", result=result), count

        def peers() -> list[Sample]:
            states = Counter(peer.state for peer in sync.peer_states())
            known = ("resolving", "connecting", "connected", "disconnected")
            return by("state", {state: states[state] for state in known})

        return table({
            "replica_events_total": (exchanged,
                "Replica events by direction, kind and outcome."),
            "replica_send_overflows_total": (lambda: sync.overflows,
                "Times that a peer's send queue became full."),
            "replica_outbox_events": (lambda: sync.waiting,
                "Events waiting to be published to peers."),
            "replica_missed_events_total": (lambda: sync.heard.missed,
                "Events published by peers that never arrived."),
            "replica_peers": (peers, "Peers by connection state."),
        })  # fmt: skip

    def state(self) -> SyncState:
        now = time.monotonic()
        counts = self.applier.counts
        dropped = {
            verdict.name.lower(): sum(counts[kind][verdict] for kind in EventKind)
            for verdict in _REASONS
        }
        dropped["undecodable"] = self.sync.undecodable
        dropped["too_many_waiting"] = self.sync.dropped
        dropped["too_big"] = self.sync.too_big
        return SyncState(
            self.router_id,
            self.sync.peer_states(),
            self.sync.published,
            self.sync.refused,
            self.sync.overflows,
            self.sync.sequence,
            self.sync.received,
            self.sync.heard.missed,
            [
                PublisherState(
                    publisher.router_id,
                    publisher.sequence,
                    round(now - publisher.heard_at, 3),
                    publisher.missed,
                    publisher.gap_at > 0,
                )
                for publisher in self.sync.heard.publishers()
            ],
            {name: counts[kind][Verdict.APPLIED] for kind, name in _KIND_NAMES.items()},
            dropped,
            msgspec.UNSET
            if self._catching_up is None
            else {
                fate.name.lower(): self._catching_up.counts[fate]
                for fate in (Fate.BOOKED, Fate.UNFIT)
            },
            _curve_state(self.sync.gate),
        )


def selector_replication(core: "SelectorCore", sessions: PeerSessions | None) -> Replication:
    """Creates the replica sync of a selector, which has no workers yet. Raises StartError."""
    selector = core.selector

    def on_applied(event: ReplicaEvent, now: float) -> None:
        request_id = event.spec.request_id
        selector.load_changed(
            event.model_name,
            event.tenant_id,
            request_id,
            now,
            ended_by=None if event.kind is EventKind.ADD else event.router_id,
        )

    replication = Replication(
        core.context,
        core.config,
        core.links,
        core.router_id,
        selector.scheduling_partition,
        lambda: established(selector.catalog, None, None),
        on_applied,
        sessions,
    )
    selector.ledgers.events = replication.events
    if selector.sessions is not None:
        selector.sessions.publish(core.router_id, time.time_ns, replication.sync.publish)
    return replication


def tracker_replication(
    config: ServiceConfig, context: zmq.asyncio.Context, links: Links, trackers: Trackers
) -> Replication:
    """Creates the replica sync of a slot tracker, which has no workers yet. Raises StartError."""
    replication = Replication(
        context, config, links, secrets.randbits(64) or 1, trackers.lookup, trackers.in_order
    )
    trackers.ledgers.events = replication.events
    return replication
