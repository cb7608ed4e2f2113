"""The ids of requests, by which clients, workers and logs speak of the same one."""

import os
from typing import Final

from lean_selector.gateway.header_lines import request_id_of


class RequestIds:
    """Ids of ours: each is given once, and no other process gives it."""

    def __init__(self) -> None:
        self._prefix: Final = os.urandom(8).hex()
        self._given = 0

    def new(self) -> str:
        self._given += 1
        return f"{self._prefix}-{self._given:x}"


def id_of(section: bytes, own_id: str) -> bytes:
    """Of the request with this section: its client's, or else ours."""
    return request_id_of(section) or own_id.encode()


def id_line(request_id: bytes) -> bytes:
    """The header line that every answer has."""
    return b"x-request-id: %b\r\n" % request_id
