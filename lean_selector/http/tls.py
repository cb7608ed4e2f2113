"""TLS for HTTP connections, between the event loop's transport and the HTTP protocol.

To the HTTP protocol, a TLS connection looks like a plain one: it can half-close and still be read,
and it counts unwritten bytes. The loop's own TLS does not support this (D27, D46). Handshakes and
long input get TURN_S seconds of each turn of the loop, then wait for the next turn. A connection
counts as open during its handshake, for which there is a timeout. Plain HTTP gets a 400."""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from lean_selector.http.connections import TURN_S, Connections
from lean_selector.http.response import encode_response

log = logging.getLogger("lean_selector.server")

_CLIENT_CERTIFICATE: Final = frozenset(
    {"CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE"}
)


def kind_of(error: ssl.SSLError) -> str:
    """Map an OpenSSL error to a metric label, one of `connections.REASONS`."""
    reason = error.reason or ""
    if reason in _CLIENT_CERTIFICATE:
        return "client_certificate"
    return "refused_by_client" if "_ALERT_" in reason else "other"


def text_of(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    words = (error.reason or "the TLS handshake failed").lower().replace("_", " ")
    return f"it says: {words.partition(' alert ')[2]}" if " alert " in words else words


# Bytes that are read from a client at a time during its handshake; the rest waits for a turn.
# OpenSSL accepts 100 KB of certificates.
_MAX_GREETING_BYTES: Final = 128 * 1024
# Bytes that a client may still send after a failed handshake, while it can read the reason.
_MAX_LINGER_BYTES: Final = 1024 * 1024

_RECORD_BYTES: Final = 16 * 1024  # a record has at most this much plain text
# Size of a piece given to OpenSSL. Its buffers do not shrink: a connection keeps this much memory.
_FED_BYTES: Final = 32 * 1024
_SMALL_READ_BYTES: Final = 4 * 1024  # up to 180 records of one byte each

_HANDSHAKE: Final = 0x16  # the first byte that a TLS client sends
_PLAIN: Final = encode_response(
    400, b'{"error":"this port speaks TLS: use https://"}', extra=b"connection: close\r\n"
)


class TlsAcceptor:
    """State shared by the TLS connections of one server. Used only on the loop's thread."""

    def __init__(
        self,
        context: ssl.SSLContext,
        connections: Connections,
        new_protocol: Callable[[], asyncio.Protocol],
    ) -> None:
        """`context` is for new handshakes. The attribute `context` may be replaced at any time."""
        self.context = context
        self.connections: Final = connections
        self.new_protocol: Final = new_protocol
        self.counts: Final = connections.tls
        self.counts.is_on = True

    def new_connection(self) -> asyncio.Protocol:
        return TlsConnection(self)


class TlsConnection(asyncio.Protocol):
    """A TLS connection: an asyncio protocol for the socket, a transport for the HTTP protocol."""

    _raw: asyncio.Transport

    def __init__(self, door: TlsAcceptor) -> None:
        self._door: Final = door
        self._incoming: Final = ssl.MemoryBIO()
        self._outgoing: Final = ssl.MemoryBIO()
        self._tls: Final = door.context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._inside: asyncio.Protocol | None = None  # None during the handshake
        self._has_said = False  # whether the client has sent anything
        self._early = bytearray()  # input that waits for a turn of the loop
        self._is_told = False  # the failure or drop was counted
        self._is_deaf = False  # further input is dropped undecrypted
        self._got_eof = False
        self._keeps_open = False  # keep open after that
        self._is_put_off = False  # a turn is scheduled to decrypt the waiting input
        self._is_paused = False  # reading is paused by the inner protocol
        self._writing_paused = False
        self._linger_bytes = 0
        self.held_bytes = 0  # bytes received during the handshake
        self.since = door.connections.now

    # called by the loop's transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not inherit from asyncio.Transport
        self._raw = cast(asyncio.Transport, transport)
        self._door.connections.greet(self)

    def data_received(self, data: bytes) -> None:
        inside = self._inside
        if self._is_deaf:
            self._drop_input(data)
        elif inside is None:
            self._greet(data)
        elif self._got_eof:
            pass  # RFC 8446, 6.1: no data follows a close_notify
        elif self._is_put_off:
            self._early += data
        elif len(data) <= _SMALL_READ_BYTES:  # read in any turn of the loop, as in `protocol`
            self._incoming.write(data)
            self._read(inside)
        else:
            self._decrypt(inside, data)

    def eof_received(self) -> bool:
        """The client has half-closed: end the input, even without a TLS close_notify."""
        return self._inside is not None and self._end_of_input(self._inside)

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._inside is not None:
            self._inside.pause_writing()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._inside is not None:
            self._inside.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        inside, self._inside = self._inside, None
        self._is_deaf = True
        self._free_early()
        if inside is not None:
            inside.connection_lost(exc)
            return
        self._door.connections.forget(self)
        if self._has_said:  # a client that sent nothing is a port probe, which does not count
            self._count("closed", "the client closed the connection in its TLS handshake")

    # called by Connections, during the handshake

    def expire(self, now: float) -> None:
        """Drop the connection if its handshake takes too long, or failed too long ago."""
        connections = self._door.connections
        timeouts, is_draining = connections.timeouts, connections.is_draining
        age_s = now - self.since
        if self._is_told:
            is_over = age_s > (timeouts.quiet_s if is_draining else timeouts.linger_s)
        elif is_draining:
            is_over = min(age_s, now - connections.quiet_from) > timeouts.quiet_s
        else:
            is_over = age_s > timeouts.handshake_s
            if is_over:
                self._count("timeout", f"no TLS handshake in {timeouts.handshake_s:g} s")
        if is_over:
            self.abort()

    def turn_away(self, reason: str) -> None:
        """Drop the connection, because no answer can be sent during a handshake."""
        self.abort()

    # the handshake

    def _greet(self, data: bytes) -> None:
        if not self._has_said:
            self._has_said = True
            if data[0] != _HANDSHAKE:
                self._raw.write(_PLAIN)
                self._fail("not_tls", "plain text on a TLS port")
                return
        self.held_bytes += len(data)
        self._door.connections.held_bytes += len(data)
        if self.held_bytes > _MAX_GREETING_BYTES:
            self._raw.pause_reading()  # until its turn of deferred work
        if not self._early:
            self._door.connections.put_off(self._continue_handshake)
        self._early += data
        self._door.connections.make_room()

    def _free_early(self) -> None:
        self._door.connections.held_bytes -= self.held_bytes
        self.held_bytes = 0
        self._early = bytearray()

    def _continue_handshake(self) -> None:
        """Continue the handshake with the stored input. OpenSSL takes 0.25 ms with an ECDSA key,
        and 0.5 ms with a 2048-bit RSA key."""
        if self._is_deaf or self._raw.is_closing():
            return
        early, self._early = memoryview(self._early), bytearray()
        is_large = self.held_bytes > _MAX_GREETING_BYTES
        if is_large:
            self._raw.resume_reading()
        while early and self._inside is None and not self._is_deaf:
            self._incoming.write(early[:_FED_BYTES])
            early = early[_FED_BYTES:]
            self._shake_hands()
        if self._inside is not None:
            if early and not self._raw.is_closing():
                self.data_received(bytes(early))
        elif is_large and not self._is_deaf:
            self._fail("other", f"more than {_MAX_GREETING_BYTES} bytes in a TLS handshake")

    def _shake_hands(self) -> None:
        """Continue the handshake. At its end, start the HTTP protocol or count a failure."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            self._flush()  # sends the alert
            self._fail(kind_of(error), text_of(error))
        else:
            self._flush()
            self._open()

    def _open(self) -> None:
        door = self._door
        door.counts.completed += 1
        self._free_early()
        door.connections.forget(self)
        self._inside = inside = door.new_protocol()
        inside.connection_made(cast(asyncio.BaseTransport, self))
        if self._writing_paused:
            inside.pause_writing()
        if self._incoming.pending and not self._is_deaf:
            self._read(inside)

    def _fail(self, reason: str, text: str) -> None:
        """Count a failed handshake, and half-close. (A reset could overtake the TLS alert.)"""
        self._count(reason, text)
        self._is_deaf = True
        self._free_early()
        self.since = self._door.connections.now
        if not self._raw.is_closing():
            self._raw.write_eof()

    def _count(self, reason: str, text: str) -> None:
        if not self._is_told:
            self._is_told = True
            peer = self._raw.get_extra_info("peername")
            who = peer[0] if isinstance(peer, tuple) and peer else "a client"
            self._door.counts.failures[reason] += 1
            log.warning("a TLS handshake failed", extra={"client": who, "error": text})

    # input

    def _decrypt(self, inside: asyncio.Protocol, data: bytes) -> None:
        """Decrypt input until TURN_S seconds are spent in this turn of the event loop. The rest of
        the input is decrypted in a later turn."""
        connections = self._door.connections
        before, began = connections.spent_s, connections.clock()
        view = memoryview(data)
        for at in range(0, len(data), _FED_BYTES):
            if self._is_deaf or self._got_eof or self._raw.is_closing():
                break
            if connections.spent_s >= TURN_S:
                self._early += view[at:]
                self._put_off()
                break
            self._incoming.write(view[at : at + _FED_BYTES])
            self._read(inside)
            connections.spent_s = before + connections.clock() - began

    def _put_off(self) -> None:
        """Decrypt the rest of the input in a later turn of the loop. Pause reading until then."""
        if not self._is_put_off:
            self._is_put_off = True
            self._raw.pause_reading()
            self._door.connections.put_off(self._proceed)

    def _proceed(self) -> None:
        data, self._early = bytes(self._early), bytearray()
        inside, self._is_put_off = self._inside, False
        if inside is None or self._raw.is_closing():
            return
        if self._is_deaf:
            self._drop_input(data)
        else:
            self._decrypt(inside, data)
        if not self._is_put_off and not self._is_paused and not self._raw.is_closing():
            self._raw.resume_reading()

    def _read(self, inside: asyncio.Protocol) -> None:
        tls, incoming = self._tls, self._incoming
        pieces: list[bytes] = []
        is_over = is_broken = False
        try:
            while incoming.pending or tls.pending():
                piece = tls.read(_RECORD_BYTES)
                if not piece:
                    is_over = True
                    break
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass  # the record is incomplete
        except ssl.SSLZeroReturnError:
            is_over = True
        except ssl.SSLError:
            is_broken = True
        if self._outgoing.pending:
            self._flush()  # sends an alert, or a reply to a key update
        if pieces:
            inside.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if is_broken:
            self.abort()
        elif is_over:
            self._end_of_input(inside)

    def _end_of_input(self, inside: asyncio.Protocol) -> bool:
        if not self._got_eof:
            self._got_eof = True
            self._keeps_open = bool(inside.eof_received())
            if not self._keeps_open:
                self.close()
        return self._keeps_open

    def _drop_input(self, data: bytes) -> None:
        """Drop input after the last answer or a failed handshake. Abort if there is too much."""
        inside = self._inside
        if inside is not None:
            inside.data_received(data)
            return
        self._linger_bytes += len(data)
        if self._linger_bytes > _MAX_LINGER_BYTES:
            self.abort()

    # called by the inner protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt all of `data` before returning. The caller may then reuse the buffer."""
        if self._is_deaf or self._raw.is_closing():
            return
        tls, size = self._tls, len(data)
        try:
            written = tls.write(data)
            if written < size:  # OpenSSL writes one record per call
                view = memoryview(data)
                while written < size:
                    if self._outgoing.pending >= _FED_BYTES:
                        self._flush()
                    written += tls.write(view[written:])
        except ssl.SSLError:
            self.abort()
            return
        self._flush()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Half-close. Later input is dropped."""
        if not self._is_deaf:
            self._is_deaf = True
            self._say_farewell()
            self._raw.write_eof()

    def close(self) -> None:
        """Close the connection when everything is written, without waiting for the client's
        close_notify (RFC 8446, 6.1)."""
        if not self._raw.is_closing():
            if not self._is_deaf:
                self._is_deaf = True
                self._say_farewell()
            self._raw.close()

    def abort(self) -> None:
        self._is_deaf = self._is_told = True
        self._free_early()
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def pause_reading(self) -> None:
        self._is_paused = True
        if not self._is_put_off:
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        if not self._is_put_off:
            self._raw.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def _say_farewell(self) -> None:
        # it nearly always raises, because it waits for the peer's close_notify
        with contextlib.suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()

    def _flush(self) -> None:
        data = self._outgoing.read()
        if data and not self._raw.is_closing():
            self._raw.write(data)
