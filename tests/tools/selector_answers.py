"""Answers of a selector, as the check reads them, of which a test says only what it is about."""

from typing import Any

from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.selection_bodies import KvSource, RankHealthRow

_SOURCE: dict[str, Any] = {
    **{"worker_id": 3, "dp_rank": 1, "endpoint": "tcp://gpu:5557", "replay_endpoint": None},
    **{"state_age_s": 1.0, "problem": None, "connection": "connected", "last_seq": None},
    **dict.fromkeys(("lag_batches", "lost_batches", "gaps", "replayed_batches", "restarts"), 0),
    **{"backlog_bytes": 0, "dropped_batches": 0, "messages": 0, "skipped": {}},
    **{"last_message_age_s": None, "last_error": None, "model_name": "m", "tenant_id": "default"},
}


def source(state: str, **fields: Any) -> KvSource:
    return KvSource(**{**_SOURCE, "state": state, **fields})


def rank_health(
    dp_rank: int, state: str, reason: str | None = None, returns_in_s: float | None = None
) -> RankHealthRow:
    return RankHealthRow(dp_rank, state, reason, None, returns_in_s, 0, 0, 0)


def report(**found: list[Any]) -> DiscoveryReport:
    return DiscoveryReport(**{"discoveries": [], "workers": [], "peers": [], **found})
