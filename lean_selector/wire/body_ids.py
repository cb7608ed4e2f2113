"""The ids that a body of any request or answer may have, for the access log."""

import msgspec
from msgspec import UNSET, UnsetType


class BodyIds(msgspec.Struct):
    request_id: str | UnsetType | None = UNSET
    selection_id: str | UnsetType | None = UNSET
    reservation_id: str | UnsetType | None = UNSET
