"""The PUB that replicas hear.

It is a zmq.asyncio one, but messages leave through its own plain shadow, DONTWAIT. A PUB never has
to wait: a full queue drops. So there is nothing to await, an HTTP handler publishes and stays
synchronous, and it costs a tenth of the awaitable send.

What libzmq drops for a peer that does not read cannot be counted message by message. With
XPUB_NODROP a send that meets a full queue fails (EAGAIN), for all peers; it is then repeated
without the option, which serves the others. From then on libzmq passes over the full queue silently
until half of it is read.
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
    """From the loop's thread only. Raises zmq.ZMQError where it cannot be bound."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        high_water_mark: int,
        gate: CurveGate | None = None,
    ) -> None:
        """With a `gate` only those hear it whom that admits."""
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
            # libzmq's bind reads the network's interfaces, and aborts the process where that finds
            # no free descriptor.
            os.close(os.open(os.devnull, os.O_RDONLY))
            plain.bind(endpoint)
        except OSError as error:
            self.socket.close(0)
            raise zmq.ZMQError(error.errno) from None
        except BaseException:
            self.socket.close(0)
            raise
        #: Where it listens, with the port that the system chose if it was asked to.
        self.endpoint: Final = plain.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, topic: bytes, payload: bytes) -> bool:
        """To all peers that are connected. False where some did not get it: their queues had just
        become full."""
        is_for_all = True
        try:
            self._plain.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            is_for_all = False
            self._plain.setsockopt(zmq.XPUB_NODROP, 0)
            self._plain.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
            self._plain.setsockopt(zmq.XPUB_NODROP, 1)
        # The second frame of a message always goes where the first went.
        self._plain.send(payload, zmq.DONTWAIT)
        return is_for_all

    def close(self) -> None:
        """At once; what is queued for peers is dropped."""
        self.closed = True
        self.socket.close(0)
