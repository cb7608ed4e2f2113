"""The flags of `lean-selector gateway`: its own, and beside them the selector's."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Final, Literal

from lean_selector.gateway.prompt_shapes import PromptSettings
from lean_selector.http.allowed_endpoints import Url
from lean_selector.server.flags import flag
from lean_selector.server.selector_flags import (
    HealthFlags,
    PromptsFlags,
    SelectorConfig,
    SessionsFlags,
)
from lean_selector.server.service_flags import ListenFlags

# For workers that say nothing of blocks, as those that publish no events.
_DEFAULTS = '{"block_size": 16}'
# Longer than a prompt waits and is computed, mostly; then the engine's events say that it is there.
_PREDICTED_TTL_S: Final = 10.0
_TOUCHES = 3.0  # in the life of a reservation


def _url(value: str) -> str:
    """`http://host:port` of a worker, of which nothing else is used; /v1 may be behind it, as in
    what OpenAI's clients are told."""
    url = Url(value)
    if url.target.rstrip("/") not in ("", "/v1") or "?" in value or "#" in value:
        raise ValueError(
            f"`{value}`: expected http://HOST:PORT, perhaps with /v1: workers are asked at the root"
        )
    return url.origin


def _collector(value: str) -> str:
    """`http://host:4318`; perhaps with a path, as collectors behind a proxy have."""
    url = Url(value)
    return url.origin + url.target.rstrip("/")


@dataclass(frozen=True, kw_only=True)
class GatewayListenFlags(ListenFlags):
    """Listening, logging and stopping

    drain_s: how long a stop may take; answers that have begun go on for so long
    """

    port: int = flag(8080, "--port", ge=0, le=65535, common=True)
    drain_s: float = flag(30.0, "--drain-secs", ge=0)


@dataclass(frozen=True, kw_only=True)
class GatewayHealthFlags(HealthFlags):
    """Workers that fail

    interval_s: ask every worker this often how it is, over HTTP; `none`: never
    slow_start_s: for so long a worker that was ejected has a growing share of the requests; 0: its
      whole share at once
    """

    interval_s: float | None = flag(5.0, "--worker-health-interval-secs", ge=0.01, none=True)
    slow_start_s: float = flag(10.0, "--worker-slow-start-secs", ge=0)


@dataclass(frozen=True, kw_only=True)
class GatewayPromptsFlags(PromptsFlags):
    """Raw prompts

    mode: where the tokens of raw prompts come from
    """

    mode: Literal["learn", "tokenize", "local", "off"] = flag("learn", "--prompts", common=True)


@dataclass(frozen=True, kw_only=True)
class GatewaySessionsFlags(SessionsFlags):
    """Sessions

    mode: soft: the rank of a session is only favoured, and where it goes is its rank from then on;
      hard: a session goes to its rank, however busy (default soft)
    """

    default_mode: ClassVar = "soft"
    mode: Literal["soft", "hard"] | None = flag(None, "--session-affinity")


@dataclass(frozen=True, kw_only=True)
class GatewayFlags:
    """The gateway

    workers: workers: http://HOST:PORT or .../v1
    selector_port: HTTP port of the selector's own API, and of the metrics; 0 takes a free one
    silence_s: a worker that says nothing for so long has failed its request
    pass_through: requests besides those that a worker is chosen for, lists of models, /health and
      /ready that are passed
      to workers; openai: those of OpenAI's API; all: engines' own routes, administrative ones too
    request_timeout_s: longest from a request to the first byte of its answer, which is 504 then;
      unset: no limit
    max_body_mb: largest body of a request, in MiB
    otlp_endpoint: send a span for each completion over OTLP/HTTP to this collector, http://HOST:4318
    """

    workers: list[str] = flag([], "workers", each=_url, common=True)
    selector_port: int = flag(8092, "--selector-port", ge=0, le=65535, common=True)
    pass_through: Literal["openai", "all", "none"] = flag("openai", "--pass-through")
    silence_s: float = flag(600.0, "--worker-silence-secs", ge=0.001)
    request_timeout_s: float | None = flag(None, "--request-timeout-secs", ge=0.001)
    max_body_mb: int = flag(64, "--max-body-mb", ge=1, le=4096)
    otlp_endpoint: str | None = flag(None, "--otlp-endpoint", each=_collector)


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(SelectorConfig):
    """What `lean-selector gateway` is told."""

    gateway: GatewayFlags
    listen: GatewayListenFlags
    health: GatewayHealthFlags
    prompts: GatewayPromptsFlags
    sessions: GatewaySessionsFlags

    def __post_init__(self) -> None:
        super().__post_init__()
        self.endpoints.check("", self.gateway.workers)
        if not self.gateway.workers and not self.discover.targets:
            raise ValueError("name the workers: lean-selector gateway http://HOST:PORT ...")

    @property
    def prompt_settings(self) -> PromptSettings:
        settings = self.prompts.settings
        assert settings is not None
        return settings

    @property
    def most_body_bytes(self) -> int:
        return self.gateway.max_body_mb << 20

    @property
    def touch_after_s(self) -> float:
        """So often a reservation is touched while its answer goes on."""
        return self.reservations.reservation_expiry_s / _TOUCHES

    @cached_property
    def selector(self) -> SelectorConfig:
        """What the selector in this process is told; its port is where its API is."""
        gateway, discover = self.gateway, self.discover
        if gateway.workers:
            defaults = discover.defaults if "--discover-defaults" in self.given else _DEFAULTS
            targets = [*discover.targets, *(f"url:{url}" for url in gateway.workers)]
            discover = replace(discover, targets=list(dict.fromkeys(targets)), defaults=defaults)
        router = self.router
        if router.policy is None:
            router = replace(router, policy="latency")
        if router.use_kv_events and router.predicted_ttl_s is None:
            router = replace(router, predicted_ttl_s=_PREDICTED_TTL_S)
        groups = {each.name: getattr(self, each.name) for each in fields(SelectorConfig)}
        changed = {
            "listen": replace(self.listen, port=gateway.selector_port, uds=None),
            "discover": discover,
            "router": router,
            "prompts": PromptsFlags(),
            "needs_kv_events": False,
        }
        return SelectorConfig(**groups | changed)
