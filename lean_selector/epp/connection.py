"""HTTP/2 and gRPC on one connection of a data plane, with the package `h2`.

Whoever reaches the port can send anything, so everything has a bound. Frames are counted before
`h2` reads them: some kinds cost much and say nothing, and a connection that sends many of these in
a second is closed. Input is read in slices, so that other work waits 2 ms at most. A stream that
does not take its responses gets no further window; without that, a peer could have any amount of
echoes kept. What a connection holds counts for the limit of all connections (`http.connections`).

The choice of a status follows gRPC: a stream is refused by a status, and a connection only if its
peer breaks HTTP/2, or is beyond a bound of the connection."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from lean_selector.epp import messages
from lean_selector.epp.stream import INVALID_ARGUMENT, Channel, ExtProcStream
from lean_selector.http.connections import TURN_S, Connections
from lean_selector.http.head import credential_of

log = logging.getLogger("lean_selector.epp")
logging.getLogger("hpack").setLevel(logging.WARNING)  # else it logs headers, tokens too

EXT_PROC: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_PROCESS: Final = f"/{EXT_PROC}/Process".encode()
_CHECK: Final = b"/grpc.health.v1.Health/Check"
_ALIVE: Final = b"liveness"
_HEALTH_OF: Final = frozenset({b"", _ALIVE, b"readiness", EXT_PROC.encode()})

MAX_STREAMS: Final = 2048  # of a connection
MAX_CONNECTIONS: Final = 1024
MAX_MESSAGE_BYTES: Final = 16 << 20  # of a gRPC message; in BUFFERED, it has the whole body
MAX_HEADER_BYTES: Final = 16 << 10  # of a header list, decoded
STREAM_WINDOW: Final = 1 << 20
CONNECTION_WINDOW: Final = 16 << 20
MAX_UNSENT_BYTES: Final = 128 << 10  # of a stream, before its window stays closed
MAX_IDLE_S: Final = 300.0
MAX_GREETING_S: Final = 10.0  # until the first stream of a connection
MAX_STUCK_S: Final = 5.0  # while it takes nothing of what was sent
MAX_EMPTY: Final = 2048  # frames in a second that say nothing, and resets
_FRAMES_AT_ONCE: Final = 8

_FRAME_HEAD: Final = 9
_MESSAGE_HEAD: Final = 5  # of gRPC: whether it is compressed, and its size
_MAX_FRAME: Final = 16_384
_PREFACE_BYTES: Final = 24
_DATA: Final = 0
# PRIORITY, RST_STREAM, SETTINGS, PING and CONTINUATION; and DATA without data
_EMPTY_KINDS: Final = frozenset({2, 3, 4, 6, 9})
_END_STREAM: Final = 1

_NOT_FOUND: Final = 5
_RESOURCE_EXHAUSTED: Final = 8
_UNIMPLEMENTED: Final = 12
_UNAUTHENTICATED: Final = 16
_HEAD: Final = [(b":status", b"200"), (b"content-type", b"application/grpc")]

NewStream = Callable[[Channel, bytes | None], ExtProcStream]


class _Stream:
    """A gRPC call: reads its messages and sends its responses (`Channel`)."""

    def __init__(self, connection: "PickerConnection", number: int) -> None:
        self._connection = connection
        self._number = number
        self._has_head = False
        self._trailers: list[tuple[bytes, bytes]] | None = None  # once nothing more is said
        self._input = bytearray()  # of an incomplete message
        self.unsent = bytearray()
        self._taken = 0  # bytes of the window that were not given back
        self.handler: ExtProcStream | None = None  # None: a health check

    def send(self, *told: bytes) -> None:
        if self._trailers is None:
            for message in told:
                self.unsent += b"\0" + len(message).to_bytes(4, "big") + message
                self._connection.hold(_MESSAGE_HEAD + len(message))
            self.go_on()

    def finish(self, status: int = 0, text: str = "") -> None:
        if self._trailers is None:
            self._trailers = [(b"grpc-status", b"%d" % status)]
            if text:
                told = text.encode("ascii", "replace").replace(b"%", b"%25")
                self._trailers.append((b"grpc-message", told))
            if self.handler is not None:
                self.handler.closed()
            self.go_on()

    def go_on(self) -> None:
        """Sends what the peer's windows have room for, and gives its own window back."""
        h2, number, unsent = self._connection.h2, self._number, self.unsent
        try:
            if not self._has_head:
                self._has_head = True
                h2.send_headers(number, _HEAD)
            while unsent:
                room = min(h2.local_flow_control_window(number), h2.max_outbound_frame_size)
                if room <= 0:
                    break
                data = bytes(unsent[:room])
                h2.send_data(number, data)
                del unsent[:room]
                self._connection.hold(-len(data))
            if self._trailers is not None and not unsent:
                h2.send_headers(number, self._trailers, end_stream=True)
                self._connection.forget(number)
            elif self._taken > STREAM_WINDOW // 4 and len(unsent) <= MAX_UNSENT_BYTES:
                size, self._taken = self._taken, 0
                h2.increment_flow_control_window(size, number)
        except ProtocolError:  # it was reset meanwhile
            self._connection.forget(number)
        self._connection.flush()

    def take(self, data: bytes, frame_bytes: int) -> None:
        """Takes bytes of the peer, and handles the messages that are complete. `frame_bytes`: of
        the window, which counts padding, too."""
        self._taken += frame_bytes
        connection, pending = self._connection, self._input
        pending += data
        connection.hold(len(data))
        while self._trailers is None and len(pending) >= _MESSAGE_HEAD:
            size = int.from_bytes(pending[1:_MESSAGE_HEAD], "big")
            end = _MESSAGE_HEAD + size
            if pending[0]:
                self.finish(_UNIMPLEMENTED, "compressed messages are not supported")
            elif size > MAX_MESSAGE_BYTES:
                self.finish(_RESOURCE_EXHAUSTED, f"a message has {size} bytes")
            elif len(pending) < end:
                break
            else:
                message = bytes(pending[_MESSAGE_HEAD:end])
                del pending[:end]
                connection.hold(-end)
                if self.handler is None:
                    self._tell_health(message)
                else:
                    self.handler.take(message)
        if self._trailers is not None:
            connection.hold(-len(pending))
            pending.clear()
        elif self._taken > STREAM_WINDOW // 4:
            self.go_on()

    def _tell_health(self, data: bytes) -> None:
        try:
            service = messages.health_service(data)
        except messages.Malformed as error:
            self.finish(INVALID_ARGUMENT, str(error))
            return
        if service not in _HEALTH_OF:
            self.finish(_NOT_FOUND, "unknown service")
            return
        is_well = service == _ALIVE or self._connection.is_ready()
        self.send(messages.SERVING if is_well else messages.NOT_SERVING)
        self.finish()

    def lost(self, *, by_reset: bool = False) -> None:
        """The stream is over: the peer has reset it, its connection is gone, or it was answered."""
        self._trailers = self._trailers or []
        if self.handler is not None:
            self.handler.closed(by_reset=by_reset)
        self._connection.hold(-len(self.unsent) - len(self._input))
        self.unsent.clear()
        self._input.clear()


