"""Settings of ejections, of sessions, and of a generation of the API; those of the router are in
`core/selection/router_settings.py`.
"""

import msgspec


class EjectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The model is envoy's outlier detection: consecutive failures, a time that grows with each
    ejection, and a share of the ranks beyond which nobody else is ejected."""

    failures: int = 3  # reported in a row; 0: reports eject nobody
    failed_polls: int = 3  # in a row
    base_s: float = 30.0  # the first ejection; the nth in a row takes n times as long
    longest_s: float = 300.0
    most_percent: float = 50.0  # of a partition's ranks; the ranks of one worker may always go


DEFAULT_BONUS_BLOCKS = 64.0


class SessionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A bound session is given its own rank (hard), or that rank is made cheaper for it (soft)."""

    ttl_s: float  # that a binding outlives the last reservation of its session
    is_soft: bool = False
    bonus_blocks: float = DEFAULT_BONUS_BLOCKS  # taken off the cost of its rank; soft only


# --------------------------------------------------------------------------------------------------
# What the core itself says or judges differently for clients of one generation or another.
#
# The bodies and answers of a generation are in `wire`, its routes in `services`; here is only what
# is decided or worded below them. Chosen once, at the start (`--api`). Spec: selection.md and
# selection_16.md.


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of the selection service."""

    name: str
    group_word: str  # what texts call the second half of a partition's name
    claims_ids: bool  # an id is taken from the moment its request arrives; its 409 says no more
    credits_untracked: bool  # where prefill is not tracked, a credit is taken off the blocks
    replays_one_rank_only: bool  # a `replay_endpoint` is refused for workers of several ranks

    def scope(self, model_name: str, tenant_id: str) -> str:
        """A partition as texts name it."""
        return f"model={model_name} {self.group_word}={tenant_id}"


API_1_3 = Dialect(
    name="1.3",
    group_word="tenant",
    claims_ids=False,
    credits_untracked=False,
    replays_one_rank_only=False,
)
API_1_6 = Dialect(
    name="1.6",
    group_word="routing_group",
    claims_ids=True,
    credits_untracked=True,
    replays_one_rank_only=True,
)
DIALECTS = {dialect.name: dialect for dialect in (API_1_3, API_1_6)}
