"""The page `GET /ui` and its data: `GET /fleet`, `GET /prefixes`, and the stream `GET /events`.

While a client reads the stream, the changes of the state are sent to all clients every second or
two. A client that reads too slowly misses changes, and then gets the whole state."""

import re
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import Final

from msgspec import UNSET

from lean_selector.api.fleet import FleetView
from lean_selector.api.replies import SLICE_S, CallSoon, SlicedAnswers
from lean_selector.api.routes import Served
from lean_selector.core.errors import Unavailable
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import Decision
from lean_selector.core.selection.watch import ChoiceWatch
from lean_selector.http.head import Request
from lean_selector.http.response import date_header, encode_response
from lean_selector.http.streaming import StreamedReply
from lean_selector.wire.fleet import Fleet, FleetEvent, FleetRank
from lean_selector.wire.scalars import json_form

MOST_LISTENERS: Final = 16
EVERY_S: Final = 1.0
_MANY_RANKS: Final = 128  # from this many on, rounds are half as frequent
EVENT_STREAM: Final = b"text/event-stream"


# -- the page --------------------------------------------------------------------------------------

_BLOCKS: Final = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def page() -> tuple[bytes, bytes]:
    """Return the page's HTML, and header lines that allow only the page's scripts and styles."""
    text = files("lean_selector.api").joinpath("ui.html").read_bytes()
    hashes = {
        kind: b"'sha256-%b'" % b64encode(sha256(block).digest())
        for kind, block in _BLOCKS.findall(text)
    }
    policy = (
        b"default-src 'none'; script-src %b; style-src %b; img-src data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        % (hashes[b"script"], hashes[b"style"])
    )
    return text, (
        b"content-security-policy: %b\r\nx-content-type-options: nosniff\r\n"
        b"referrer-policy: no-referrer\r\ncache-control: no-cache\r\n" % policy
    )


