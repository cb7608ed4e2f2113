"""Subscriptions to the events of other replicas. Received messages are handled in time slices.

This module does not interpret the messages. Spec: slot_tracker.md 3.1 and 3.6."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import zmq

from lean_selector.links.curve_keys import CurveClient
from lean_selector.links.link import Link, LinkState, Message
from lean_selector.links.links import Links
from lean_selector.links.pub_socket import MAX_MESSAGE_BYTES
from lean_selector.links.turns import Turns
from lean_selector.wire.replica_shapes import PeerState

log = logging.getLogger("lean_selector.replica")


class ReplicaLinks:
    """Subscribes to all added replicas, from start() to close(). Used only on the loop's thread."""

    def __init__(
        self,
        links: Links,
        topics: Sequence[bytes],
        on_message: Callable[[Message, float], None],
        on_connected: Callable[[], None],
        curve: CurveClient | None = None,
    ) -> None:
        """Calls `on_message(frames, now)` for each message with one of `topics`. A peer's messages
        stay in order. Calls `on_connected()` when a peer is connected or reconnected."""
        self._links = links
        self._curve = curve
        self._topics = topics
        self._on_message = on_message
        self._on_connected = on_connected
        self._is_started = False
        self._peers: dict[str, Link] = {}
        self._states: dict[str, tuple[str, float]] = {}  # (state, since)
        self._turns = Turns()  # for all peers together
        self._ending: set[asyncio.Task[None]] = set()
        self._dropped = 0  # messages dropped by the links of removed peers

    def start(self) -> None:
        """Start connecting to the added replicas. Call this on the running event loop."""
        self._is_started = True
        for link in self._peers.values():
            link.start()

    async def close(self) -> None:
        for endpoint in list(self._peers):
            self.remove(endpoint)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def __contains__(self, endpoint: str) -> bool:
        return endpoint in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, endpoint: str) -> None:
        def drain(deadline: float) -> bool:
            while (message := link.take()) is not None:
                self._on_message(message, time.monotonic())
                if time.perf_counter() >= deadline:
                    return True
            return False

        def failed(error: Exception) -> None:  # our bug; continue with the next message
            log.error("message of replica peer %s failed", endpoint, exc_info=error)
            wake()

        def wake() -> None:
            self._turns.start(drain, failed)

        link = Link(
            self._links,
            endpoint,
            zmq.SUB,
            self._subscribe,
            wake,
            lambda: self._note(link),
            max_message_bytes=MAX_MESSAGE_BYTES,
            curve=self._curve,
        )
        self._peers[endpoint] = link
        self._states[endpoint] = "connecting", time.monotonic()
        if self._is_started:
            link.start()

    def _subscribe(self, socket: zmq.Socket[bytes]) -> None:
        for topic in self._topics:
            socket.setsockopt(zmq.SUBSCRIBE, topic)

    def remove(self, endpoint: str) -> None:
        link = self._peers.pop(endpoint)
        del self._states[endpoint]
        self._dropped += link.dropped
        task = link.close()
        if task is not None:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    @property
    def dropped(self) -> int:
        """How many messages were dropped because too many messages of a peer were unread."""
        return self._dropped + sum(link.dropped for link in self._peers.values())

    def states(self) -> list[PeerState]:
        """Return the state of the connection to each peer, sorted by the peers' endpoints."""
        now = time.monotonic()
        states = []
        for endpoint, link in sorted(self._peers.items()):
            state, since = self._states[endpoint]
            since_s = round(now - since, 3)
            states.append(PeerState(endpoint, state, since_s, link.retries, link.error))
        return states

    def _note(self, link: Link) -> None:
        if link.state is LinkState.CONNECTED:
            state = "connected"
        elif link.was_connected:
            state = "disconnected"
        elif link.state is LinkState.RESOLVING:
            state = "resolving"
        else:
            state = "connecting"
        endpoint = link.endpoint
        if state == self._states[endpoint][0]:
            return
        self._states[endpoint] = state, time.monotonic()
        fields = {"endpoint": endpoint, "state": state}
        log.info("replica peer %s is %s", endpoint, state, extra=fields)
        if state == "connected":
            self._on_connected()
