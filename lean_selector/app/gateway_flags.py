"""The flags of `lean-selector gateway`: its own flags and the selector's flags."""

import json
from collections import Counter
from dataclasses import fields, replace
from functools import cached_property
from typing import Final, Literal

from lean_selector.app.flags import Group, flag
from lean_selector.app.selector_flags import (
    PromptsFlags,
    SelectorConfig,
)
from lean_selector.gateway.prompt_shapes import PromptSettings
from lean_selector.http.urls import Url, endpoint_url

# For workers that do not report a block size, such as those that publish no events.
_DEFAULTS: Final = {"block_size": 16}
# Usually longer than queueing and prefill of a prompt, after which the engine's events report it.
_PREDICTED_TTL_S: Final = 10.0


def _url(value: str) -> str:
    """Parses a worker's `http://host:port`; the scheme may be missing, as in a file of workers.
    Removes a trailing /v1, as in OpenAI base URLs."""
    url = endpoint_url(value)
    if url.target.rstrip("/") not in ("", "/v1") or "?" in value or "#" in value:
        raise ValueError(f"`{value}`: expected http://HOST:PORT or http://HOST:PORT/v1")
    return url.origin


def _collector(value: str) -> str:
    """Parses the URL of an OTLP collector, `http://host:4318`, with or without a path."""
    url = Url(value)
    return url.origin + url.target.rstrip("/")


class GatewayFlags(Group):
    """The gateway

    workers: URLs of the workers, http://HOST:PORT or http://HOST:PORT/v1
    prefill: URL of a worker that only prefills; may be repeated. New prompts then get a pair of
      workers, one for the prefill and one for the decode
    decode: URL of a worker that only decodes; may be repeated
    selector_port: HTTP port of the selector's own API and of the metrics; 0: any free port
    slow_start_s: after an ejection, increase a worker's share of requests over this time; 0: full
      share at once
    silence_s: fail a request if its worker sends nothing for this long
    pass_through: which requests are passed to workers besides inference requests, model lists,
      /health and /ready; openai: those of OpenAI's API; all: also the engines' own routes,
      including administrative ones
    request_timeout_s: answer 504 if no response byte arrives within this time; unset: no limit
    max_body_mb: maximum size of a request body, in MiB
    otlp_endpoint: send a span for each completion over OTLP/HTTP to this collector,
      http://HOST:4318
    """

    workers: list[str] = flag([], "workers", each=_url, common=True)
    prefill: list[str] = flag([], "--prefill", each=_url)
    decode: list[str] = flag([], "--decode", each=_url)
    selector_port: int = flag(8092, "--selector-port", ge=0, le=65535, common=True)
    pass_through: Literal["openai", "all", "none"] = flag("openai", "--pass-through")
    slow_start_s: float = flag(10.0, "--worker-slow-start-secs", ge=0)
    silence_s: float = flag(600.0, "--worker-silence-secs", ge=0.001)
    request_timeout_s: float | None = flag(None, "--request-timeout-secs", ge=0.001)
    max_body_mb: int = flag(64, "--max-body-mb", ge=1, le=4096)
    otlp_endpoint: str | None = flag(None, "--otlp-endpoint", each=_collector)

    def __post_init__(self) -> None:
        twice = [url for url, n in Counter(self.named).items() if n > 1]
        if twice and (self.prefill or self.decode):
            raise ValueError(f"`{twice[0]}` is given twice: each worker has one role")

    @property
    def named(self) -> list[str]:
        """Return the URLs of all workers."""
        return [*self.workers, *self.prefill, *self.decode]

    @property
    def targets(self) -> list[str]:
        """Return the workers as targets of --discover."""
        roles = ("", self.workers), ("#prefill", self.prefill), ("#decode", self.decode)
        return [f"url:{url}{role}" for role, urls in roles for url in dict.fromkeys(urls)]


class GatewayConfig(SelectorConfig):
    """The configuration of `lean-selector gateway`."""

    defaults = {
        "--port": 8080,
        "--drain-secs": 30.0,
        "--worker-health-interval-secs": 5.0,
        "--prompts": "learn",
        "--session-affinity": "soft",
    }
    gateway: GatewayFlags

    def __post_init__(self) -> None:
        super().__post_init__()
        self.endpoints.check("", self.gateway.named)
        if not self.gateway.named and not self.discover.targets:
            raise ValueError("expected workers: lean-selector gateway http://HOST:PORT ...")

    @property
    def prompt_settings(self) -> PromptSettings:
        settings = self.prompts.settings
        assert settings is not None
        return settings

    @property
    def most_body_bytes(self) -> int:
        return self.gateway.max_body_mb << 20

    @cached_property
    def selector(self) -> SelectorConfig:
        """Return the configuration of the gateway's own selector, which has its own port."""
        gateway, discover = self.gateway, self.discover
        targets = [*discover.targets, *gateway.targets]
        discover = replace(
            discover,
            targets=list(dict.fromkeys(targets)),
            defaults=json.dumps(_DEFAULTS | json.loads(discover.defaults)),
        )
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
            "asks_pairs": bool(gateway.prefill),
        }
        return SelectorConfig(**groups | changed)