# -- the events ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Events:
    """Sends changes to all clients of GET /events. Used only on the event loop's thread.

    `call_soon` and `call_later` are the event loop's methods."""

    selector: Selector
    view: FleetView
    call_soon: CallSoon
    call_later: Callable[[float, Callable[[], None]], object]

    def __post_init__(self) -> None:
        # Those who read the stream, and whether each is new or has missed events.
        self._listeners: dict[StreamedReply, bool] = {}
        self.choices: ChoiceWatch | None = None  # set while a client listens
        self._round: Iterator[None] | None = None
        self._serial = 0  # id of the valid timer; earlier timers are ignored
        self._ranks: dict[tuple[int, int], FleetRank] = {}  # as last sent
        self._told: Fleet = self.view.empty()
        self._told_choices = 0
        self._is_over = False

    def answer(self, request: Request) -> Served:
        if request.method == b"HEAD":
            return encode_response(200, b"", EVENT_STREAM)
        if self._is_over or len(self._listeners) >= MOST_LISTENERS:
            raise Unavailable(f"at most {MOST_LISTENERS} clients may listen at a time")
        reply = StreamedReply()
        reply.on_disconnect = lambda: self._leave(reply)
        self._listeners[reply] = True
        if self.choices is None:
            self.selector.watch = self.choices = ChoiceWatch()
        self.call_soon(lambda: self._begin(reply))
        return reply

    def close(self) -> None:
        """Ends the streams of all clients, for a shutdown."""
        self._is_over = True
        for reply in list(self._listeners):
            self._leave(reply)
            if reply.begun:
                reply.finish()
            else:
                reply.resolve(encode_response(503, b'{"error":"stopping"}'))

    def _begin(self, reply: StreamedReply) -> None:
        if reply not in self._listeners:
            return
        line = reply.begin(closes=True)
        reply.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncache-control: no-store\r\n%b%b\r\n"
            % (EVENT_STREAM, date_header.line, line)
        )
        if self._round is None:  # otherwise the next round is soon
            self._start()

    def _leave(self, reply: StreamedReply) -> None:
        self._listeners.pop(reply, None)
        if not self._listeners:
            self.selector.watch = self.choices = self._round = None
            self._serial += 1
            self._ranks = {}
            self._told = self.view.empty()
            self._told_choices = 0

    def _start(self) -> None:
        self._serial += 1
        if self._listeners:
            self._round = self._send_changes()
            self._run_round()

    def _run_round(self) -> None:
        """Works at most SLICE_S seconds: computes and sends changes. Schedules the rest."""
        ends, going = time.perf_counter() + SLICE_S, self._round
        if going is None:
            return
        is_over = True
        try:
            for _ in going:
                if time.perf_counter() >= ends:
                    is_over = False
                    break
        finally:
            if not is_over:
                self.call_soon(self._run_round)
            elif self._listeners:
                self._pause()

    def _pause(self) -> None:
        self._round = None
        serial = self._serial
        pause_s = EVERY_S if len(self._ranks) < _MANY_RANKS else 2 * EVERY_S
        self.call_later(pause_s, lambda: self._due(serial))

    def _due(self, serial: int) -> None:
        if serial == self._serial:
            self._start()

    def _send_changes(self) -> Iterator[None]:
        """Computes the changes since the last call, and sends them to each client, in steps."""
        fleet, whole, news = self.view.empty(), b"", b""
        yield from self.view.collect(fleet)
        watch, told, before = self.choices, self._told, self._ranks
        choices = [] if watch is None else list(watch.kept)
        seen = 0 if watch is None else watch.seen
        ranks = {(rank.worker_id, rank.dp_rank): rank for rank in fleet.ranks}
        for reply, is_behind in list(self._listeners.items()):
            if reply not in self._listeners:
                continue  # it has left between two steps
            if not reply.begun or reply.is_paused:
                self._listeners[reply] = True
                continue
            if is_behind and not whole:
                whole = self._event(fleet, fleet.ranks, [], choices, seen, whole=True)
            elif not is_behind and not news:
                news = self._event(
                    fleet,
                    [rank for key, rank in ranks.items() if before.get(key) != rank],
                    [f"{worker}/{rank}" for worker, rank in before.keys() - ranks.keys()],
                    [each for each in choices if each.number > self._told_choices],
                    seen,
                    knows_workers=fleet.workers == told.workers,
                    knows_findings=fleet.findings == told.findings,
                )
            reply.write(whole if is_behind else news)
            self._listeners[reply] = False
            yield
        self._ranks, self._told = ranks, fleet
        self._told_choices = seen

    def _event(
        self,
        fleet: Fleet,
        ranks: list[FleetRank],
        gone: list[str],
        choices: list[Decision],
        seen: int,
        whole: bool = False,
        knows_workers: bool = False,
        knows_findings: bool = False,
    ) -> bytes:
        event = FleetEvent(
            whole=whole,
            version=fleet.version,
            now=fleet.now,
            monotonic=self.view.clock(),
            workers=UNSET if knows_workers else fleet.workers,
            ranks=ranks,
            gone=gone,
            models=fleet.models,
            findings=UNSET if knows_findings else fleet.findings,
            seen=seen,
            choices=choices,
        )
        return b"event: fleet\ndata: %b\n\n" % json_form(event)


# -- the routes' handlers --------------------------------------------------------------------------


class Page:
    """The handlers of the routes of the page /ui."""

    def __init__(self, view: FleetView, events: Events, call_soon: CallSoon) -> None:
        """`call_soon` is the event loop's method."""
        self._view = view
        self.events: Final = events
        self._text, self._lines = page()
        self.fleet: Final = SlicedAnswers("the fleet", self._fleet_parts, call_soon)
        self.prefixes: Final = SlicedAnswers("the prefixes", self._prefix_parts, call_soon)

    def ui(self) -> bytes:
        return encode_response(200, self._text, b"text/html; charset=utf-8", self._lines)

    def close(self) -> None:
        """Ends all streams of GET /events, for a shutdown."""
        self.events.close()

    def _fleet_parts(self) -> Iterator[bytes]:
        fleet = self._view.empty()
        for _ in self._view.collect(fleet):
            yield b""
        yield json_form(fleet)

    def _prefix_parts(self) -> Iterator[bytes]:
        trees = []
        watch = self.events.choices
        for tree in self._view.prefixes(None if watch is None else watch.hits):
            if tree is not None:
                trees.append(tree)
            yield b""
        yield json_form(trees)
