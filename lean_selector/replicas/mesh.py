"""Replica sync on the network: one PUB socket, and a subscription to every peer's PUB socket.

Adds and removes peers (spec: slot_tracker.md 3.1 and 3.6). Received messages are handled in time
slices; decoded events are passed to `on_event` uninterpreted. `pub_socket` has the PUB socket.

Events that are published in one turn of the loop are sent after the turn, in the order of the
calls. So HTTP responses are sent before the events, and libzmq's thread wakes once. `overflows`
counts how often a peer's queue became full, not how many events were lost (`pub_socket`).

Events are numbered, so that receivers detect losses. A heartbeat every second carries the number of
the last event, so that a loss at the end of a burst is detected too (decision D24)."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import zmq
import zmq.asyncio

from lean_selector.core.errors import BadRequest, Conflict, SelectorError
from lean_selector.core.replication.events import ReplicaSequences, Verdict
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.core.sessions.shapes import SessionEvent, SessionVerdict
from lean_selector.core.zmq_endpoints import check_endpoint
from lean_selector.links.curve_keys import CurveClient, CurveGate
from lean_selector.links.link import Link, LinkState, check_link
from lean_selector.links.links import Links
from lean_selector.links.pub_socket import MAX_MESSAGE_BYTES, ReplicaPub, ReplicaSyncError
from lean_selector.links.turns import SLICE_S, Turns
from lean_selector.tasks import supervise
from lean_selector.wire.replica_frames import (
    HEARTBEAT_TOPIC,
    MAX_EVENT_BYTES,
    MAX_SESSION_BYTES,
    SESSION_TOPIC,
    TOPIC,
    TooBig,
    UndecodableFrames,
    decode_event,
    decode_heartbeat,
    decode_session,
    encode_event,
    encode_heartbeat,
    encode_session,
    payload_of,
)
from lean_selector.wire.replica_shapes import PeerState

log = logging.getLogger("lean_selector.replica")

# Length of each peer's queue. libzmq's default of 1000 events loses bursts; the reference has
# queues of 100 000. All queues share a message's bytes. The heartbeat disconnects a peer that hangs
# for 15-20 s.
HIGH_WATER_MARK = 100_000
# Capacity of the outbox, as in the reference, for bursts larger than a turn can send.
MAX_OUTBOX = 100_000
# Events sent per turn of the loop from a backlog; fewer if SLICE_S is over first.
MAX_EVENTS_PER_TURN = 256
# A turn of the loop publishes some hundreds of events; this many take some 4 ms.
MAX_DUE_PER_TURN = 1_024
# A service has a handful of replicas.
MAX_PEERS = 256
# A loss at the end of a burst is detected after at most this time; a heartbeat has 60 bytes.
HEARTBEAT_S = 1.0

WARN_EVERY_S = 10.0
# Verdicts that indicate a configuration error: a worker or model is missing on one replica.
_WORTH_A_WARNING = (
    Verdict.UNKNOWN_PARTITION,
    Verdict.BLOCK_SIZE,
    Verdict.RANK,
    Verdict.WORKER_MISMATCH,
)
_SESSION_WORTH_A_WARNING = (
    SessionVerdict.UNKNOWN_PARTITION,
    SessionVerdict.UNKNOWN_WORKER,
    SessionVerdict.TOO_LONG,
    SessionVerdict.SEQUENCE,
    SessionVerdict.FULL,
)


class _Peer:
    """The subscription to one replica. Its messages stay in order."""

    def __init__(self, sync: "ReplicaSync", endpoint: str) -> None:
        self._sync = sync
        self.state, self.since = "connecting", time.monotonic()
        self.link = Link(
            sync.links,
            endpoint,
            zmq.SUB,
            self._subscribe,
            self._wake,
            self._note,
            max_message_bytes=MAX_MESSAGE_BYTES,
            curve=sync.curve,
        )

    def _subscribe(self, socket: zmq.Socket[bytes]) -> None:
        for topic in self._sync.topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)

    def _wake(self) -> None:
        self._sync.turns.start(self._drain, self._failed_to_drain)

    def _drain(self, deadline: float) -> bool:
        while (message := self.link.take()) is not None:
            self._sync.handle(message, time.monotonic())
            if time.perf_counter() >= deadline:
                return True
        return False

    def _failed_to_drain(self, error: Exception) -> None:  # our bug; go on with the next message
        log.error("message of replica peer %s failed", self.link.endpoint, exc_info=error)
        self._wake()

    def _note(self) -> None:
        link, state = self.link, "connecting"
        if link.state is LinkState.CONNECTED:
            state = "connected"
        elif link.was_connected:
            state = "disconnected"
        elif link.state is LinkState.RESOLVING:
            state = "resolving"
        if state == self.state:
            return
        self.state, self.since = state, time.monotonic()
        fields = {"endpoint": link.endpoint, "state": state}
        log.info("replica peer %s is %s", link.endpoint, state, extra=fields)
        if state == "connected":
            self._sync.on_connected()


class ReplicaSync:
    """The replica mesh of one process. Used only on the loop where it was started.

    `bind` is a port (on all IPv4 interfaces) or a ZMQ endpoint. `on_event(event, now)` handles each
    decoded event and returns the outcome; `now` is in monotonic seconds. `on_session(event, now)`
    handles session events; if None, we do not subscribe to session events. `router_id` is the
    sender id of published events. `advertise`, the endpoint at which peers reach us, is refused as
    a peer. `on_connected()` is called when a subscription is made or restored, `on_missed()` when
    events were missed. If `gate` is given, peers must use CURVE with a key that the gate admits.
    `close` also closes the gate. Raises ReplicaSyncError if the mesh cannot be set up."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        bind: int | str,
        peers: Iterable[str],
        on_event: Callable[[ReplicaEvent, float], Verdict],
        *,
        router_id: int,
        advertise: str | None = None,
        high_water_mark: int = HIGH_WATER_MARK,
        links: Links | None = None,
        on_connected: Callable[[], None] = lambda: None,
        on_missed: Callable[[], None] = lambda: None,
        on_session: Callable[[SessionEvent, float], SessionVerdict] | None = None,
        gate: CurveGate | None = None,
    ) -> None:
        self.published = 0
        self.overflows = 0
        self.refused = 0  # not sent, because the outbox was full or the event too large
        self.received = 0
        self.undecodable = 0
        self.too_big = 0  # received, but too large to be decoded
        self.sequence = 0  # events published so far, sent or refused
        self.heard = ReplicaSequences()
        self._router_id = router_id
        self._on_event = on_event
        self._advertise = advertise
        self._on_missed = on_missed
        self._on_session = on_session
        self.topics = [TOPIC] if on_session is None else [TOPIC, SESSION_TOPIC]
        self.links = links or Links(context)
        self.turns = Turns()  # for the messages of all peers together
        self.gate = gate
        self.curve = None if gate is None else CurveClient(gate.pair, gate.admitted)
        self.on_connected = on_connected
        self._peers: dict[str, _Peer] = {}
        self._ending: set[asyncio.Task[None]] = set()
        # Messages dropped because too many of a peer were unread, but for those of present peers.
        self._dropped = 0
        self._warnings = DropWarnings()
        self._beating: asyncio.Task[None] | None = None
        self._outbox: deque[ReplicaEvent | SessionEvent] = deque()
        self._left = 0  # events in the outbox from earlier turns
        self._is_flushing = False
        self._call_soon = asyncio.get_running_loop().call_soon
        endpoint = f"tcp://*:{bind}" if isinstance(bind, int) else bind
        self._pub = ReplicaPub(context, endpoint, high_water_mark, gate)
        try:
            for peer in peers:
                try:
                    self.register_peer(peer)
                except SelectorError as error:
                    raise ReplicaSyncError(
                        f"invalid replica peer endpoint `{peer}`: {error.message}"
                    ) from None
        except BaseException:
            self._pub.close()
            raise

    @property
    def bound_endpoint(self) -> str:
        """The endpoint where the PUB socket listens, with the actual port if port 0 was given."""
        return self._pub.endpoint

    @property
    def waiting(self) -> int:
        """How many published events wait to be sent."""
        return len(self._outbox)

    def start(self) -> None:
        """Start to connect to peers and to receive events. Call this on the running event loop."""
        assert self._beating is None, "started twice"
        if self.gate is not None:
            self.gate.start()
        self._beating = supervise("replica heartbeat", self._beat)
        for peer in self._peers.values():
            peer.link.start()

    async def close(self) -> None:
        """Stop at once, and drop the events that wait to be sent to peers."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        for endpoint in list(self._peers):
            self._remove(endpoint)
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._outbox.clear()
        self._pub.close()
        if self.gate is not None:
            self.gate.close()

    # -- publishing --------------------------------------------------------------------------------

    def publish(self, event: ReplicaEvent | SessionEvent) -> None:
        """Queue an event for all connected peers. The queued events are sent after this turn of the
        loop, in order. Never waits and never fails."""
        if len(self._outbox) >= MAX_OUTBOX:
            self.refused += 1
            if isinstance(event, ReplicaEvent):
                self.sequence += 1  # refused events count too, so that peers detect the loss
            self._warnings.warn(time.monotonic(), "the outbox is full", name_of(event))
            return
        self._outbox.append(event)
        if not self._is_flushing:
            self._is_flushing = True
            self._call_soon(self._flush)

    def _flush(self) -> None:
        """Send queued events, oldest first. Sends at least as many as were queued since the last
        flush (up to MAX_DUE_PER_TURN), so that the queue does not fill under sustained load. Sends
        more until SLICE_S is over, up to MAX_EVENTS_PER_TURN in total."""
        outbox = self._outbox
        if self._pub.socket.closed:  # reservations that are freed after the end are not published
            outbox.clear()
        due = min(len(outbox) - self._left, MAX_DUE_PER_TURN)
        ends = time.monotonic() + SLICE_S
        for done in range(1, min(len(outbox), max(due, MAX_EVENTS_PER_TURN)) + 1):
            event = outbox.popleft()
            try:
                self._send(event)
            except Exception:
                log.exception("replica event not sent: %s", name_of(event))
            if done >= due and time.monotonic() >= ends:
                break
        self._left = len(outbox)
        self._is_flushing = bool(outbox)
        if self._is_flushing:
            self._call_soon(self._flush)

    def _send(self, event: ReplicaEvent | SessionEvent) -> None:
        if isinstance(event, ReplicaEvent):
            self.sequence += 1
            topic, payload, most = TOPIC, encode_event(event, self.sequence), MAX_EVENT_BYTES
        else:  # session events have no number, as in the reference; the next one repeats them
            topic, payload, most = SESSION_TOPIC, encode_session(event), MAX_SESSION_BYTES
        if len(payload) > most:
            self.refused += 1
            self._warnings.warn(time.monotonic(), "too big for peers", name_of(event))
            return
        if not self._pub.send(topic, payload):
            self._warnings.warn(time.monotonic(), "queue of a peer is full", name_of(event))
            self.overflows += 1
        self.published += 1

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._pub.send(HEARTBEAT_TOPIC, encode_heartbeat(self._router_id, self.sequence))

    # -- peers -------------------------------------------------------------------------------------

    def register_peer(self, endpoint: str) -> bool:
        """Subscribe to a peer. Return False if the peer is registered already.

        Connects in the background. Events of the next few hundred milliseconds may be missed.
        Raises BadRequest for an invalid or forbidden endpoint, Conflict for too many peers."""
        _check(endpoint)
        if endpoint == self._advertise:
            raise BadRequest("peer endpoint matches this replica's advertised endpoint")
        if endpoint in self._peers:
            return False
        refusal = None if self.links.allowed is None else self.links.allowed.refusal(endpoint)
        if refusal is not None:
            raise BadRequest(f"endpoint: {refusal}")
        if len(self._peers) >= MAX_PEERS:
            raise Conflict(f"no more than {MAX_PEERS} replica peers")
        try:
            check_link(endpoint)
        except ValueError:
            raise BadRequest(f"failed to register replica peer `{endpoint}`") from None
        peer = self._peers[endpoint] = _Peer(self, endpoint)
        if self._beating is not None:
            peer.link.start()
        log.info("replica peer registered", extra={"endpoint": endpoint})
        return True

    def deregister_peer(self, endpoint: str) -> bool:
        """Disconnect from a peer. Return False if there is no such peer. Raises BadRequest."""
        _check(endpoint)
        if endpoint not in self._peers:
            return False
        self._remove(endpoint)
        log.info("replica peer deregistered", extra={"endpoint": endpoint})
        return True

    def _remove(self, endpoint: str) -> None:
        link = self._peers.pop(endpoint).link
        self._dropped += link.dropped
        task = link.close()
        if task is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def peers(self) -> list[str]:
        return sorted(self._peers)

    def peer_states(self) -> list[PeerState]:
        """Return the state of each peer, sorted by endpoint."""
        now = time.monotonic()
        return [
            PeerState(
                endpoint, peer.state, round(now - peer.since, 3), peer.link.retries, peer.link.error
            )
            for endpoint, peer in sorted(self._peers.items())
        ]

    # -- receiving ---------------------------------------------------------------------------------

    @property
    def dropped(self) -> int:
        """How many messages were dropped because too many messages of a peer were unread."""
        return self._dropped + sum(peer.link.dropped for peer in self._peers.values())

    def handle(self, frames: list[bytes], now: float) -> None:
        try:
            if frames[0] == HEARTBEAT_TOPIC:
                beat = decode_heartbeat(frames)
                self._count(self.heard.heartbeat, beat.router_id, beat.lean_sequence, now)
                return
            self.received += 1
            if frames[0] == SESSION_TOPIC and self._on_session is not None:
                session = decode_session(frames)
                self._warnings.judge(session, self._on_session(session, now), now)
            else:
                self._receive(decode_event(payload_of(frames)), now)
        except TooBig as too_big:
            self.too_big += 1
            self._warnings.warn(now, "too big", str(too_big))
        except UndecodableFrames as error:
            self.undecodable += 1
            self._warnings.warn(now, "undecodable", str(error))

    def _receive(self, event: ReplicaEvent, now: float) -> None:
        try:
            verdict = self._on_event(event, now)
        except Exception:
            log.exception("replica event failed: %s", name_of(event))
        else:
            self._warnings.judge(event, verdict, now)
        if event.sequence is not None:
            self._count(self.heard.event, event.router_id, event.sequence, now)

    def _count(
        self, count: Callable[[int, int, float], int], router_id: int, sequence: int, now: float
    ) -> None:
        """Record the number of a peer's event or heartbeat, and log how many never arrived."""
        missed = 0 if router_id == self._router_id else count(router_id, sequence, now)
        if missed:
            self._warnings.warn(now, "never arrived", f"{missed} from router {router_id}", missed)
            self._on_missed()


