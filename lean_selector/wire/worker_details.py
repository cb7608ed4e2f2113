"""How the source of a rank's KV events is, in `GET /workers?detail=true` and `GET /kv_sources`."""

import msgspec


class SourceCondition(msgspec.Struct, frozen=True):
    """One rank's source of KV events; the fields are those of `GET /kv_sources`."""

    dp_rank: int
    state: str
    state_age_s: float
    problem: str | None
