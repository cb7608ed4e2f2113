"""The PUB socket that publishes events to replicas.

It is a zmq.asyncio socket, but messages are sent through its synchronous shadow with DONTWAIT. A
PUB never waits: a full queue drops. So an HTTP handler can publish without awaiting, at a tenth of
the cost of the awaitable send.

libzmq does not count messages that it drops for a slow peer. With XPUB_NODROP a send fails for all
peers (EAGAIN) if one queue is full; it is then repeated without the option, which reaches the
others. After that libzmq skips the full queue silently until half of it is read.
"""

import os
from typing import Final

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


class ReplicaPub:
    """From the loop's thread only. Raises zmq.ZMQError if it cannot be bound."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        high_water_mark: int,
        gate: CurveGate | None = None,
    ) -> None:
        """With a `gate`, only peers that it admits can subscribe."""
        self.closed = False
        self.socket: Final = context.socket(zmq.PUB)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)
        plain = self._plain
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
        except OSError as error:
            self.socket.close(0)
            raise zmq.ZMQError(error.errno) from None
        except BaseException:
            self.socket.close(0)
            raise
        #: Where it listens; with the port that the system chose for port 0.
        self.endpoint: Final = plain.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, topic: bytes, payload: bytes) -> bool:
        """Send to all connected peers. False if some did not get it: their queues had just become
        full."""
        is_for_all = True
        try:
            self._plain.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            is_for_all = False
            self._plain.setsockopt(zmq.XPUB_NODROP, 0)
            self._plain.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
            self._plain.setsockopt(zmq.XPUB_NODROP, 1)
        # The second frame of a message always goes to the same peers as the first.
        self._plain.send(payload, zmq.DONTWAIT)
        return is_for_all

    def close(self) -> None:
        """Close at once; messages queued for peers are dropped."""
        self.closed = True
        self.socket.close(0)
