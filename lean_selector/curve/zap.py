"""Who is admitted to a socket that asks for keys: ZAP (rfc.zeromq.org/spec/27), for CURVE alone.

libzmq asks at each handshake, over a socket inside of the process that all sockets of a context
share. Without an answer nobody is admitted.
"""

from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from lean_selector.curve.keys import KeyPair, Keys

ENDPOINT: Final = "inproc://zeromq.zap.01"
WARN_EVERY_S: Final = 60.0  # of those who are refused: they may try as often as they like
_VERSION: Final = b"1.0"
_OK: Final = b"200"
_ENFORCE_DOMAIN: Final = 93  # ZMQ_ZAP_ENFORCE_DOMAIN; pyzmq has no name for it everywhere
# The frames of a request before its credentials: version, request, domain, address, identity,
# mechanism.
_CREDENTIALS: Final = 6
_KEY_BYTES: Final = 32

# A client was refused: its public key, and its address.
OnRefused = Callable[[str, str], None]


class Expelled:
    """Told of each answer to a handshake, and asked now and then whether somebody who was let in
    would be no more: also one who was on the list only between two questions."""

    def __init__(self, admitted: Keys) -> None:
        self._admitted: Final = admitted
        self._let_in: set[bytes] = set()

    def note(self, answer: list[bytes]) -> None:
        """As `zap_answer` makes it."""
        if answer[2] == _OK:
            self._let_in.add(answer[4])

    def __call__(self) -> bool:
        """Since it was asked last."""
        gone = self._let_in.difference(self._admitted())
        self._let_in -= gone
        return bool(gone)


def ask_for_keys(socket: "zmq.Socket[bytes]", pair: KeyPair, domain: bytes) -> None:
    """What binds this socket is the server `pair`. Before it is bound."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(_ENFORCE_DOMAIN, 1)


def give_keys(socket: "zmq.Socket[bytes]", pair: KeyPair, server_key: bytes) -> None:
    """What connects is `pair`, to a server with this public key and to no other."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def zap_answer(
    request: list[bytes], domain: bytes, admitted: Keys | None, on_refused: OnRefused
) -> list[bytes]:
    """The answer to a request of ZAP. `admitted` None: whoever knows the server's key."""
    number = _number(request)
    if (
        len(request) != _CREDENTIALS + 1
        or request[0] != _VERSION
        or request[5] != b"CURVE"
        or len(request[_CREDENTIALS]) != _KEY_BYTES
    ):
        return [_VERSION, number, b"400", b"only CURVE is spoken here", b"", b""]
    key = z85.encode(request[_CREDENTIALS])
    if request[2] == domain and (admitted is None or key in admitted()):
        return [_VERSION, number, _OK, b"OK", key, b""]
    on_refused(key.decode(), request[3].decode(errors="replace"))
    return [_VERSION, number, b"400", b"this public key is not admitted", b"", b""]


def zap_failure(request: list[bytes]) -> list[bytes]:
    """The answer where there is none for a bug: each question must have one, or the next is never
    asked."""
    return [_VERSION, _number(request), b"500", b"it cannot be told", b"", b""]


def _number(request: list[bytes]) -> bytes:
    return request[1] if len(request) > 1 else b""
