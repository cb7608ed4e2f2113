"""The route `/busy_threshold`: what is shed, read and changed while the service runs.

Shapes: the request-rejection document and slot_tracker.md 4.2; DELETE, which they do not have,
switches off. The rules are in `core.busy`.
"""

import time
from collections.abc import Callable

from lean_selector.core.errors import BadRequest
from lean_selector.core.selection.selector import Selector
from lean_selector.http1.reader import Request
from lean_selector.http1.router import RepeatedQueryField, parse_query
from lean_selector.services.gate import Answer, Route, plain, reply, with_body
from lean_selector.wire.busy import ThresholdRequest, ThresholdRow, Thresholds, threshold_row
from lean_selector.wire.scope import DEFAULT_GROUP

_FIELDS = frozenset({"model", "tenant_id", "routing_group"})


class BusyThresholdService:
    """The handlers, and what they act on."""

    def __init__(self, selector: Selector, clock: Callable[[], float] = time.monotonic) -> None:
        self._selector = selector
        self._clock = clock

    def routes(self) -> tuple[Route, ...]:
        return (
            ("POST", "/busy_threshold", with_body(ThresholdRequest, self.change)),
            ("GET", "/busy_threshold", plain(self.list)),
            ("DELETE", "/busy_threshold", self.switch_off),
        )

    def list(self) -> Thresholds:
        return Thresholds([threshold_row(*each) for each in self._selector.thresholds()])

    def change(self, body: ThresholdRequest) -> ThresholdRow:
        scope = body.scope()
        now = self._clock()
        return threshold_row(scope, self._selector.change_threshold(scope, body.given(), now))

    def switch_off(self, request: Request, param: bytes | None) -> Answer:
        try:
            query = parse_query(request.query or b"", _FIELDS)
        except RepeatedQueryField as error:
            raise BadRequest(f"Failed to deserialize query string: {error}") from None
        if "model" not in query:
            raise BadRequest("Failed to deserialize query string: missing field `model`")
        tenant_id, group = query.get("tenant_id"), query.get("routing_group")
        if None not in (tenant_id, group) and tenant_id != group:
            raise BadRequest(
                "Failed to deserialize query string: tenant_id and routing_group are two names of "
                "one thing and must not differ"
            )
        scope = query["model"], tenant_id or group or DEFAULT_GROUP
        threshold = self._selector.switch_threshold_off(scope, self._clock())
        return reply(200, threshold_row(scope, threshold))
