"""One connection to a worker, kept alive from request to request.

Cuts what comes into answers and hands each piece on at once, as it came. Nothing is kept but an
unfinished head. No task and no timer: the endpoint's sweep is the clock.
"""

import asyncio
from typing import Final, Protocol, cast

from lean_selector.gateway.answer_head import MOST_BYTES, AnswerHead, MalformedAnswer, head_of
from lean_selector.http.passage import Passage, UnboundedPassage

# Below, a request goes out as one piece: joining costs less than a second segment.
_JOINED_BYTES: Final = 64 * 1024


class Receiver:
    """Who waits for an answer. After `on_end` and `on_lost` nothing more is called."""

    def on_head(self, head: AnswerHead) -> bool:
        """The answer begins. Whether pieces of its body are wanted without their framing."""
        raise NotImplementedError

    def on_body(self, data: bytes) -> None:
        """A piece of the body, never empty."""
        raise NotImplementedError

    def on_end(self) -> None:
        """It was complete."""
        raise NotImplementedError

    def on_lost(self, reason: str, is_stale: bool) -> None:
        """It will not be completed. `is_stale`: the connection had been kept, and ended before the
        first byte of this answer, as one does that the worker has just given up."""
        raise NotImplementedError


class Home(Protocol):
    """Whose connections these are: an `Endpoint`."""

    @property
    def now(self) -> float: ...  # monotonic seconds at the last sweep
    def opened(self, connection: "WorkerConnection") -> None: ...
    def closed(self, connection: "WorkerConnection") -> None: ...
    def put_aside(self, connection: "WorkerConnection") -> None: ...


class WorkerConnection(asyncio.Protocol):
    """Idle, or at one request."""

    __slots__ = (
        "_answers_head",
        "_has_answer",
        "_head",
        "_is_paused",
        "_keeps",
        "_passage",
        "_receiver",
        "_transport",
        "_unframes",
        "endpoint",
        "heard_at",
        "requests",
    )

    def __init__(self, endpoint: Home) -> None:
        self.endpoint = endpoint
        self.requests = 0
        self.heard_at = endpoint.now  # or asked, or put aside; monotonic seconds of the last sweep
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._answers_head = False
        self._head = bytearray()
        self._passage: Passage | None = None
        self._unframes = False
        self._keeps = False
        self._has_answer = False
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_free(self) -> bool:
        """Nobody waits for an answer on it."""
        return self._receiver is None

    @property
    def waits(self) -> bool:
        """For the worker: neither idle, nor held back because the client does not read."""
        return self._receiver is not None and not self._is_paused

    def send(
        self, head: bytes, body: bytes | bytearray, receiver: Receiver, answers_head: bool
    ) -> None:
        """Ask; `receiver` hears what comes of it, not before this returns."""
        transport = self._transport
        assert transport is not None
        assert self._receiver is None, "one request at a time"
        self._receiver = receiver
        self._answers_head = answers_head
        self._passage, self._has_answer = None, False
        self.requests += 1
        self.heard_at = self.endpoint.now
        if len(body) < _JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    def pause(self) -> None:
        """Read nothing until `resume`: the client does not take what it was sent."""
        if not self._is_paused and self.is_open:
            self._is_paused = True
            assert self._transport is not None
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.heard_at = self.endpoint.now
            if self.is_open:
                assert self._transport is not None
                self._transport.resume_reading()

    def drop(self) -> None:
        """End it at once: what is under way belongs to nobody, and the worker is to see that."""
        self._receiver = None
        self._forget()
        if self._transport is not None:
            self._transport.abort()

    def time_out(self, reason: str) -> None:
        receiver = self._receiver
        self.drop()
        if receiver is not None:
            receiver.on_lost(reason, False)

    # -- what the loop tells -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self.endpoint.opened(self)

    def data_received(self, data: bytes) -> None:
        receiver, passage = self._receiver, self._passage
        if receiver is None:
            self.drop()  # nobody has asked
            return
        self.heard_at = self.endpoint.now
        if passage is None:
            self._has_answer = True
            rest = self._read_head(data)
            if rest is None:
                return
            data, passage = rest, self._passage
            if self._receiver is not receiver or passage is None:
                return  # whoever heard of the head gave it up
        if self._unframes:
            payload: list[bytes] = []
            stop = passage.pass_on(data, payload)
            if payload:
                receiver.on_body(payload[0] if len(payload) == 1 else b"".join(payload))
        else:
            stop = passage.pass_on(data, None)
            if stop:
                receiver.on_body(data if stop == len(data) else data[:stop])
        if self._receiver is not receiver:
            return
        if passage.error is not None:
            self.time_out(f"its answer is not HTTP: {passage.error.text}")
        elif passage.is_done:
            self._end(receiver, stop == len(data))

    def eof_received(self) -> None:
        return None  # the transport closes

    def connection_lost(self, exc: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        self._transport = None
        self._forget()
        if receiver is None:
            return
        if exc is None and isinstance(self._passage, UnboundedPassage):
            receiver.on_end()
            return
        what = "the connection ended" if exc is None else f"the connection was lost: {exc}"
        when = "in the middle of its answer" if self._has_answer else "before an answer"
        receiver.on_lost(f"{what} {when}", self.requests > 1 and not self._has_answer)

    # -- inside --------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes | None:
        """What follows the head, once that is here."""
        receiver = self._receiver
        assert receiver is not None
        while True:
            if self._head:
                self._head += data
                data = bytes(self._head)
                self._head.clear()
            end = data.find(b"\r\n\r\n") + 4
            if end == 3:
                if len(data) > MOST_BYTES:
                    self.time_out(f"the head of its answer has more than {MOST_BYTES} bytes")
                    return None
                self._head += data
                return None
            try:
                head = head_of(data[:end], self._answers_head)
            except MalformedAnswer as error:
                self.time_out(str(error))
                return None
            data = data[end:]
            if head is not None:
                break
        self._passage, self._keeps = head.passage, head.keeps
        self._unframes = receiver.on_head(head)
        if not data and not head.passage.is_done:
            return None
        return data

    def _end(self, receiver: Receiver, is_clean: bool) -> None:
        """The answer is complete. Kept for another, if nothing speaks against it."""
        self._receiver = self._passage = None
        self.resume()
        if self._keeps and is_clean and self.is_open:
            self.endpoint.put_aside(self)
        else:
            self.drop()
        receiver.on_end()

    def _forget(self) -> None:
        self.endpoint.closed(self)
