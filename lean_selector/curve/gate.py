"""The ZAP handler of a service, on its loop, and how often it said no."""

import asyncio
import logging
import time
from typing import Final

import zmq
import zmq.asyncio

from lean_selector.curve.keys import KeyPair, Keys
from lean_selector.curve.zap import (
    ENDPOINT,
    WARN_EVERY_S,
    Expelled,
    ask_for_keys,
    zap_answer,
    zap_failure,
)
from lean_selector.tasks import failed, supervise

log = logging.getLogger("lean_selector.curve")


class CurveGate:
    """Admits to the sockets of one context those that have one of `admitted`, from start() to
    close(). From the loop's thread only."""

    def __init__(
        self, context: zmq.asyncio.Context, pair: KeyPair, admitted: Keys, domain: bytes
    ) -> None:
        self.pair: Final = pair
        self.admitted: Final = admitted
        self.refused = 0
        self.last_refused: str | None = None  # a public key, and where from
        self._domain = domain
        #: Whether somebody who was admitted is no more, since this was asked last.
        self.has_expelled: Final = Expelled(admitted)
        self._warn_at = 0.0  # monotonic, not before
        self._task: asyncio.Task[None] | None = None
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """From its binding on. The socket is not bound yet."""
        ask_for_keys(socket, self.pair, self._domain)

    def start(self) -> None:
        """Call it in the running loop. Until then a handshake waits."""
        self._task = supervise("curve gate", self._run)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(0)

    async def _run(self) -> None:
        while True:
            request = await self._socket.recv_multipart()
            try:
                answer = zap_answer(request, self._domain, self.admitted, self._refused)
            except Exception:
                failed("curve gate", "this handshake is refused")
                answer = zap_failure(request)
            self.has_expelled.note(answer)
            await self._socket.send_multipart(answer)

    def _refused(self, key: str, address: str) -> None:
        self.refused += 1
        self.last_refused = f"{key} from {address}"
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning(
                "a client's public key is not admitted",
                extra={"public_key": key, "address": address, "refused": self.refused},
            )
