"""The app behind the gateway's port: which requests are sent where, and what is answered at once.

Every request but a list of models becomes an errand. Knows no selector: `placing` does.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from lean_selector.gateway.counts import Counts
from lean_selector.gateway.errand import Errand
from lean_selector.gateway.header_lines import wants_websocket
from lean_selector.gateway.lease import WorkerLease
from lean_selector.gateway.model_list import ModelList
from lean_selector.gateway.placing import Placing
from lean_selector.gateway.refusals import refusal
from lean_selector.gateway.request_ids import RequestIds, id_line, id_of
from lean_selector.gateway.rotation import Rotation
from lean_selector.http.client import Upstream
from lean_selector.http.head import HttpError, Request
from lean_selector.http.response import PendingReply
from lean_selector.service.logs import ACCESS_LOG
from lean_selector.wire.selection import OpenAiErrorBody

log = logging.getLogger(ACCESS_LOG)

MOST_DETAIL_CHARACTERS: Final = 256  # some are a template's or a client's words
COMPLETIONS: Final = frozenset({b"/v1/completions", b"/v1/chat/completions"})


def http_refusal(error: HttpError) -> bytes:
    """What is answered to an error of the HTTP level."""
    return OpenAiErrorBody.encoded(error.status, error.text)


class Door:
    """From the loop's thread only."""

    def __init__(
        self,
        placing: Placing,
        rotation: Rotation,
        models: ModelList,
        counts: Counts,
        *,
        clock: Callable[[], float],
        silence_s: float,
        touch_after_s: float,
        token: Callable[[], bytes] | None,
        access_log: bool,
        most_body_bytes: int,
    ) -> None:
        """`silence_s`: for so long a worker may say nothing; `touch_after_s`: so often a
        reservation is touched, which the selector would forget."""
        self._placing = placing
        self._rotation = rotation
        self._models = models
        self._counts = counts
        self._clock = clock
        self._silence_s = silence_s
        self._touch_after_s = touch_after_s
        self._token = token
        self._access_log = access_log
        self._most_body_bytes = most_body_bytes
        self._ids = RequestIds()
        self._under_way: set[Errand] = set()

    def __call__(self, request: Request) -> bytes | PendingReply:
        own_id = self._ids.new()
        request_id = id_of(request.section, own_id)
        if not request.keep_alive and wants_websocket(request.section):
            text = "websocket upgrades are not supported by this gateway"
            return self._refused(request_id, 501, text, "no_websocket")
        if request.body_too_large:
            text = f"the request body has more than {self._most_body_bytes} bytes"
            return self._refused(request_id, 413, text, "request_too_large")
        is_completion = request.path in COMPLETIONS and request.method == b"POST"
        if not is_completion and request.path == b"/v1/models" and request.method == b"GET":
            return self._models.answer(id_line(request_id))
        errand = Errand(
            request,
            request_id,
            own_id,
            self._counts,
            lambda each: self._placing.begin(each, is_completion),
            self._failed,
            self._over,
            self._token,
        )
        self._under_way.add(errand)
        return errand.reply

    def _refused(self, request_id: bytes, status: int, message: str, code: str) -> bytes:
        self._counts.answers[status] += 1
        return refusal(status, message, code, id_line(request_id))

    def _failed(self, lease: WorkerLease, outcome: str) -> None:
        self._rotation.report(lease.endpoint, outcome, self._clock())

    def _over(self, errand: Errand) -> None:
        self._under_way.discard(errand)
        lease = errand.lease
        if lease is not None and errand.outcome is not None:
            self._rotation.report(lease.endpoint, errand.outcome, self._clock())
        if self._access_log:
            self._log(errand)

    def _log(self, errand: Errand) -> None:
        request, lease = errand.request, errand.lease
        fields: dict[str, object] = {
            "method": request.method.decode("latin-1"),
            "path": request.path.decode("latin-1")[:1024],
            "status": errand.status or 499,
            "duration_us": round(errand.age_s * 1e6),
            "request_id": errand.request_id.decode("latin-1"),
        }
        if lease is not None:
            fields["worker"] = lease.endpoint.text
            if lease.overlap_tokens is not None:
                fields["overlap_tokens"] = lease.overlap_tokens
                if errand.why_unknown is not None:
                    fields["prompt"] = errand.why_unknown.why.value
                    fields["prompt_detail"] = errand.why_unknown.text[:MOST_DETAIL_CHARACTERS]
        if errand.tried:
            fields["tried"] = len(errand.tried)
        log.info("request", extra=fields)

    def sweep(self, now: float) -> None:
        """About every second."""
        self._rotation.sweep(now, self._silence_s)
        for errand in list(self._under_way):
            if errand.lease is not None and now - errand.lease_since > self._touch_after_s:
                errand.lease_since = now
                errand.lease.touch()

    def endpoints(self) -> list[Upstream]:
        return list(self._rotation.endpoints.values())

    async def close(self) -> None:
        """When the stop has dropped every client, who may not have been told to have hung up."""
        placing = [each.placing for each in self._under_way if each.placing is not None]
        for errand in list(self._under_way):
            errand.reply.hang_up()
        await asyncio.gather(*placing, return_exceptions=True)
        self._models.close()
        self._rotation.close()
