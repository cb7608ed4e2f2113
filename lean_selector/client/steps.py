"""The steps of a flow: what a driver does for it, with or without an event loop."""

from collections.abc import Generator
from typing import Any, Generic, TypeVar

import msgspec

from lean_selector.client.exchanges import Call
from lean_selector.client.reservation import Reservation

T = TypeVar("T")


class Ask(msgspec.Struct, Generic[T], frozen=True):
    """Do the exchange. Outcome: what it reads. `books`: the reservation that it creates."""

    call: Call[T]
    books: Reservation | None = None


class Pause(msgspec.Struct, frozen=True):
    seconds: float


class Release(msgspec.Struct, frozen=True):
    """See to it that this is freed; the flow need not wait until it is.

    `first`: it is about to end, and should not before this is freed, unless that takes long.
    """

    reservation: Reservation
    first: bool = False


class HandOver(msgspec.Struct, frozen=True):
    """It is the caller's from here on, to free when and wherever it likes."""

    reservation: Reservation


class OpenStream(msgspec.Struct, frozen=True):
    """POST to a worker. Outcome: the open stream, in the driver's own type, its status 200."""

    worker_id: int
    endpoint: str
    body: bytes
    headers: dict[str, str]

    @property
    def url(self) -> str:
        """The endpoint as registered: with or without scheme, with or without the version."""
        scheme, found, rest = self.endpoint.rstrip("/").rpartition("://")
        version = "" if rest.endswith("/v1") else "/v1"
        return f"{scheme if found else 'http'}://{rest}{version}/completions"


Step = Ask[Any] | Pause | Release | HandOver | OpenStream
Flow = Generator[Step, Any, T]
