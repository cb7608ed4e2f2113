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
    is_secure: bool  # over TLS


class WorkerDiscovery(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are found."""

    targets: list[str]
    defaults: str  # JSON, of what is registered where nobody says it
    refresh_s: float


class AccessFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What requests of engines, or of other services of ours, bring along."""

    token_file: str | None
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    tls_name: str | None = None  # None: the host of the URL
