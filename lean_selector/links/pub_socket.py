"""The PUB socket that publishes events to other replicas.

A PUB socket never blocks: it drops messages for a peer whose queue is full. So an HTTP handler can
publish without awaiting.

libzmq does not count dropped messages. With the option XPUB_NODROP, a send fails for all peers
(EAGAIN) if the queue of one peer is full. We then send again without the option, and all other
peers get the message. Afterwards libzmq silently skips the full queue until half of it was read."""

import os
from typing import Any, Final

import zmq
import zmq.asyncio

from lean_selector.links.curve_keys import CurveGate

# A message above this size disconnects the peer. An event that is merely too large is refused.
MAX_MESSAGE_BYTES = 16 << 20

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
    """Replica sync cannot start. The text of the exception has one line."""


class ReplicaPub:
    """A PUB socket for other replicas. Construction raises ReplicaSyncError if binding fails."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        high_water_mark: int,
        gate: CurveGate | None = None,
    ) -> None:
        """With a `gate`, only replicas whose CURVE key the gate accepts can subscribe."""
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
        # The bound endpoint; if port 0 was given, with the port that the system chose.
        self.endpoint: Final = plain.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, topic: bytes, payload: bytes) -> bool:
        """Send to all connected peers. Return False if a peer missed the message because the
        peer's queue has just become full. A queue that was already full does not matter."""
        is_for_all = True
        try:
            self.socket.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.Again:
            is_for_all = False
            self.socket.setsockopt(zmq.XPUB_NODROP, 0)
            self.socket.send(topic, zmq.SNDMORE | zmq.DONTWAIT)
            self.socket.setsockopt(zmq.XPUB_NODROP, 1)
        # libzmq sends the second frame to the peers that got the first.
        self.socket.send(payload, zmq.DONTWAIT)
        return is_for_all

    def close(self) -> None:
        self.socket.close(0)
