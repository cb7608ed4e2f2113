"""Streamed answers: pieces are sent as fast as the client reads.

Connects the app, which produces pieces, with the connection, which writes them. Handles neither
heads nor framing: the app's bytes are written unchanged."""

from collections.abc import Callable
from typing import Final

from lean_selector.http.head import Request
from lean_selector.http.protocol import _ANSWERED_LAST, HttpProtocol
from lean_selector.http.response import PendingReply

CLOSE_LINE: Final = b"connection: close\r\n"


class StreamedReply(PendingReply):
    """An answer that may be streamed, returned by the app. Later the app calls `resolve` with a
    whole response; or `begin`, then `write` any number of times, then `finish` or `break_off`.

    If the client disconnects first, `on_disconnect` is called once, and the app must make no
    further call. `is_paused` is true while the client does not read. `on_pause` and `on_resume`
    report changes of `is_paused`."""

    def __init__(
        self,
        on_disconnect: Callable[[], object] | None = None,
        on_pause: Callable[[], None] | None = None,
        on_resume: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(on_disconnect)
        self.on_pause = on_pause
        self.on_resume = on_resume
        self.is_paused = False
        self.begun = False
        self._closes = False
        # Set by the connection, before an answer begins.
        self.write: Callable[[bytes], None] = _too_early
        self._protocol: StreamingProtocol | None = None

    # -- for the app -------------------------------------------------------------------------------

    def begin(self, *, closes: bool = False) -> bytes:
        """Begin the answer. Return the `connection` header line for the head, or b"".
        Set `closes` if only the end of the connection marks the end of the answer."""
        assert self._protocol is not None, "the request is not handled yet"
        self.begun = True
        line = self._protocol.connection_line()
        self._closes = closes or line == CLOSE_LINE
        return CLOSE_LINE if closes else line

    def finish(self) -> None:
        """End the answer normally."""
        protocol = self._ended()
        if protocol is not None:
            protocol.finish(self._closes)

    def break_off(self) -> None:
        """End the answer early. If the framing would not show that the answer is incomplete, the
        connection is reset."""
        protocol = self._ended()
        if protocol is not None:
            protocol.break_off(self._closes)

    # -- for the protocol --------------------------------------------------------------------------

    def attach(self, protocol: "StreamingProtocol") -> None:
        self.write, self._protocol = protocol.transport.write, protocol

    def pause(self) -> None:
        self.is_paused = True
        if self.on_pause is not None:
            self.on_pause()

    def resume(self) -> None:
        self.is_paused = False
        if self.on_resume is not None:
            self.on_resume()

    def hang_up(self) -> None:
        self.on_pause = self.on_resume = None
        super().hang_up()

    def _ended(self) -> "StreamingProtocol | None":
        self.on_disconnect = self.on_pause = self.on_resume = None
        protocol, self._protocol = self._protocol, None
        self.write = _too_early
        return protocol


def _too_early(data: bytes) -> None:
    raise AssertionError("nothing can be written now")


# -- a connection whose answers may be streamed ----------------------------------------------------
# Adds to the pending answers of `protocol`: how a stream ends, and notifications when the client
# stops or resumes reading.

_KEPT_LINE: Final = b"connection: keep-alive\r\n"


class StreamingProtocol(HttpProtocol):
    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self._pending, StreamedReply):
            self._pending.pause()

    def resume_writing(self) -> None:
        pending = self._pending
        super().resume_writing()
        if pending is not None and pending is self._pending and isinstance(pending, StreamedReply):
            pending.resume()

    def turn_away(self, reason: str) -> None:
        pending = self._pending
        if isinstance(pending, StreamedReply) and pending.begun:
            self.transport.abort()  # no error can be sent in the middle of an answer
        else:
            super().turn_away(reason)

    def _add_pending(self, reply: PendingReply, request: Request) -> None:
        super()._add_pending(reply, request)
        if isinstance(reply, StreamedReply):
            reply.attach(self)

    def connection_line(self) -> bytes:
        """Return the `connection` header line for a streamed answer, or b"" if none is needed."""
        request = self._pending_request
        assert request is not None
        if self._is_last(request):
            return CLOSE_LINE
        return _KEPT_LINE if request.headers.is_http10 else b""

    def finish(self, closes: bool) -> None:
        """End a streamed answer normally. If `closes` is True, also close the connection."""
        self._drop_pending()
        if not self.transport.is_closing():
            if closes:
                self._holds |= _ANSWERED_LAST
            self._after_pending()

    def break_off(self, resets: bool) -> None:
        """End a streamed answer early. `resets`: reset the connection instead of closing it."""
        self._drop_pending()
        if resets:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._end(lingers=False)
