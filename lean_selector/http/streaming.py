"""A connection whose answers may also go out in pieces.

What `protocol` does for answers that come later, and beside it what those need that stream: how
each ends, and who is told while the client does not take them.
"""

from typing import Final

from lean_selector.http.pending_reply import PendingReply
from lean_selector.http.protocol import _ANSWERED_LAST, HttpProtocol
from lean_selector.http.request import Request
from lean_selector.http.streamed_reply import CLOSE_LINE, StreamedReply

_KEPT_LINE: Final = b"connection: keep-alive\r\n"


class StreamingProtocol(HttpProtocol):
    """One connection, of an app that may answer with a StreamedReply."""

    __slots__ = ()

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self._parked, StreamedReply):
            self._parked.pause()

    def resume_writing(self) -> None:
        parked = self._parked
        super().resume_writing()
        if parked is not None and parked is self._parked and isinstance(parked, StreamedReply):
            parked.resume()

    def turn_away(self, reason: str) -> None:
        parked = self._parked
        if isinstance(parked, StreamedReply) and parked.begun:
            self.transport.abort()  # nothing else can be said in the middle of an answer
        else:
            super().turn_away(reason)

    def _park(self, reply: PendingReply, request: Request) -> None:
        super()._park(reply, request)
        if isinstance(reply, StreamedReply):
            reply.attach(self.transport.write, self._last_word, self._finish, self._break_off)

    def _last_word(self) -> bytes:
        """The `connection` line of an answer that begins now."""
        request = self._parked_request
        assert request is not None
        if self._is_last(request):
            return CLOSE_LINE
        return _KEPT_LINE if request.is_http10 else b""

    def _finish(self, closes: bool) -> None:
        """A streamed answer is written to its end."""
        self._unpark()
        if not self.transport.is_closing():
            if closes:
                self._holds |= _ANSWERED_LAST
            self._after_parked()

    def _break_off(self, resets: bool) -> None:
        """A streamed answer will have no end."""
        self._unpark()
        if resets:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._end(lingers=False)
