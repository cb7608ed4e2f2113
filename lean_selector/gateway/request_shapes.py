"""Bodies of requests, as far as the gateway reads them itself."""

import msgspec


class NamesModel(msgspec.Struct):
    model: str | None = None
