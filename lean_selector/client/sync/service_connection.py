"""Exchanges with one selection service or slot tracker.

Only carries a Call there and its answer back; what is retried, and when, is decided elsewhere.
"""

from typing import TypeVar

import httpx

from lean_selector.client.access import Access
from lean_selector.client.errors import ClientClosed
from lean_selector.client.exchanges import Call
from lean_selector.client.timeouts import Timeouts
from lean_selector.client.transport import CALL_ERRORS, SERVICE_LIMITS, ServiceAddress

T = TypeVar("T")


class SyncServiceConnection:
    """From its first exchange to close()."""

    def __init__(self, endpoint: str, timeouts: Timeouts, access: Access | None = None) -> None:
        self._address = ServiceAddress(endpoint, access)
        self._timeouts = timeouts
        transport = httpx.HTTPTransport(
            uds=self._address.uds, verify=self._address.context, limits=SERVICE_LIMITS
        )
        self._http = httpx.Client(transport=transport, trust_env=False)

    def exchange(self, call: Call[T]) -> T:
        """Raises ServiceUnreachable, ServiceRefused and ClientClosed."""
        if self._http.is_closed:
            raise ClientClosed(f"{self._address.endpoint}: the client is closed")
        try:
            response = self._http.send(self._address.request(call, self._timeouts))
            if self._address.wants_json(response):
                response = self._http.send(self._address.request(call, self._timeouts))
        except CALL_ERRORS as error:
            raise self._address.lost(error) from error
        return self._address.answer(call, response)

    def close(self) -> None:
        self._http.close()
