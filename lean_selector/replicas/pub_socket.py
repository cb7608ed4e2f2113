"""The PUB socket that publishes events to replicas.

A PUB never blocks and drops messages if a queue is full, so an HTTP handler can publish without
awaiting.

libzmq does not count messages that it drops for a slow peer. With XPUB_NODROP a send fails for all
peers (EAGAIN) if one queue is full; it is then repeated without the option, which reaches the
others. After that, libzmq skips the full queue silently until half of it is read."""

import os
from typing import Any, Final

import zmq
import zmq.asyncio

from lean_selector.events.curve_keys import CurveGate
from lean_selector.replicas.peer_links import MAX_MESSAGE_BYTES

_OPTIONS: Final = {
    zmq.LINGER: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.HEARTBEAT_IVL: 5_000,
    zmq.HEARTBEAT_TIMEOUT: 15_000,
    zmq.HEARTBEAT_TTL: 15_000,
}


class ReplicaSyncError(Exception):
    """Replica sync cannot start; the message is one line."""


class ReplicaPub:
    """Used only on the loop's thread. Raises ReplicaSyncError if it cannot be bound."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        high_water_mark: int,
        gate: CurveGate | None = None,
    ) -> None:
        """With a `gate`, only peers that it admits can subscribe."""
        make: Any = context.socket
        plain: zmq.Socket[bytes] = make(zmq.PUB, socket_class=zmq.Socket)
        self.socket: Final = plain
        try:
            for option, value in _OPTIONS.items():
                plain.setsockopt(option, value)
            plain.setsockopt(zmq.SNDHWM, high_water_mark)
            plain.setsockopt(zmq.XPUB_NODROP, 1)
            plain.setsockopt(zmq.IPV6, "[" in endpoint)
            if gate is not None:
                gate.guard(plain)
            # libzmq's bind lists the network interfaces, and aborts the process if no descriptor is
            # free.
            os.close(os.open(os.devnull, os.O_RDONLY))
            plain.bind(endpoint)
        except (OSError, zmq.ZMQError) as error:
            plain.close(0)
            reason = zmq.strerror(error.errno or 0)
            raise ReplicaSyncError(
                f"failed to bind replica publisher to `{endpoint}`: {reason}"
            ) from None
        #: Where it listens; with the port that the system chose for port 0.
        self.endpoint: Final = plain.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, topic: bytes, payload: bytes) -> bool:
        """Send to all connected peers. False if some did not get the message because their queue
        has just become full."""
        is_for_all = True
        try:
            self.socket.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            is_for_all = False
            self.socket.setsockopt(zmq.XPUB_NODROP, 0)
            self.socket.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
            self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        # The second frame goes to the same peers as the first.
        self.socket.send(payload, zmq.DONTWAIT)
        return is_for_all

    def close(self) -> None:
        self.socket.close(0)
