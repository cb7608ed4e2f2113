"""The last second of a certificate: what operators must hear of in time.

`ssl` tells it of a peer's certificate alone, and only while that is valid. So the one field is
read here, from the DER of what OpenSSL has judged before (RFC 5280, section 4.1).
"""

import binascii
import re
from calendar import timegm
from typing import Final

_PEM: Final = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_VERSION: Final = 0xA0  # absent in certificates of version 1
_UTC_TIME: Final = 0x17  # with two digits for the year
_TIME: Final = re.compile(r"(\d{4})" + r"(\d\d)" * 5 + "Z")


def not_after_of(pem: bytes) -> int | None:
    """Of the first certificate in a file, in seconds since 1970; None where it has no such form."""
    found = _PEM.search(pem)
    if found is None:
        return None
    try:
        return _not_after(binascii.a2b_base64(found[1]))
    except (ValueError, IndexError):
        return None


def _not_after(der: bytes) -> int:
    _, at, _ = _element(der, 0)  # the certificate
    _, at, _ = _element(der, at)  # what is signed of it
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    _, _, at = _element(der, at)  # its number
    _, _, at = _element(der, at)  # the algorithm
    _, _, at = _element(der, at)  # the issuer
    _, at, _ = _element(der, at)  # from when until when
    _, _, at = _element(der, at)
    tag, begin, end = _element(der, at)
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(text)
    return timegm(tuple(map(int, found.groups())))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of what begins there, and where its content begins and ends."""
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        size = int.from_bytes(der[at + 2 : begin], "big")
    return der[at], begin, begin + size
