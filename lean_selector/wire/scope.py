"""The partition that a request names: model_name, and tenant_id under either of its names (D2)."""

from msgspec import UNSET, UnsetType

from lean_selector.core.errors import BadRequest

DEFAULT_GROUP = "default"


def group_of(tenant_id: str | UnsetType, routing_group: str | UnsetType) -> str:
    """The tenant, under either of its names; raises BadRequest when both are given and differ."""
    if tenant_id is UNSET:
        return DEFAULT_GROUP if routing_group is UNSET else routing_group
    if routing_group is not UNSET and routing_group != tenant_id:
        raise BadRequest(
            f"tenant_id `{tenant_id}` and routing_group `{routing_group}` are two names "
            "of one thing and must not differ"
        )
    return tenant_id
