"""Settings of ejections, sessions and the API dialect. The router's settings are in
`core/selection/router_settings.py`."""

import msgspec


class EjectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of outlier detection, as in Envoy: the number of consecutive failures that eject a
    rank, the ejection time (longer after each ejection), and the maximum share of ejected ranks."""

    failures: int = 3  # consecutive reported failures; 0: reports eject no rank
    failed_polls: int = 3  # consecutive
    base_s: float = 30.0  # base ejection time in seconds; multiplied by consecutive ejections
    longest_s: float = 300.0
    # maximum share of a partition's ranks; the ranks of one worker may always be ejected
    most_percent: float = 50.0


DEFAULT_BONUS_BLOCKS = 64.0


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of sessions. A request goes to its session's rank, or prefers it if `is_soft`."""

    ttl_s: float  # seconds that a binding lasts after the session's last reservation
    is_soft: bool = False
    bonus_blocks: float = DEFAULT_BONUS_BLOCKS  # soft only: subtracted from the rank's cost


# -- how the API dialects differ -------------------------------------------------------------------
# How the API dialects differ in the core's rules and texts.
#
# A dialect's bodies and answers are in `wire`, its routes in `api`. Chosen once, at start
# (`--api`). Spec: selection.md and selection_16.md.


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    group_word: str  # what texts call the tenant
    claims_ids: bool  # the id is claimed when the request arrives; the 409 names no rank
    credits_untracked: bool  # if prefill is not tracked, a credit is subtracted from the blocks
    replays_one_rank_only: bool  # a `replay_endpoint` is refused for workers of several ranks
    lacks: frozenset[str]  # fields of a worker's record that only the other dialect has

    def scope(self, model_name: str, tenant_id: str) -> str:
        """Return a partition's name as used in error and log texts."""
        return f"model={model_name} {self.group_word}={tenant_id}"


API_1_3 = Dialect(
    name="1.3",
    group_word="tenant",
    claims_ids=False,
    credits_untracked=False,
    replays_one_rank_only=False,
    lacks=frozenset(
        (
            "routing_group",
            "router_hint_worker_type",
            "router_hint_source_control_endpoints",
            "kv_event_source_mode",
        )
    ),
)
API_1_6 = Dialect(
    name="1.6",
    group_word="routing_group",
    claims_ids=True,
    credits_untracked=True,
    replays_one_rank_only=True,
    lacks=frozenset(("tenant_id", "replay_endpoints")),
)
DIALECTS = {dialect.name: dialect for dialect in (API_1_3, API_1_6)}
