"""Parses the targets of discovery, and makes a registration from what is known about a worker."""

import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
import xxhash

from lean_selector.core.numbers import U64_MAX, NonNegative
from lean_selector.core.selection.shapes import BOTH, DECODE, PREFILL, WorkerRole, WorkerSpec
from lean_selector.http.urls import base_without_version, endpoint_url
from lean_selector.wire.selection_bodies import (
    DROPPED_FIELDS,
    ByRank,
    WorkerFields,
    WorkerRequest,
)

# -- --discover and --replica-sync-discover --------------------------------------------------------


class Target(msgspec.Struct, frozen=True):
    """A target of --discover or --replica-sync-discover. `text` is the flag's value, unparsed."""

    text: str
    kind: Literal["file", "dns", "kubernetes", "url"]
    name: str  # a path, a URL, or the name of a host or service
    namespace: str = ""
    port: str | None = None  # for dns and kubernetes
    is_secure: bool = False
    role: WorkerRole | None = None  # for url


_FORMS: Final = "file:PATH, dns:NAME:PORT, kubernetes:NAMESPACE/SERVICE or url:URL[#ROLE]"
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\.?")
# Names of namespaces, services and ports.
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def target_of(text: str) -> Target:
    """Parses a target of --discover. Raises ValueError, which says what was expected."""
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise ValueError(f"`{text}`: expected {_FORMS}")
    if kind == "file":
        return Target(text, "file", rest)
    if kind == "url":
        url, has_role, role = rest.partition("#")
        endpoint_url(url)
        if "?" in url:
            raise ValueError(f"`{text}`: expected a URL without a query")
        return Target(text, "url", url, role=role_of(role if has_role else None))
    if kind == "dns":
        return _dns(text, rest)
    if kind == "kubernetes":
        return _kubernetes(text, rest)
    raise ValueError(f"`{text}`: expected {_FORMS}")


def peer_target_of(text: str) -> Target:
    """Parses a target of --replica-sync-discover. Raises ValueError."""
    target = target_of(text)
    if target.kind not in ("dns", "kubernetes") or target.is_secure:
        raise ValueError(
            f"`{text}`: peers are found by dns:NAME:PORT or kubernetes:NAMESPACE/SERVICE"
        )
    return target


def _dns(text: str, rest: str) -> Target:
    name = rest.removeprefix("https://")
    is_secure = name != rest
    if name.startswith("_"):
        raise ValueError(
            f"`{text}`: SRV records are no longer read: give dns:NAME:PORT, once for each port"
        )
    host, _, port = name.rpartition(":")
    if _HOST.fullmatch(host) is None or not _is_port(port):
        raise ValueError(f"`{text}`: expected dns:NAME:PORT")
    return Target(text, "dns", host, port=port, is_secure=is_secure)


def _kubernetes(text: str, rest: str) -> Target:
    namespace, _, service = rest.partition("/")
    service, colon, port = service.partition(":")
    if _LABEL.fullmatch(namespace) is None or _LABEL.fullmatch(service) is None:
        raise ValueError(
            f"`{text}`: expected kubernetes:NAMESPACE/SERVICE, and :PORT if it has several"
        )
    if colon and _LABEL.fullmatch(port) is None:
        raise ValueError(f"`{text}`: `{port}` is neither the name of a port nor its number")
    return Target(text, "kubernetes", service, namespace, port or None)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 0xFFFF


# -- facts about a worker --------------------------------------------------------------------------


class Particulars(WorkerFields, kw_only=True, forbid_unknown_fields=True):
    """What is known about a worker: fields of POST /workers, all optional, and two ports.

    events_port and replay_port are the first rank's ports, on the host of `endpoint`; the next rank
    has the next port. Each port is ignored if endpoints of its kind (events, replay) are given."""

    worker_id: NonNegative | None = None
    model_name: str | None = None
    tenant_id: str | None = None
    routing_group: str | None = None
    kv_events_endpoints: ByRank | None = None
    replay_endpoints: ByRank | None = None
    router_hint_source_control_endpoints: ByRank | None = None
    taints: frozenset[str] | None = None
    topology_domains: dict[str, str] | None = None
    events_port: int | None = None
    replay_port: int | None = None
    load_endpoint: object = None  # of earlier releases

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker_id is not None and self.worker_id > U64_MAX:
            raise ValueError(f"worker_id {self.worker_id} exceeds {U64_MAX}")
        for name in ("events_port", "replay_port"):
            port = getattr(self, name)
            if port is not None and not 1 <= port <= 0xFFFF:
                raise ValueError(f"{name} {port} is no port")

    def given_fields(self) -> dict[str, object]:
        """Return name -> value of the fields that are set and have an effect."""
        return {
            name: value
            for name in self.__struct_fields__
            if name not in DROPPED_FIELDS and (value := getattr(self, name)) is not None
        }

    def ignored(self) -> list[str]:
        """Return a warning for each field that is set and has no effect any more."""
        return [text for name, text in DROPPED_FIELDS.items() if getattr(self, name) is not None]


class FoundEndpoint(msgspec.Struct, frozen=True, order=True):
    """The host and port at which a worker or a peer listens."""

    host: str  # a name or an address, without brackets
    port: int
    is_secure: bool = False
    role: WorkerRole | Literal[""] = ""  # if the discovery tells it

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self}"


