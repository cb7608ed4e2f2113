"""ZMTP 3, as much of it as a subscriber and a dealer need: bytes in, messages out, no I/O.

Both sides greet, say READY with their socket types (the NULL mechanism), and send frames from then
on; a message is one frame or more. A peer's PING is answered, whatever we think of its time-outs.
Written down in RFC 23 of rfc.zeromq.org; 3.0 is what we claim, so subscriptions are messages.
"""

import struct
from collections.abc import Callable

Message = list[bytes]  # its frames

MORE, LONG, COMMAND = 1, 2, 4
_RESERVED = 0xFF & ~(MORE | LONG | COMMAND)

_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_MECHANISM = b"NULL".ljust(20, b"\0")
GREETING = _SIGNATURE + b"\x03\x00" + _MECHANISM + b"\0" + bytes(31)
GREETING_BYTES = 64

# Who may be at the other end of what we open.
_PARTNERS = {b"SUB": (b"PUB", b"XPUB"), b"DEALER": (b"ROUTER", b"DEALER", b"REP")}

MAX_COMMAND_BYTES = 64 * 1024
MAX_FRAMES = 256  # of a message; ours have two to four
# A frame of more than this that is not whole yet is gathered piece by piece, not copied each time.
_GATHERED = 32 * 1024

_SIZE = struct.Struct(">Q")


class ProtocolError(Exception):
    """The peer does not speak ZMTP as we do; the message is one clear line."""


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + _SIZE.pack(len(body)) + body


def message(*frames: bytes) -> bytes:
    last = len(frames) - 1
    return b"".join(frame(each, MORE if at < last else 0) for at, each in enumerate(frames))


def subscription(topic: bytes) -> bytes:
    """Asks a publisher for what begins with `topic`."""
    return message(b"\x01" + topic)


def ready(socket_type: bytes) -> bytes:
    name = b"Socket-Type"
    value = len(socket_type).to_bytes(4, "big") + socket_type
    return frame(b"\x05READY" + bytes((len(name),)) + name + value, COMMAND)


