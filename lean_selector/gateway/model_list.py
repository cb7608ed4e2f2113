"""GET /v1/models: what all workers list, each model once.

Asked of the workers when a client asks, all at once, and kept for a moment.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from lean_selector.gateway.refusals import refusal
from lean_selector.gateway.rotation import Rotation
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.tasks import watched

HOLDS_S: Final = 2.0
TIMEOUT_S: Final = 2.0


class ModelList:
    """From the loop's thread only."""

    def __init__(
        self, rotation: Rotation, client: OutboundClient, clock: Callable[[], float]
    ) -> None:
        self._rotation = rotation
        self._client = client
        self._clock = clock
        self._known: bytes | None = None
        self._until = 0.0
        self._asking: asyncio.Task[bytes | None] | None = None

    def answer(self, line: bytes) -> bytes | PendingReply:
        """With this header line, which is the request's own."""
        if self._known is not None and self._clock() < self._until:
            return encode_response(200, self._known, extra=line)
        if self._asking is None:
            self._asking = watched("list of models", self._ask())
        reply = PendingReply()

        def told(asked: "asyncio.Task[bytes | None]") -> None:
            if reply.response is not None or asked.cancelled():
                return
            body = None if asked.exception() is not None else asked.result()
            if body is None:
                reply.resolve(refusal(503, "no worker tells its models", "no_worker", line))
            else:
                reply.resolve(encode_response(200, body, extra=line))

        self._asking.add_done_callback(told)
        return reply

    async def _ask(self) -> bytes | None:
        try:
            lists = await asyncio.gather(
                *(self._models_of(each.text) for each in self._rotation.in_turn)
            )
            models: dict[str, msgspec.Raw] = {}
            for rows in lists:
                for name, row in rows.items():
                    models.setdefault(name, row)
            if not models:
                return None
            listed = b",".join(bytes(row) for row in models.values())
            body = b'{"object":"list","data":[%b]}' % listed
            self._known, self._until = body, self._clock() + HOLDS_S
            return body
        finally:
            self._asking = None

    async def _models_of(self, base: str) -> dict[str, msgspec.Raw]:
        try:
            text = await self._client.text(base + "/v1/models", timeout_s=TIMEOUT_S)
            listed = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            rows = msgspec.json.decode(listed["data"], type=list[msgspec.Raw])
            named = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
            return {bytes(named(row)["id"]).decode(): row for row in rows}
        except (OutboundFailed, msgspec.DecodeError, LookupError, ValueError):
            return {}

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
