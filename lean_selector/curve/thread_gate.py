"""The ZAP handler of a publisher, which has no loop: a thread that ends with its context."""

import logging
import threading

import zmq

from lean_selector.curve.keys import KeyList, Keys, check_curve, read_pair
from lean_selector.curve.zap import ENDPOINT, ask_for_keys, zap_answer

log = logging.getLogger("lean_selector.curve")

_DOMAIN = b"engine"


class ThreadGate:
    """Admits to the sockets of one context whoever has a key of the list, or all without one."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", secret_file: str, clients_file: str | None
    ) -> None:
        """Raises OSError and ValueError for files that hold no keys."""
        check_curve("curve_secret_key_file")
        self._pair = read_pair(secret_file)
        self._admitted: Keys | None = None if clients_file is None else KeyList(clients_file)
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind(ENDPOINT)
        self._thread = threading.Thread(
            target=self._serve, args=(socket,), name="curve-gate", daemon=True
        )
        self._thread.start()

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """From its binding on. The socket is not bound yet."""
        ask_for_keys(socket, self._pair, _DOMAIN)

    def join(self) -> None:
        """Once the context has ended."""
        self._thread.join()

    def _serve(self, socket: "zmq.Socket[bytes]") -> None:
        with socket:
            while True:
                try:
                    request = socket.recv_multipart()
                    socket.send_multipart(zap_answer(request, _DOMAIN, self._admitted, _refused))
                except zmq.ContextTerminated:
                    return


def _refused(key: str, address: str) -> None:
    log.warning("a client's public key is not admitted: %s from %s", key, address)