ROLE_LABEL: Final = "llm-d.ai/role"
_ROLES: Final[dict[str, WorkerRole]] = {
    PREFILL: PREFILL,
    DECODE: DECODE,
    BOTH: BOTH,
    "prefill-decode": BOTH,
}


def role_of(label: str | None) -> WorkerRole | None:
    """Return the role of workers with this value of the label, as llm-d names them; None without
    the label. Raises ValueError for a role that is not known."""
    if label is not None and label not in _ROLES:
        raise ValueError(f"`{label}` is none of the roles {', '.join(_ROLES)}")
    return None if label is None else _ROLES[label]


class Found(msgspec.Struct, frozen=True):
    """All workers that one target of --discover lists at present."""

    entries: tuple[Particulars, ...] = ()  # each with an endpoint
    leaving: frozenset[str] = frozenset()  # terminating endpoints, removed without a grace period
    uids: Mapping[str, str] = {}  # endpoint_key -> uid of the pod there, which is never reused


# -- ids and keys ----------------------------------------------------------------------------------

# 53 bits, because JavaScript, Lua and jq read them exactly. The probability that two of 10 000
# workers share an id is one in a hundred million.
_BITS: Final = (1 << 53) - 1


def endpoint_key(endpoint: str) -> str:
    """Return the normalized form of an endpoint: `http://host:port`, followed by the path without
    a trailing /v1. The scheme may be missing in the input.

    A text that is not a URL is returned unchanged."""
    try:
        url = endpoint_url(endpoint)
    except ValueError:
        return endpoint
    return base_without_version(url.origin + url.target)


def worker_id_of(key: str) -> int:
    """Return a worker's id: the lowest 53 bits of XXH3-64 of the normalized endpoint (D33)."""
    return xxhash.xxh3_64_intdigest(key.encode()) & _BITS


# -- --discover-defaults ---------------------------------------------------------------------------


def defaults_of(text: str) -> Particulars:
    """Parses the JSON object of --discover-defaults. Raises ValueError with the reason."""
    defaults = msgspec.json.decode(text, type=Particulars)
    for name in ("worker_id", "endpoint"):
        if getattr(defaults, name) is not None:
            raise ValueError(f"{name} differs between workers")
    return defaults


# -- a registration --------------------------------------------------------------------------------

_EVENTS: Final = ("kv_events_endpoint", "kv_events_endpoints")
_REPLAYS: Final = ("replay_endpoint", "replay_endpoints")


def spec_of(
    worker_id: int, entry: Particulars, engine: Particulars | None, defaults: Particulars
) -> WorkerSpec:
    """Return a worker's registration. `entry` (from the target) takes precedence over `engine`
    (from the engine itself), and both over `defaults`. May raise ValueError."""
    fields = defaults.given_fields()
    fields.pop("worker_id", None)
    for more in (engine, entry):
        if more is not None:
            told = more.given_fields()
            for pair in (_EVENTS, _REPLAYS):
                if any(name in told for name in pair):  # either name sets the same value
                    for name in pair:
                        fields.pop(name, None)
            fields.update(told)
    events_port, replay_port = fields.pop("events_port", None), fields.pop("replay_port", None)
    fields["worker_id"] = worker_id
    endpoint = str(fields.get("endpoint", ""))
    start, size = fields.get("data_parallel_start_rank", 0), fields.get("data_parallel_size", 1)
    assert isinstance(start, int)
    assert isinstance(size, int)
    ranks = range(start, start + min(size, 4096))
    if events_port is not None and not any(name in fields for name in _EVENTS):
        fields["kv_events_endpoints"] = _by_rank(endpoint, events_port, ranks)
    if replay_port is not None and not any(name in fields for name in _REPLAYS):
        fields["replay_endpoints"] = _by_rank(endpoint, replay_port, ranks)
    tenant, group = fields.get("tenant_id"), fields.get("routing_group")
    if tenant is not None and group is not None and tenant != group:
        raise ValueError("tenant_id and routing_group are two names of one thing")
    return WorkerRequest(**fields).spec()  # type: ignore[arg-type]  # each is checked


def is_complete(entry: Particulars, use_kv_events: bool) -> bool:
    """Whether `entry` has all required fields, so that the worker's engine need not be queried."""
    told = entry.given_fields()
    has_events = any(name in told for name in (*_EVENTS, "events_port"))
    return {"model_name", "block_size"} <= told.keys() and (has_events or not use_kv_events)


def _by_rank(endpoint: str, port: object, ranks: range) -> dict[int, str]:
    """Return rank -> TCP endpoint on the host of `endpoint`. Ports count up from `port`."""
    assert isinstance(port, int)
    try:
        url = endpoint_url(endpoint)
    except ValueError as error:
        raise ValueError(
            f"events_port and replay_port need an endpoint that is a URL: {error}"
        ) from None
    host = f"[{url.host}]" if ":" in url.host else url.host
    return {
        rank: f"tcp://{host}:{port + offset}"
        for offset, rank in enumerate(ranks)
        if port + offset <= 0xFFFF
    }
