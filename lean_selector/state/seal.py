"""The last line of a file of a state directory: when its text was written, and a checksum.

The text is as whoever made it made it. A file that was cut, or has another bit, is told by its
seal.
"""

import time

import msgspec
from xxhash import xxh3_64

from lean_selector.state.shapes import Stamp

# Counts suspensions where the system has one that does.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_END = b'"}\n'
_SUM_BYTES = 16  # of XXH3-64, in hexadecimal
_decode = msgspec.json.Decoder(Stamp).decode


class Damaged(ValueError):
    """What was read is not what was written; the message says what is wrong."""


class OtherVersion(Damaged):
    """It is what was written, by a release that writes another format."""


def stamp_now() -> Stamp:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return Stamp(time.time(), time.clock_gettime(_SINCE_BOOT), boot_id)


def elapsed_s(since: Stamp, now: Stamp) -> float:
    """Seconds between the two, not below 0. Of one boot by its own clock, whatever was done to the
    other meanwhile; else by the one on the wall, which is all that there is."""
    if since.boot_id and since.boot_id == now.boot_id:
        return max(0.0, now.boot_s - since.boot_s)
    return max(0.0, now.wall_s - since.wall_s)


class Seal:
    """Made while a file is written: `add` each part of its text, then write `end`."""

    def __init__(self) -> None:
        self._sum = xxh3_64()

    def add(self, part: bytes) -> None:
        self._sum.update(part)

    def end(self, stamp: Stamp) -> bytes:
        line = b'\n{"wall_s":%.3f,"boot_s":%.3f,"boot_id":"%b","xxh3":"' % (
            stamp.wall_s,
            stamp.boot_s,
            stamp.boot_id.encode(),
        )
        self._sum.update(line)
        return line + self._sum.hexdigest().encode() + _END


def opened(sealed: bytes) -> tuple[bytes, Stamp]:
    """The text and when it was written. Raises Damaged."""
    at = len(sealed) - len(_END) - _SUM_BYTES
    if at <= 0 or not sealed.endswith(_END):
        raise Damaged("its end is missing")
    covered = sealed[:at]
    if xxh3_64(covered).hexdigest().encode() != sealed[at : at + _SUM_BYTES]:
        raise Damaged("its checksum is wrong")
    text, _, line = covered.rpartition(b"\n")
    try:
        return text, _decode(line + _END)
    except msgspec.DecodeError as error:
        raise Damaged(f"its seal: {error}") from None
