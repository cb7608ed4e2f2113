"""Read CURVE key pairs and lists of public keys from files, and configure sockets to use them.

A key pair is a certificate in the format of CZMQ and pyzmq's zmq.auth (rfc.zeromq.org/spec/4, ZPL).
A list has one public key per line: 40 characters of Z85, then an optional comment such as the
owner. A file of concatenated public certificates is a valid list too. Files are read once, at the
start. A bound socket admits clients by their public keys and counts the clients it refuses. If
nobody answers libzmq's admission requests (ZAP), the socket admits no client."""

import logging
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import zmq
from zmq.utils import z85

if TYPE_CHECKING:
    from zmq.auth import Authenticator

KEY_CHARACTERS: Final = 40
MOST_KEYS: Final = 64  # per list; each one is tried in turn
DOMAIN: Final = b"lean-selector"  # ZAP domain of all sockets that require keys
_ENFORCE_DOMAIN: Final = 93  # ZMQ_ZAP_ENFORCE_DOMAIN; not every pyzmq has a name for it
_ENTRY: Final = re.compile(r'\s*(public-key|secret-key)\s*=\s*"(\S+)"\s*')
# Lines of a certificate that hold no key.
_OTHER: Final = re.compile(r"\s+(?!public-key\b|secret-key\b)[\w$\-@.&+/]+\s*=.*")
_SECTIONS: Final = ("curve", "metadata")


class BadKeys(ValueError):
    """A key file is invalid; the message has one line, and contains no key."""


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """Our key pair. Both keys are Z85 text."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"  # never the secret key


class CurveClient(NamedTuple):
    """Our key pair, and the public keys of the servers that we accept."""

    pair: KeyPair
    believed: tuple[bytes, ...]


def check_curve() -> None:
    """Raise BadKeys if this libzmq has no CURVE."""
    if not zmq.has("curve"):
        raise BadKeys(f"libzmq {zmq.zmq_version()} was built without CURVE")


def read_pair(path: str) -> KeyPair:
    """Read a key pair from a secret-key certificate. Raises OSError and ValueError."""
    secret: bytes | None = None
    for line in _lines(path):
        entry = _ENTRY.fullmatch(line)
        if entry is not None and entry[1] == "secret-key":
            secret = _key(entry[2])
            if secret is None:
                raise BadKeys(f"{path}: its secret-key is not a key of 40 characters")
    if secret is None:
        raise BadKeys(f"{path} has no secret-key; zmq.auth.create_certificates creates one")
    return KeyPair(zmq.curve_public(secret), secret)


def read_list(path: str) -> tuple[bytes, ...]:
    """Return the distinct public keys of a list file, in file order. Raises OSError, ValueError."""
    found: dict[bytes, None] = {}
    for number, line in enumerate(_lines(path), 1):
        entry = _ENTRY.fullmatch(line)
        if entry is not None and entry[1] == "secret-key":
            raise BadKeys(f"{path} line {number} is a secret key; this file needs public keys")
        words = [entry[2]] if entry is not None else line.split()
        key = _key(words[0]) if words else None
        if key is not None:
            found[key] = None
        elif words and not _is_of_no_key(line, words):
            raise BadKeys(
                f"{path} line {number} is not a public key of {KEY_CHARACTERS} characters"
            )
    if not found:
        raise BadKeys(f"{path} has no public key")
    if len(found) > MOST_KEYS:
        raise BadKeys(f"{path} holds {len(found)} keys, more than {MOST_KEYS}")
    return tuple(found)


def give_keys(socket: "zmq.Socket[bytes]", pair: KeyPair, server_key: bytes) -> None:
    """Configure a socket, before connect, as a CURVE client with this key pair. The socket then
    accepts only a server with the public key `server_key`."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise BadKeys(f"{path} is not a text file") from None


def _key(text: str) -> bytes | None:
    if len(text) != KEY_CHARACTERS or not text.isascii():
        return None
    try:
        z85.decode(text)
    except (KeyError, ValueError, struct.error):
        return None
    return text.encode()


def _is_of_no_key(line: str, words: list[str]) -> bool:
    """Whether a line of a list file may lack a key, because it is a comment (it begins with `#`), a
    section name of a certificate, or a metadata entry of a certificate."""
    return words[0].startswith("#") or words[0] in _SECTIONS or _OTHER.fullmatch(line) is not None


# -- admission: libzmq asks at each handshake (ZAP, rfc.zeromq.org/spec/27) ------------------------

log = logging.getLogger("lean_selector.curve")


class CurveGate:
    """Decides which clients may connect to a ZMQ context's sockets, from start() to close()."""

    def __init__(
        self, authenticator: "Authenticator", pair: KeyPair, admitted: tuple[bytes, ...]
    ) -> None:
        """`authenticator` belongs to the sockets' context. `admitted` has the public keys of the
        clients that may connect."""
        self.pair: Final = pair
        self.admitted: Final = admitted
        self.refused = 0
        self.last_refused: str | None = None  # the public key
        self._authenticator: Final = authenticator
        authenticator.configure_curve_callback(DOMAIN.decode(), self)

    def guard(self, socket: "zmq.Socket[bytes]") -> None:
        """Make a socket, before bind, a CURVE server that only admitted clients can connect to."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.pair.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.pair.public)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(_ENFORCE_DOMAIN, 1)

    def start(self) -> None:
        """Start to admit clients. Before this call, every handshake fails."""
        self._authenticator.start()

    def close(self) -> None:
        self._authenticator.stop()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether to admit a client with this public key. The authenticator calls this."""
        if key in self.admitted:
            return True
        self.refused += 1
        self.last_refused = key.decode()
        log.warning(
            "a client's public key is not admitted: %s",
            self.last_refused,
            extra={"public_key": self.last_refused, "refused": self.refused},
        )
        return False
