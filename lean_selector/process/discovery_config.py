"""What a service was told of discovery. Nothing of it is imported that discovers."""

import msgspec


class FinderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How things are found, whatever they are."""

    interval_s: float
    grace_s: float
    api: str | None  # of Kubernetes; None where the pod's environment tells
    api_token_file: str
    api_ca_file: str


class PeerDiscovery(msgspec.Struct, frozen=True, kw_only=True):
    """Peers that are found."""

    targets: list[str]
    http_port: int  # where they are asked for their snapshots


class WorkerDiscovery(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are found."""

    targets: list[str]
    defaults: str  # JSON, of what is registered where nobody says it
    refresh_s: float


class EngineAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How engines are asked, by whatever asks them."""

    token_file: str | None
    ca_file: str | None
