"""Admits clients to our CURVE sockets by their public keys, and counts those that are refused.

libzmq asks at each handshake (ZAP, rfc.zeromq.org/spec/27); zmq.auth answers. Without an answer
no client is admitted.
"""

import logging
import time
from typing import TYPE_CHECKING, Final

import zmq

from lean_selector.events.curve_keys import DOMAIN, KeyPair, ask_for_keys

if TYPE_CHECKING:
    from zmq.auth import Authenticator

log = logging.getLogger("lean_selector.curve")

WARN_EVERY_S: Final = 60.0  # about refused clients: they may try as often as they like


class CurveGate:
    """Admits those with a key of `admitted` to the sockets of one context; start() to close()."""

    def __init__(
        self, authenticator: "Authenticator", pair: KeyPair, admitted: tuple[bytes, ...] | None
    ) -> None:
        """`authenticator` is of the sockets' context. `admitted` None: all that know the server's
        key."""
        self.pair: Final = pair
        self.admitted: Final = admitted
        self.refused = 0
        self.last_refused: str | None = None  # a public key
        self._warn_at = 0.0  # monotonic, not before
        self._authenticator: Final = authenticator
        authenticator.configure_curve_callback(DOMAIN.decode(), self)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """From its binding on. The socket is not bound yet."""
        ask_for_keys(socket, self.pair)

    def start(self) -> None:
        """Until then every handshake fails."""
        self._authenticator.start()

    def close(self) -> None:
        self._authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: whether a client with this public key is admitted."""
        if self.admitted is None or key in self.admitted:
            return True
        self.refused += 1
        self.last_refused = key.decode()
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning(
                "a client's public key is not admitted: %s",
                self.last_refused,
                extra={"public_key": self.last_refused, "refused": self.refused},
            )
        return False
