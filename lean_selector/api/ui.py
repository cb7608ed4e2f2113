"""The page `GET /ui` and its data: `GET /fleet`, `GET /choices` and `GET /prefixes`, which the page
polls. Choices are collected only while somebody asks for them."""

import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.resources import files
from typing import Final

from lean_selector.api.fleet import FleetView
from lean_selector.api.replies import CallSoon, SlicedAnswers
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.watch import ChoiceWatch
from lean_selector.http.response import encode_response
from lean_selector.wire.fleet import Choices
from lean_selector.wire.scalars import json_form

# Choices are collected until nobody has asked for them for so long, or for up to twice as long.
UNWANTED_S: Final = 30.0


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


# -- the routes' handlers --------------------------------------------------------------------------


class Page:
    """The handlers of the routes of the page /ui. Used only on the event loop's thread."""

    def __init__(
        self,
        selector: Selector,
        view: FleetView,
        call_soon: CallSoon,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`call_soon` and `call_later` are the event loop's methods."""
        self._selector = selector
        self._view = view
        self._call_later = call_later
        self._is_wanted = False  # choices, since the last look at it
        self._text, self._lines = page()
        self.fleet: Final = SlicedAnswers("the fleet", self._fleet_parts, call_soon)
        self.prefixes: Final = SlicedAnswers("the prefixes", self._prefix_parts, call_soon)

    def ui(self) -> bytes:
        return encode_response(200, self._text, b"text/html; charset=utf-8", self._lines)

    def choices(self) -> Choices:
        """Return the last choices. The first call starts to collect them."""
        watch = self._selector.watch
        if watch is None:
            watch = self._selector.watch = ChoiceWatch()
            self._call_later(UNWANTED_S, self._end_unwanted)
        self._is_wanted = True
        return Choices(self._view.clock(), watch.seen, list(watch.kept))

    def _end_unwanted(self) -> None:
        if self._is_wanted:
            self._is_wanted = False
            self._call_later(UNWANTED_S, self._end_unwanted)
        else:
            self._selector.watch = None

    def _fleet_parts(self) -> Iterator[bytes]:
        fleet = self._view.empty()
        for _ in self._view.collect(fleet):
            yield b""
        yield json_form(fleet)

    def _prefix_parts(self) -> Iterator[bytes]:
        trees = []
        watch = self._selector.watch
        for tree in self._view.prefixes(None if watch is None else watch.hits):
            if tree is not None:
                trees.append(tree)
            yield b""
        yield json_form(trees)
