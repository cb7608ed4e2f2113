"""The route `/busy_threshold`: what is shed, read and changed while the service runs.

Shapes: the request-rejection document and slot_tracker.md 4.2; DELETE, which they do not have,
switches off. The rules are in `core.load.busy_limits`.
"""

import time
from collections.abc import Callable

from lean_selector.access.roles import ADMIN, READ
from lean_selector.core.selection.selector import Selector
from lean_selector.services.bodies import BadQuery, Query
from lean_selector.services.gate import Route, plain, with_body, with_query
from lean_selector.wire.busy import ThresholdRequest, ThresholdRow, Thresholds
from lean_selector.wire.scope import DEFAULT_GROUP

_FIELDS = frozenset({"model", "tenant_id", "routing_group"})


class BusyThresholdService:
    """The handlers, and what they act on."""

    def __init__(self, selector: Selector, clock: Callable[[], float] = time.monotonic) -> None:
        self._selector = selector
        self._clock = clock

    def routes(self) -> tuple[Route, ...]:
        return (
            ("POST", "/busy_threshold", ADMIN, with_body(ThresholdRequest, self.change)),
            ("GET", "/busy_threshold", READ, plain(self.list)),
            ("DELETE", "/busy_threshold", ADMIN, with_query(self.switch_off, _FIELDS)),
        )

    def list(self) -> Thresholds:
        return Thresholds([ThresholdRow.of(*each) for each in self._selector.thresholds()])

    def change(self, body: ThresholdRequest) -> ThresholdRow:
        scope = body.scope()
        now = self._clock()
        return ThresholdRow.of(scope, self._selector.change_threshold(scope, body.given(), now))

    def switch_off(self, query: Query) -> ThresholdRow:
        if "model" not in query:
            raise BadQuery("missing field `model`")
        scope = query["model"], query.get("tenant_id") or DEFAULT_GROUP
        return ThresholdRow.of(scope, self._selector.switch_threshold_off(scope, self._clock()))
