"""The PUB that replicas hear: bound, sent to, and bound anew when somebody is expelled.

It is a zmq.asyncio one, but messages leave through its own plain shadow, DONTWAIT. A PUB never has
to wait: a full queue drops. So there is nothing to await, an HTTP handler publishes and stays
synchronous, and it costs a tenth of the awaitable send.

What libzmq drops for a peer that does not read cannot be counted message by message. With
XPUB_NODROP a send that meets a full queue fails (EAGAIN), for all peers; it is then repeated
without the option, which serves the others. From then on libzmq passes over the full queue silently
until half of it is read.
"""

import asyncio
import logging
from typing import Final

import zmq
import zmq.asyncio

from lean_selector.curve.gate import CurveGate
from lean_selector.curve.rebinding import BIND_AGAIN_S, bound_again
from lean_selector.sockets.replica_links import MAX_MESSAGE_BYTES

log = logging.getLogger("lean_selector.replica")

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
# Who has taken the port meanwhile keeps us waiting.
_BIND_AGAIN_MAX_S: Final = 1.0


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
        self._context = context
        self._high_water_mark = high_water_mark
        self._gate = gate
        self.closed = False
        self._is_between = False  # the old socket is closed, and the new one not yet made
        self._make("[" in endpoint)
        try:
            self.socket.bind(endpoint)
        except BaseException:
            self.socket.close(0)
            raise
        #: Where it listens, with the port that the system chose if it was asked to.
        self.endpoint: Final = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _make(self, is_ipv6: bool) -> None:
        self.socket = self._context.socket(zmq.PUB)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.socket.underlying)
        for option, value in _OPTIONS.items():
            self._plain.setsockopt(option, value)
        self._plain.setsockopt(zmq.SNDHWM, self._high_water_mark)
        self._plain.setsockopt(zmq.XPUB_NODROP, 1)
        self._plain.setsockopt(zmq.IPV6, is_ipv6)
        if self._gate is not None:
            self._gate.guard(self._plain)

    def send(self, topic: bytes, payload: bytes) -> bool:
        """To all peers that are connected. False where some did not get it: their queues had just
        become full."""
        if self._is_between:
            return True  # nobody is connected
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

    async def begin_anew(self) -> None:
        """End every connection: whoever is admitted comes back and shakes hands again.

        libzmq cannot end a single one. What is sent meanwhile is lost to all; its numbers tell them
        (D24). Where there is no descriptor or no port for the new socket, it is tried again.
        """
        self._is_between = True
        self.socket.close(0)
        pause_s = BIND_AGAIN_S
        while not self.closed:
            if self._is_between:
                self._is_between = not self._is_made()
            if not self._is_between and bound_again(self._plain, self.endpoint):
                return
            if pause_s >= _BIND_AGAIN_MAX_S:
                log.warning("the replica publisher cannot be bound anew: %s", self.endpoint)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _BIND_AGAIN_MAX_S)

    def _is_made(self) -> bool:
        try:
            self._make("[" in self.endpoint)
        except zmq.ContextTerminated:
            raise
        except (zmq.ZMQError, OSError):  # most likely too many descriptors
            self.socket.close(0)
            return False
        return True

    def close(self) -> None:
        """At once; what is queued for peers is dropped."""
        self.closed = True
        self.socket.close(0)
