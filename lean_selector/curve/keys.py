"""Key pairs of CURVE, and lists of public keys, in files that may be replaced while we run.

A pair lies in a certificate as CZMQ and pyzmq's zmq.auth write it (rfc.zeromq.org/spec/4, ZPL). A
list has one public key a line, 40 characters of Z85, and after it what one likes, as whose it is;
certificates without their secret keys are lists too, also several one after another.
"""

import logging
import re
import struct
import time
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from lean_selector.outbound.watched_file import WatchedFile

log = logging.getLogger("lean_selector.curve")

KEY_CHARACTERS: Final = 40
MOST_KEYS: Final = 64  # of a list: each that a server may have is tried in turn
LOOK_EVERY_S: Final = 0.5
_MOST_BYTES: Final = 1 << 18
_ENTRY: Final = re.compile(r'\s*(public-key|secret-key)\s*=\s*"(\S+)"\s*')
# What else a certificate says of itself.
_OTHER: Final = re.compile(r"\s+(?!public-key\b|secret-key\b)[\w$\-@.&+/]+\s*=.*")
_SECTIONS: Final = ("curve", "metadata")

Keys = Callable[[], tuple[bytes, ...]]  # the public keys of now, as Z85


class BadKeys(ValueError):
    """A file holds no keys as it should; the message is one clear line, and tells none of them."""


class KeyPair:
    """Ours. Both as Z85."""

    __slots__ = ("public", "secret")

    def __init__(self, public: bytes, secret: bytes) -> None:
        self.public: Final = public
        self.secret: Final = secret

    def __repr__(self) -> str:
        return f"KeyPair({self.public.decode()})"  # and never the secret


def new_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def check_curve(flag: str) -> None:
    """Raise ValueError where this libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise BadKeys(f"{flag}: libzmq {zmq.zmq_version()} was built without CURVE")


def read_pair(path: str) -> KeyPair:
    """The pair of a certificate with a secret key. Raises OSError and ValueError."""
    secret: bytes | None = None
    for line in _text(path, WatchedFile(path, _MOST_BYTES).read()[0]).splitlines():
        entry = _ENTRY.fullmatch(line)
        if entry is not None and entry[1] == "secret-key":
            secret = _key(entry[2])
            if secret is None:
                raise BadKeys(f"{path}: its secret-key is no key of 40 characters")
    if secret is None:
        raise BadKeys(f"{path} holds no secret-key, as `lean-selector keys` writes it")
    return KeyPair(zmq.curve_public(secret), secret)


def public_keys(path: str, content: bytes) -> tuple[bytes, ...]:
    """The keys of a list, each once, in its order. Raises ValueError."""
    found: dict[bytes, None] = {}
    for number, line in enumerate(_text(path, content).splitlines(), 1):
        entry = _ENTRY.fullmatch(line)
        if entry is not None and entry[1] == "secret-key":
            raise BadKeys(f"{path} line {number} is a secret key: here belong public ones")
        words = [entry[2]] if entry is not None else line.split()
        key = _key(words[0]) if words else None
        if key is not None:
            found[key] = None
        elif words and not _is_of_no_key(line, words):
            raise BadKeys(f"{path} line {number} is no public key of {KEY_CHARACTERS} characters")
    if not found:
        raise BadKeys(f"{path} holds no public key")
    if len(found) > MOST_KEYS:
        raise BadKeys(f"{path} holds {len(found)} keys, more than {MOST_KEYS}")
    return tuple(found)


class KeyList:
    """The public keys of a file, as it is now. While it cannot be read, those that it held last."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError and ValueError where there is no list at first."""
        self._file = WatchedFile(path, _MOST_BYTES)
        self._clock = clock
        self._keys = public_keys(path, self._file.read()[0])
        self._looked_at = clock()
        self._complains = False

    def __call__(self) -> tuple[bytes, ...]:
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._keys

    def _look(self) -> None:
        try:
            content, is_new = self._file.read()
            if is_new:
                self._keys = public_keys(self._file.path, content)
                log.info("public keys were read again", extra={"keys": len(self._keys)})
            self._complains = False
        except (OSError, ValueError) as error:
            if not self._complains:
                log.warning("the last public keys are used: %s", error)
            self._complains = True


def _text(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadKeys(f"{path} holds no text") from None


def _key(text: str) -> bytes | None:
    if len(text) != KEY_CHARACTERS or not text.isascii():
        return None
    try:
        z85.decode(text)
    except (KeyError, ValueError, struct.error):
        return None
    return text.encode()


def _is_of_no_key(line: str, words: list[str]) -> bool:
    """A comment (no key begins so), or another line of a certificate."""
    return words[0].startswith("#") or words[0] in _SECTIONS or _OTHER.fullmatch(line) is not None