def _check(endpoint: str) -> None:
    """Raise BadRequest if the endpoint is invalid, or has the TCP port 0."""
    try:
        check_endpoint(endpoint)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if endpoint.startswith("tcp://") and int(endpoint.rpartition(":")[2]) == 0:
        raise BadRequest(f"invalid ZMQ endpoint `{endpoint}`: port must be greater than zero")


class DropWarnings:
    """Logs dropped replica events, per reason at most one line in WARN_EVERY_S seconds."""

    def __init__(self) -> None:
        # Reason -> (time of the last log line, number of events since then)
        self._said: dict[str, tuple[float, int]] = {}

    def judge(
        self, event: ReplicaEvent | SessionEvent, verdict: Verdict | SessionVerdict, now: float
    ) -> None:
        """Warn if an event was dropped for a reason that suggests a configuration error."""
        is_session = isinstance(event, SessionEvent)
        if verdict in (_SESSION_WORTH_A_WARNING if is_session else _WORTH_A_WARNING):
            self.warn(now, verdict.name.lower().replace("_", " "), name_of(event))

    def warn(self, now: float, reason: str, detail: str, events: int = 1) -> None:
        """Log dropped events, each reason once in WARN_EVERY_S. `detail` describes the last one."""
        last, count = self._said.get(reason, (-WARN_EVERY_S, 0))
        count += events
        if now - last < WARN_EVERY_S:
            self._said[reason] = last, count
            return
        self._said[reason] = now, 0
        log.warning("replica events dropped (%s): %d; the last: %s", reason, count, detail)


def name_of(event: ReplicaEvent | SessionEvent) -> str:
    """Describe a replica event for a log line. Text that came from peers is quoted."""
    if isinstance(event, SessionEvent):
        return (
            f"session {event.session_id!r} of model={event.model_name!r} "
            f"tenant={event.routing_group!r} worker={event.worker_id} dp_rank={event.dp_rank} "
            f"from router {event.writer_id}"
        )
    spec = event.spec
    return (
        f"{event.kind.name} {spec.request_id!r} of model={event.model_name!r} "
        f"tenant={event.tenant_id!r} block_size={event.block_size} worker={spec.worker_id} "
        f"dp_rank={spec.dp_rank} from router {event.router_id}"
    )
