"""What is known of a worker, by whoever tells: a discovery's entry, the engine itself, defaults."""

import msgspec

from lean_selector.core.numbers import U64_MAX
from lean_selector.wire.scalars import NonNegative
from lean_selector.wire.selection import RankText, WorkerFields


class Particulars(WorkerFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of a registration (POST /workers), all optional, and two ports beside them.

    The ports are those of the first rank on the host of `endpoint`; each further rank has the next
    one, as vLLM and SGLang count. They count where no endpoints are told.
    """

    worker_id: NonNegative | None = None
    model_name: str | None = None
    tenant_id: str | None = None
    routing_group: str | None = None
    kv_events_endpoints: dict[RankText, str] | None = None
    replay_endpoints: dict[RankText, str] | None = None
    taints: list[str] | None = None
    topology_domains: dict[str, str] | None = None
    events_port: int | None = None
    replay_port: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker_id is not None and self.worker_id > U64_MAX:
            raise ValueError(f"worker_id {self.worker_id} exceeds {U64_MAX}")
        for name in ("events_port", "replay_port"):
            port = getattr(self, name)
            if port is not None and not 1 <= port <= 0xFFFF:
                raise ValueError(f"{name} {port} is no port")

    def told(self) -> dict[str, object]:
        """What is told, by the name of its field."""
        return {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }


class Place(msgspec.Struct, frozen=True, order=True):
    """Where somebody listens."""

    host: str  # a name or an address, without brackets
    port: int
    is_secure: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self}"


class Found(msgspec.Struct, frozen=True):
    """Everything that a discovery knows of at a time."""

    entries: tuple[Particulars, ...] = ()  # each with an endpoint
    leaving: frozenset[str] = frozenset()  # endpoints that are said to end: no grace for them
