"""The `authorization` line of a connection's requests: cut out of their header sections before
those are remembered, and known again by a keyed digest.

Nothing here, nor in what the reader remembers, holds a credential: only where its line stood, and
digests by keys that this process drew for itself. Whose token it is, is for others to say.
RFC 9110 section 11.6.2, RFC 6750 section 2.1.
"""

import os
import re
from hashlib import blake2b
from typing import Final

# One line whose value no parser objects to, in any spelling of its name.
_LINE: Final = re.compile(rb"\r\n(?i:authorization):([\t -~\x80-\xff]*+)(?=\r\n)")
_NAME: Final = b"\r\nauthorization:"

_DIGEST_BYTES: Final = 32
_KEYED: Final = blake2b(digest_size=_DIGEST_BYTES, key=os.urandom(64))
_LINE_KEY: Final = os.urandom(16)

UNUSABLE: Final = b""  # there is a credential, and it is no single bearer token


def digest_of(text: bytes) -> bytes:
    """What may be kept in place of a secret. Other processes have other digests of the same."""
    made = _KEYED.copy()  # a third cheaper than with the key again
    made.update(text)
    return made.digest()


def has_credentials(section: bytes) -> bool:
    """Whether there is such a line in a header section: version, lines, each after its CRLF."""
    return _NAME in section.lower()


def _credential_of(value: bytes) -> bytes:
    """The digest of a bearer token, or UNUSABLE."""
    scheme, _, token = value.strip(b" \t").partition(b" ")
    return digest_of(token.strip(b" \t")) if scheme.lower() == b"bearer" else UNUSABLE


class CredentialLine:
    """Where the last line with a credential stood, and what it said. One for a connection.

    `credential` is that of the section seen last by `rest_of`: the digest of a bearer token,
    UNUSABLE, or None.

    The line is known again by Python's own hash of a key and its text: SipHash, a third of the time
    of the digest that says whose token it is. It only tells whether this connection said the same
    before, where another text has one chance in 2**64.
    """

    __slots__ = (
        "_begin",
        "_known",
        "_size",
        "_start",
        "_value",
        "credential",
    )

    def __init__(self, section: bytes) -> None:
        """Of a section that has credentials."""
        self.credential: bytes | None = UNUSABLE
        self._begin = 0
        self._size = 0  # of the line, with both its line breaks
        self._start = b""  # CRLF and the name, as they are spelled
        self._known = 0  # the line, as its hash
        self._value = UNUSABLE
        found = _LINE.search(section)
        if found is None or section.lower().count(_NAME) != 1:
            return
        begin, value_at, end = found.start(), found.start(1), found.end() + 2
        self._begin = begin
        self._size = end - begin
        self._start = section[begin:value_at]
        self._known = hash(_LINE_KEY + section[begin:end])
        self._value = _credential_of(found[1])

    def rest_of(self, section: bytes) -> bytes:
        """The section without its line, if that is the one that is known; or all of it."""
        begin, size = self._begin, self._size
        if not size or hash(_LINE_KEY + section[begin : begin + size]) != self._known:
            # Other lines before it are shorter or longer now, as a length.
            begin = section.find(self._start) if size else -1
            if begin < 0 or hash(_LINE_KEY + section[begin : begin + size]) != self._known:
                self.credential = None
                return section
            self._begin = begin
        self.credential = self._value
        return section[:begin] + section[begin + size - 2 :]
