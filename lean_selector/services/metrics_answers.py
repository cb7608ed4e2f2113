"""GET /metrics: the families of a service as text, made in slices of the loop's turns.

A fleet of 512 ranks has thousands of samples, at a microsecond or so each: nobody else may wait for
all of them. What the text says is the business of `metrics` and of the families it is given.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from lean_selector.access.roles import READ
from lean_selector.service.exposition import CONTENT_TYPE, AnyFamily, exposition_text
from lean_selector.services.gate import Route
from lean_selector.services.sliced_answers import CallSoon, SlicedAnswers

PIECES_PER_PART = 32  # a part is what is made between two looks at the clock: about 40 us


class MetricsAnswers:
    """Only from the thread of the loop. `families` is asked at each scrape."""

    def __init__(
        self,
        families: Callable[[], Iterable[AnyFamily]],
        call_soon: CallSoon,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._families = families
        self._sliced = SlicedAnswers("a scrape", self._parts, call_soon, CONTENT_TYPE, clock)

    def routes(self) -> tuple[Route, ...]:
        # Not `plain`: this text has no other form.
        return (
            ("GET", "/metrics", READ, lambda request, param: self._sliced.answer(at_once=False)),
        )

    def _parts(self) -> Iterator[bytes]:
        pieces = exposition_text(self._families())
        while part := list(islice(pieces, PIECES_PER_PART)):
            yield "".join(part).encode()
