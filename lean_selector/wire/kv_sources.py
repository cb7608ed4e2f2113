"""The body of GET /kv_sources: how far each engine is followed (decision D22)."""

import msgspec


class SourceStatus(msgspec.Struct, frozen=True):
    """One source as `GET /kv_sources` shows it."""

    worker_id: int
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    # resolving, connecting, replaying, live; or what is wrong: degraded, mismatch, unreachable,
    # silent, no_replay, partial (D35)
    state: str
    state_age_s: float
    problem: str | None  # what is wrong, in one line
    connection: str  # resolving, connecting, connected, retrying
    last_seq: int | None  # of the last live batch
    lag_batches: int  # known of and not applied, or not to the end
    lost_batches: int  # in no replay, since the index last was what the engine held
    gaps: int
    replayed_batches: int
    restarts: int
    backlog_bytes: int  # received and waiting, also for a replay
    dropped_batches: int  # received and given up, for too much waited; a replay may bring them
    messages: int
    skipped: dict[str, int]  # "event_type:reason", and "message:reason" for what held no batch
    last_message_age_s: float | None
    last_error: str | None


class KvSource(SourceStatus, frozen=True, kw_only=True):
    """An item of `GET /kv_sources`."""

    model_name: str
    tenant_id: str