class Decoder:
    """What one connection brings.

    Feed it what arrives; `on_message(frames)` hears each message after the handshake, in order, and
    `is_ready` tells when that is over. `reply` is what is to be sent back: take it after each feed.
    A frame of more than `max_bytes` is cut off one byte behind, so that whoever gets it sees that
    it is too long; the rest is read and dropped.
    """

    def __init__(
        self, socket_type: bytes, on_message: Callable[[Message], None], max_bytes: int
    ) -> None:
        self.is_ready = False
        self.reply = bytearray(GREETING + ready(socket_type))
        self._partners = _PARTNERS[socket_type]
        self._on_message = on_message
        self._max_bytes = max_bytes
        self._is_greeted = False
        self._rest = b""  # received, not taken apart yet
        self._frames: Message = []  # of the message that is not whole yet
        self._bytes = 0  # in these
        # while a large frame is gathered
        self._gathered: bytearray | None = None
        self._flags = 0
        self._missing = 0  # bytes of that frame that have not come

    @property
    def partial_bytes(self) -> int:
        """Held of a large frame that is not whole yet, and of the message before it."""
        return 0 if self._gathered is None else len(self._gathered) + self._bytes

    def feed(self, data: bytes) -> None:
        """Raises ProtocolError; then the connection is of no more use."""
        if self._gathered is not None:
            data = self._gather(data, self._gathered)
        if self._rest:
            data = self._rest + data
        at = 0
        if not self._is_greeted:
            at = self._greet(data)
            if not at:
                self._rest = data
                return
        end = len(data)
        while end - at >= 2:
            flags, size = data[at], data[at + 1]
            start = at + 2
            if flags & LONG:
                start = at + 9
                if start > end:
                    break
                (size,) = _SIZE.unpack_from(data, at + 1)
            if flags > LONG | MORE:
                self._check(flags, size)
            stop = start + size
            if stop > end:
                if size > _GATHERED:
                    self._flags, self._missing = flags, size
                    self._gathered = bytearray()
                    self._gather(data[start:], self._gathered)
                    at = end
                break
            at = stop
            if flags & COMMAND:
                self._command(data[start:stop])
                continue
            if size > self._max_bytes:
                self._take(flags, data[start : start + self._max_bytes + 1])
                continue
            # as _take, without the call: this is every frame of every event
            self._frames.append(data[start:stop])
            self._bytes += size
            if flags & MORE or not self.is_ready or self._bytes > self._max_bytes:
                self._check_message()
                if flags & MORE:
                    continue
            frames, self._frames, self._bytes = self._frames, [], 0
            self._on_message(frames)
        self._rest = data[at:]

    def _greet(self, data: bytes) -> int:
        """Looks at the peer's greeting; how many bytes of it are behind us."""
        if (data and data[0] != 0xFF) or (len(data) > 9 and not data[9] & 1):
            raise ProtocolError("what listens there does not speak ZMQ")
        if len(data) > 10 and data[10] < 3:
            raise ProtocolError(f"it speaks ZMTP {data[10]}, older than 3")
        if len(data) < GREETING_BYTES:
            return 0
        if data[12:32] != _MECHANISM:
            name = data[12:32].rstrip(b"\0").decode("ascii", "replace")
            raise ProtocolError(f"it wants the security mechanism {name!r}")
        self._is_greeted = True
        return GREETING_BYTES

    def _check(self, flags: int, size: int) -> None:
        if flags & _RESERVED or (flags & COMMAND and flags & MORE):
            raise ProtocolError(f"frame flags {flags:#x}")
        if flags & COMMAND and size > MAX_COMMAND_BYTES:
            raise ProtocolError(f"command of {size} bytes")

    def _gather(self, data: bytes, gathered: bytearray) -> bytes:
        """Takes what belongs to the large frame; returns what comes after it."""
        size = self._missing
        gathered += data[: min(size, self._max_bytes + 1 - len(gathered))]
        self._missing = max(0, size - len(data))
        if self._missing:
            return b""
        self._gathered = None
        self._take(self._flags, bytes(gathered))
        return data[size:]

    def _take(self, flags: int, body: bytes) -> None:
        """One frame of a message, from which more than `max_bytes` may have been cut off."""
        self._frames.append(body)
        self._bytes += len(body)
        self._check_message()
        if not flags & MORE:
            frames, self._frames, self._bytes = self._frames, [], 0
            self._on_message(frames)

    def _check_message(self) -> None:
        if not self.is_ready:
            raise ProtocolError("a message before the handshake")
        if self._bytes > 2 * self._max_bytes:  # no one frame needs so much
            raise ProtocolError(f"message of more than {self._bytes} bytes")
        if len(self._frames) > MAX_FRAMES:
            raise ProtocolError(f"message of more than {MAX_FRAMES} frames")

    def _command(self, body: bytes) -> None:
        name = body[1 : 1 + body[0]] if body else b""
        rest = body[1 + len(name) :]
        if name == b"PING":
            self.reply += frame(b"\x04PONG" + rest[2:18], COMMAND)
        elif name == b"ERROR":
            said = rest[1:].decode("utf-8", "replace")
            raise ProtocolError(f"it refused the connection: {said!r}")
        elif name == b"READY" and not self.is_ready:
            kind = _properties(rest).get(b"socket-type", b"")
            if kind not in self._partners:
                wanted = " or ".join(partner.decode() for partner in self._partners)
                text = kind.decode("ascii", "replace")
                raise ProtocolError(f"it is a {text!r} socket, not {wanted}")
            self.is_ready = True


def _properties(data: bytes) -> dict[bytes, bytes]:
    found = {}
    at = 0
    while at < len(data):
        value_at = at + 1 + data[at] + 4
        size = int.from_bytes(data[value_at - 4 : value_at], "big")
        if value_at > len(data) or value_at + size > len(data):
            raise ProtocolError("a READY that is cut off")
        found[data[at + 1 : value_at - 4].lower()] = data[value_at : value_at + size]
        at = value_at + size
    return found
