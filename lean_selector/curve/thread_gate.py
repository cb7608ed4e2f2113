"""The ZAP handler of a publisher, which has no loop: a thread that ends with its context."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import zmq

from lean_selector.curve.keys import LOOK_EVERY_S, KeyList, Keys, check_curve, read_pair
from lean_selector.curve.rebinding import bound_in_time
from lean_selector.curve.zap import (
    ENDPOINT,
    WARN_EVERY_S,
    Expelled,
    ask_for_keys,
    zap_answer,
    zap_failure,
)

log = logging.getLogger("lean_selector.curve")

_DOMAIN = b"engine"


class ThreadGate:
    """Admits to the sockets of one context whoever has a key of the list, or all without one."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        secret_file: str,
        clients_file: str | None,
        on_expelled: Callable[[], None],
    ) -> None:
        """`on_expelled()` hears, in the thread, that somebody who was admitted is no more. Raises
        OSError and ValueError for files that hold no keys."""
        self._on_expelled = on_expelled
        check_curve("curve_secret_key_file")
        self._pair = read_pair(secret_file)
        self._admitted: Keys | None = None if clients_file is None else KeyList(clients_file)
        self._warn_at = 0.0  # monotonic, not before
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(ENDPOINT)
        self._thread = threading.Thread(
            target=self._serve, args=(socket,), name="curve-gate", daemon=True
        )

    def start(self) -> None:
        """Until then a handshake waits, and the context is its maker's to destroy."""
        self._thread.start()

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """From its binding on. The socket is not bound yet."""
        ask_for_keys(socket, self._pair, _DOMAIN)

    # Here, as nothing may have to be imported when there are no descriptors left.
    bound_in_time = staticmethod(bound_in_time)

    def join(self) -> None:
        """Once the context has ended."""
        self._thread.join()

    def _serve(self, socket: "zmq.Socket[bytes]") -> None:
        has_expelled = None if self._admitted is None else Expelled(self._admitted)
        timeout_ms = None if has_expelled is None else int(1000 * LOOK_EVERY_S)
        with socket, contextlib.suppress(zmq.ContextTerminated):
            while True:
                if socket.poll(timeout_ms):
                    request = socket.recv_multipart()
                    answer = self._answer(request)
                    if has_expelled is not None:
                        has_expelled.note(answer)
                    socket.send_multipart(answer)
                if has_expelled is not None and has_expelled():
                    self._on_expelled()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        try:
            return zap_answer(request, _DOMAIN, self._admitted, self._refused)
        except Exception:
            log.exception("a handshake is refused for a bug")
            return zap_failure(request)

    def _refused(self, key: str, address: str) -> None:
        now = time.monotonic()
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            log.warning("a client's public key is not admitted: %s from %s", key, address)