class PickerConnection(asyncio.Protocol):
    """A connection of a data plane, or of a health check."""

    def __init__(
        self,
        connections: Connections,
        new_stream: NewStream,
        is_ready: Callable[[], bool],
        may_write: Callable[[bytes | None], bool],
    ) -> None:
        """`is_ready`: the answer to health checks. `may_write` returns whether the bearer token of
        this digest may choose workers."""
        self._connections = connections
        self._new_stream = new_stream
        self.is_ready = is_ready
        self._may_write = may_write
        self._streams: dict[int, _Stream] = {}
        self._input = bytearray()  # frames that were not read yet
        self._preface = _PREFACE_BYTES  # that are missing
        self._is_put_off = self._is_paused = self._is_closing = self._is_reading = False
        self._has_room = False  # of windows, since responses were last sent on
        self._taken = 0  # bytes of the connection's window that were not given back
        self._empty = 0  # frames that say nothing, since `_counted_at`
        self._counted_at = 0.0
        self.held_bytes = 0
        self.since = connections.now
        of_h2 = H2Configuration(
            client_side=False,
            header_encoding=None,
            validate_inbound_headers=False,
            validate_outbound_headers=False,
            normalize_inbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = H2Connection(of_h2)
        bounds = {
            SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
        }
        self.h2.local_settings = Settings(client=False, initial_values=bounds)
        self.h2.decoder.max_header_list_size = MAX_HEADER_BYTES

    # -- called by the transport ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.admit(self)
        if self._is_closing:
            return
        self.h2.initiate_connection()
        self.h2.increment_flow_control_window(CONNECTION_WINDOW - 65_535)
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        self._input += data
        if not self._is_put_off:
            self._read()

    def pause_writing(self) -> None:
        """The peer does not read, so it gets no more to answer."""
        self._is_paused = True
        self.since = self._connections.now
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._is_closing:
            return
        self.since = self._connections.now
        if not self._is_put_off:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lost()
        self._input.clear()
        self.hold(-self.held_bytes)
        self._connections.forget(self)

    # -- called by Connections -----------------------------------------------------------------

    def expire(self, now: float) -> None:
        age_s = now - self.since
        limit_s = MAX_IDLE_S if self.h2.highest_inbound_stream_id else MAX_GREETING_S
        if self._is_paused or self._is_closing:
            if age_s > MAX_STUCK_S:
                self.abort()
        elif not self._streams and age_s > limit_s:
            self.go_away()

    def turn_away(self, reason: str) -> None:
        log.warning("a connection of a gateway is closed: %s", reason)
        self.go_away(ErrorCodes.ENHANCE_YOUR_CALM)

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    # -- input ---------------------------------------------------------------------------------

    def _read(self) -> None:
        """Reads frames until TURN_S seconds are spent in this turn of the loop."""
        connections, data = self._connections, self._input
        before, began = connections.spent_s, connections.clock()
        self._is_reading = True
        try:
            while data and (size := self._next_frames()):
                frames = bytes(data[:size])
                del data[:size]
                for event in self.h2.receive_data(frames):
                    self._on_event(event)
                if self._is_closing:
                    return
                if self._has_room:
                    self._has_room = False
                    for stream in list(self._streams.values()) if self.held_bytes else ():
                        if self.h2.outbound_flow_control_window <= 0:
                            break
                        if stream.unsent:
                            stream.go_on()
                connections.spent_s = before + connections.clock() - began
                if connections.spent_s >= TURN_S and data:
                    self._is_put_off = True
                    self._transport.pause_reading()
                    connections.put_off(self._go_on)
                    break
        except ProtocolError:
            self._close()  # `h2` has written a GOAWAY
        finally:
            self._is_reading = False
        self.flush()
        connections.make_room()

    def _go_on(self) -> None:
        self._is_put_off = False
        if self._is_closing:
            return
        self._read()
        if not (self._is_put_off or self._is_paused or self._is_closing):
            self._transport.resume_reading()

    def _next_frames(self) -> int:
        """Return how many bytes the next frames have that are complete; a few of them, or 0.
        Counts those that cost much and say nothing."""
        data = self._input
        at, end = 0, len(data)
        if self._preface:  # `h2` checks it
            at = min(self._preface, end)
            self._preface -= at
            return at
        for _ in range(_FRAMES_AT_ONCE):
            if end - at < _FRAME_HEAD:
                break
            size = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            if size > _MAX_FRAME:
                raise ProtocolError("a frame is too large")
            if end - at - _FRAME_HEAD < size:
                break
            kind = data[at + 3]
            is_end = size or data[at + 4] & _END_STREAM
            self._empty += kind in _EMPTY_KINDS or (kind == _DATA and not is_end)
            at += _FRAME_HEAD + size
        if self._empty > MAX_EMPTY:
            now = self._connections.now
            if now - self._counted_at < 1.0:
                self.turn_away("too many resets, or frames that say nothing")
                return 0
            self._empty, self._counted_at = 0, now
        return at

    def _on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self._on_data(event.stream_id, event.data, event.flow_controlled_length)
        elif isinstance(event, RequestReceived):
            self._on_request(event.stream_id, dict(event.headers))
        elif isinstance(event, StreamEnded):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.finish()  # in ext_proc, the request is over
        elif isinstance(event, StreamReset):
            self.forget(event.stream_id, by_reset=True)
        elif isinstance(event, (WindowUpdated, RemoteSettingsChanged)):
            self._has_room = True

    def _on_request(self, number: int, headers: "dict[bytes, bytes]") -> None:
        stream = self._streams[number] = _Stream(self, number)
        path, given = headers.get(b":path"), headers.get(b"authorization")
        credential = None if given is None else credential_of(given)
        if path == _CHECK:
            return
        if path != _PROCESS:
            stream.finish(_UNIMPLEMENTED, "unknown method")
        elif not self._may_write(credential):
            stream.finish(_UNAUTHENTICATED, "a bearer token with the role write is required")
        else:
            stream.handler = self._new_stream(stream, credential)

    def _on_data(self, number: int, data: bytes, size: int) -> None:
        self._taken += size
        if self._taken > CONNECTION_WINDOW // 4:
            self.h2.increment_flow_control_window(self._taken)
            self._taken = 0
        stream = self._streams.get(number)
        if stream is not None:
            stream.take(data, size)

    # -- output --------------------------------------------------------------------------------

    def hold(self, size: int) -> None:
        """Counts bytes that are held, or with a negative `size` are not any more."""
        self.held_bytes += size
        self._connections.held_bytes += size

    def forget(self, number: int, *, by_reset: bool = False) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.lost(by_reset=by_reset)
        if not self._streams:
            self.since = self._connections.now

    def flush(self) -> None:
        """Sends what was written; at the end of the turn, if it reads input."""
        if not (self._is_reading or self._is_closing) and (data := self.h2.data_to_send()):
            self._transport.write(data)

    def go_away(self, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Resets the streams that are open, and closes the connection."""
        if self._is_closing:
            return
        for number in list(self._streams):
            with contextlib.suppress(ProtocolError):
                self.h2.reset_stream(number, ErrorCodes.CANCEL)
            self.forget(number)
        self.h2.close_connection(code)
        self._close()

    def _close(self) -> None:
        self._is_reading = False
        self.flush()
        if not self._is_paused:
            self.since = self._connections.now
        self._is_closing = True
        self._transport.close()
