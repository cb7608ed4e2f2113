"""The flags of the selector. Flag names, defaults and environment variables follow section 7 of
docs/spec/selection.md and section 10 of docs/spec/selection_16.md."""

from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NoReturn, get_args

from lean_selector.app.flags import FLAG, Group, dyn_flag, flag, made_of, whole_number
from lean_selector.app.service_flags import AccessFlags, ServiceConfig, checked_by, path, url
from lean_selector.core.index.kv_index import DEFAULT_DEVICE_BLOCKS, DEFAULT_LOWER_TIER_BLOCKS
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection.router_settings import (
    DISK_WEIGHT,
    HOST_WEIGHT,
    Policy,
    RouterSettings,
    SelectionCacheSettings,
)
from lean_selector.core.settings import (
    DIALECTS,
    EjectionSettings,
    SessionSettings,
)

if TYPE_CHECKING:
    from lean_selector.api.access import AccessTokens
    from lean_selector.gateway.headers import QueueHeaders
    from lean_selector.gateway.prompt_shapes import PromptSettings

_CACHE = SelectionCacheSettings()
_EJECTION = EjectionSettings()
_ROUTED_TTL_S = 120.0  # without KV events, with --api 1.6
# Unknown bytes of a prompt: some 4 000 tokens, whose prefill takes an engine longer than their
# tokenization.
_ASK_WHEN_LEARNING_BYTES = 16_384
_NEVER = 1 << 40
_POLLS = ("--worker-health-interval-secs",)
_SESSIONS = ("--session-affinity-ttl-secs",)
_QUEUE = ("--queue-threshold",)
_FAIR = ("--queue-fairness",)
_FOUND = ("--discover", "workers")


# -- reading one value -----------------------------------------------------------------------------


_where = checked_by("lean_selector.discovery.particulars", "target_of", "where")
_json = checked_by("lean_selector.discovery.particulars", "defaults_of", "json")
_address = checked_by("lean_selector.gateway.access_logs", "address_of", "address")
_network = checked_by("lean_selector.gateway.access_logs", "networks_of", "network")


def _name(value: str) -> str:
    if value != "public-xxh3-v1":
        raise ValueError("only public-xxh3-v1 is supported: sequence hashes have no key here")
    return value


def _path(_: str) -> NoReturn:
    raise ValueError("router policy files are not supported yet")


def _url_path(value: str) -> str:
    if not value.startswith("/") or not value.isascii() or not value.isprintable() or " " in value:
        raise ValueError(
            "expected a path that begins with / and has no spaces or control characters"
        )
    return value


def _bytes(value: str) -> int:
    if value.lower() == "none":
        return _NEVER
    number = whole_number(value)
    if not 0 <= number <= _NEVER:
        raise ValueError(f"expected 0 to {_NEVER}")
    return number


# -- the groups ------------------------------------------------------------------------------------


class DialectFlags(Group):
    """API version

    name: version of the HTTP API; 1.3: as in Dynamo 1.3; 1.6: as in Dynamo 1.6
    decode_busy_threshold: answers say decode_busy if the chosen rank's active blocks, with the
      prompt, exceed this fraction of its total_kv_blocks (1.6); unset: never
    prefill_busy_threshold: answers to /select with "advisory": true say prefill_busy if the rank
      has more active prefill tokens than its max_num_batched_tokens times this; unset: never
    assume_kv_reuse: assume that active requests share equal blocks; off: no block is shared (1.6)
    no_assume_kv_reuse: alias of --router-assume-kv-reuse false
    tracking_hash: function for sequence hashes; only public-xxh3-v1 is accepted
    """

    name: Literal["1.3", "1.6"] = flag("1.3", "--api", common=True)
    decode_busy_threshold: float | None = flag(
        None,
        "--router-decode-busy-threshold",
        "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD",
        ge=0,
    )
    prefill_busy_threshold: float | None = flag(
        None,
        "--router-prefill-busy-threshold",
        "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD",
        ge=0,
    )
    assume_kv_reuse: bool = dyn_flag(True, "--router-assume-kv-reuse")
    no_assume_kv_reuse: bool = flag(False, "--no-router-assume-kv-reuse")
    tracking_hash: str | None = dyn_flag(None, "--router-tracking-hash", each=_name)


class SelectionCacheFlags(Group):
    """Selections reserved later by id

    ttl_s: how long a selection made by /select can be reserved by its selection_id alone
    max_entries: maximum number of cached selections; the oldest is dropped first; 0: no caching
    max_bytes: maximum size of all cached selections, in bytes; 0: no caching
    """

    ttl_s: float = flag(_CACHE.ttl_s, "--selection-cache-ttl-secs", ge=0, le=1e9)
    max_entries: int = flag(_CACHE.max_entries, "--selection-cache-max-entries", ge=0, le=U64_MAX)
    max_bytes: int = flag(_CACHE.max_bytes, "--selection-cache-max-bytes", ge=0, le=U64_MAX)


def _model_policy(text: str) -> str:
    model, _, policy = text.rpartition("=")
    if not model or policy not in get_args(Policy):
        raise ValueError(f"`{text}`: expected MODEL=dynamo or MODEL=latency")
    return text


class RouterFlags(Group):
    """Choosing a worker

    policy: cost function of a rank; dynamo: as in Dynamo; latency: time to first token, plus the
      cost of the evictions that the prompt causes (default dynamo; gateway: latency)
    model_policies: cost function for one model, as MODEL=latency; may be repeated
    use_kv_events: learn from the workers' KV events; off: workers need no event endpoints, and
      overlap is 0 unless --router-ttl-secs is set
    ttl_s: with KV events off, assume that a routed prompt stays cached this long; 0: assume
      nothing; unset: 120 with --api 1.6, else nothing
    predicted_ttl_s: with KV events on, assume that a routed prompt is cached this long, until its
      events arrive; gateway: 10 by default
    approximate_cache_policy: accepted for compatibility; lru has the same effect as ttl, and is
      refused while KV events are on
    overlap_score_credit: reduction of a rank's cost, in prefill blocks, for each block cached on
      the device; above 1 only with --api 1.6
    overlap_score_credit_decay: how fast the overlap credit falls as a rank's waiting prefill grows
    prefill_load_scale: weight of prefill against decode in the cost
    overlap_score_weight: deprecated; sets the prefill load scale; 0 also makes the overlap credit 0
    active_request_weight: blocks that each active request adds to the cost of its rank, besides
      the blocks of the request
    host_weight: value of a block cached in host memory, in device blocks
    disk_weight: value of a block on disk or external storage, in device blocks
    pd_local_max_tokens: a request that asks for a pair of workers (one for its prefill, one for its
      decode) with disaggregate `auto` gets only one if fewer prompt tokens than this, and less than
      0.7 of the prompt, are uncached there
    pd_fallback: answer to a request that asks for a pair while no prefill worker is usable; refuse:
      503, local: a worker that does both
    temperature: 0: choose the cheapest rank; above 0: draw a rank, cheaper ones more often
    track_prefill_tokens: count the prefill tokens of reserved requests as load of their ranks
    """

    policy: Literal["dynamo", "latency"] | None = flag(None, "--policy", common=True)
    model_policies: list[str] = flag([], "--model-policy", each=_model_policy)
    use_kv_events: bool = dyn_flag(True, "--use-kv-events", "DYN_ROUTER_USE_KV_EVENTS", common=True)
    ttl_s: float | None = dyn_flag(None, "--router-ttl-secs", ge=0, common=True)
    predicted_ttl_s: float | None = dyn_flag(None, "--router-predicted-ttl-secs", ge=0)
    approximate_cache_policy: Literal["ttl", "lru"] = dyn_flag(
        "ttl", "--router-approximate-cache-policy"
    )
    overlap_score_credit: float = dyn_flag(1.0, "--router-kv-overlap-score-credit", ge=0)
    overlap_score_credit_decay: float = dyn_flag(
        0.0, "--router-kv-overlap-score-credit-decay", ge=0
    )
    prefill_load_scale: float = dyn_flag(1.0, "--router-prefill-load-scale", ge=0)
    overlap_score_weight: float | None = dyn_flag(
        None,
        "--router-kv-overlap-score-weight",
        "DYN_OVERLAP_SCORE_WEIGHT",
        "DYN_KV_OVERLAP_SCORE_WEIGHT",
        ge=0,
    )
    active_request_weight: float = dyn_flag(0.0, "--router-decode-active-request-weight", ge=0)
    host_weight: float = dyn_flag(HOST_WEIGHT, "--router-host-cache-hit-weight", ge=0, le=1)
    disk_weight: float = dyn_flag(DISK_WEIGHT, "--router-disk-cache-hit-weight", ge=0, le=1)
    pd_local_max_tokens: int = flag(2048, "--pd-local-max-tokens", ge=0, le=U64_MAX)
    pd_fallback: Literal["refuse", "local"] = flag("refuse", "--pd-fallback")
    temperature: float = dyn_flag(0.0, "--router-temperature", ge=0, common=True)
    track_prefill_tokens: bool = dyn_flag(True, "--router-track-prefill-tokens")


def _header(text: str) -> str:
    if not (text.isascii() and text.replace("-", "").replace("_", "").isalnum()):
        raise ValueError("expected the name of a header: letters, digits, - and _")
    return text


def _weight(text: str) -> str:
    name, _, weight = text.rpartition("=")
    try:
        fits = bool(name) and 0.001 <= float(weight) <= 1000.0
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"`{text}`: expected ID=WEIGHT, with a weight from 0.001 to 1000")
    return text


class QueueFlags(Group):
    """Queueing

    queue_threshold: queue requests while each eligible rank has more prefill tokens than its
      max_num_batched_tokens times this value; unset: never
    queue_policy: which queued request goes first; fcfs: the oldest, lcfs: the newest, wspt: the
      request with the least prefill left, least-work: like wspt, with aging (default fcfs; with
      --policy latency: least-work)
    queue_max_wait_s: answer 503 to a request queued this long; unset: no limit
    queue_fairness: on: among queued requests of one strict priority, the fairness id with the least
      service goes first; off: ids make no difference
    fairness_header: header that has the fairness id of a request to /route, and in the gateway that
      of a request whose token has no name
    weights: weight of a fairness id, as ID=2; an id with twice the weight gets twice the service;
      may be repeated
    priority_header: header that says how urgent a raw request is: high, normal or low; without it,
      vLLM's field priority does, in which less is more urgent, and 0 is normal
    trust_priority: where there are no tokens, high priority counts for all clients; with tokens, it
      counts for those with max-priority=high
    target_ttft_s: lean_selector_saturation is 1 also where the time to first token, estimated for
      what waits, is this long; unset: time does not count
    overlap_refresh_after_s: look up a queued request's overlap again after this time; 0 or less:
      never
    """

    queue_threshold: float | None = flag(
        None, "--queue-threshold", "DYN_ROUTER_QUEUE_THRESHOLD", ge=0, infinite=True, common=True
    )
    queue_policy: Literal["fcfs", "lcfs", "wspt", "least-work"] | None = flag(
        None, "--queue-policy", "DYN_ROUTER_QUEUE_POLICY"
    )
    queue_max_wait_s: float | None = flag(None, "--queue-max-wait-secs", ge=0.001, needs=_QUEUE)
    queue_fairness: Literal["off", "on"] = flag("off", "--queue-fairness", needs=_QUEUE)
    fairness_header: str = flag(
        "x-gateway-inference-fairness-id", "--fairness-header", each=_header, needs=_FAIR
    )
    weights: list[str] = flag([], "--queue-weight", each=_weight, needs=_FAIR)
    priority_header: str = flag("x-lean-priority", "--priority-header", each=_header, needs=_QUEUE)
    trust_priority: bool = flag(False, "--trust-priority", needs=_QUEUE)
    target_ttft_s: float | None = flag(None, "--target-ttft-secs", ge=0.001)
    overlap_refresh_after_s: float | None = dyn_flag(10.0, "--router-overlap-refresh-after-secs")

    def headers(self, tokens: "AccessTokens | None", *, by_name: bool) -> "QueueHeaders | None":
        """Return what reads the place of raw requests in the queue, or None without a queue."""
        if self.queue_threshold is None:
            return None
        from lean_selector.gateway.headers import QueueHeaders

        names, trusts = (self.fairness_header, self.priority_header), self.trust_priority
        return QueueHeaders(*names, tokens, trusts=trusts, by_name=by_name)


class BusyFlags(Group):
    """Load shedding

    active_decode_blocks: a rank is busy if its active blocks exceed this fraction of its
      total_kv_blocks; unset: never
    active_prefill_tokens: a rank is busy above this many active prefill tokens; unset: never
    active_prefill_tokens_frac: a rank is busy if it has more active prefill tokens than its
      max_num_batched_tokens times this value; unset: never
    overload_status: HTTP status of a request that is shed because all workers are busy; unset: 503,
      and 429 with --api 1.6
    """

    active_decode_blocks: float | None = dyn_flag(
        None, "--active-decode-blocks-threshold", ge=0, le=1, none=True, common=True
    )
    active_prefill_tokens: int | None = dyn_flag(
        None, "--active-prefill-tokens-threshold", ge=0, le=U64_MAX, none=True
    )
    active_prefill_tokens_frac: float | None = dyn_flag(
        None, "--active-prefill-tokens-threshold-frac", ge=0, none=True
    )
    overload_status: Literal[503, 429, 529] | None = flag(
        None, "--overload-status", "DYN_HTTP_OVERLOAD_STATUS_CODE"
    )


class SessionsFlags(Group):
    """Sessions

    ttl_s: keep a session's requests on one rank, until this long after the session's last
      reservation has ended; unset: sessions are ignored
    mode: hard: always choose the session's rank, however busy; soft: prefer the session's rank; if
      another rank is chosen, the session moves to that rank
    """

    ttl_s: float | None = flag(
        None, "--session-affinity-ttl-secs", ge=1, le=31_536_000, common=True
    )
    mode: Literal["hard", "soft"] = flag("hard", "--session-affinity", needs=_SESSIONS)

    @property
    def settings(self) -> SessionSettings | None:
        """Return the settings for sessions, or None if sessions are off."""
        if self.ttl_s is None:
            return None
        return SessionSettings(ttl_s=self.ttl_s, is_soft=self.mode == "soft")


class IndexFlags(Group):
    """The KV index and its events

    recover_from: comma-separated HTTP URLs of peers whose KV index (/dump) is copied at start
    device_blocks: maximum device blocks indexed for a rank that does not report total_kv_blocks
    lower_tier_blocks: maximum blocks indexed per rank on each lower tier
    """

    recover_from: list[str] = flag([], "--indexer-peers", each=url, common=True)
    device_blocks: int = flag(DEFAULT_DEVICE_BLOCKS, "--device-blocks-per-rank", ge=1, le=2**40)
    lower_tier_blocks: int = flag(
        DEFAULT_LOWER_TIER_BLOCKS, "--lower-tier-blocks-per-rank", ge=1, le=2**40
    )


class DiscoverFlags(Group):
    """Discovery of workers

    targets: find workers at file:PATH, dns:NAME:PORT, kubernetes:NAMESPACE/SERVICE or
      url:URL[#ROLE]; may be repeated
    defaults: JSON object with registration fields, events_port and replay_port for found workers;
      a value is used if neither the discovery nor the engine reports that field
    refresh_s: interval at which found engines are checked for changes
    role_label: label of a Kubernetes service with the role of its workers: prefill, decode or both
    """

    targets: list[str] = flag([], "--discover", each=_where, common=True)
    defaults: str = flag("{}", "--discover-defaults", each=_json, needs=_FOUND)
    refresh_s: float = flag(30.0, "--discover-refresh-secs", ge=0.01, needs=_FOUND)
    role_label: str = flag("llm-d.ai/role", "--role-label", needs=_FOUND)


class EnginesFlags(AccessFlags):
    """Requests to engines

    token_file: bearer token for every request to an engine; reread when it changes
    ca_file: certificate authorities (PEM) for engines with https URLs; unset: the system's
    cert_file: client certificate (PEM) for engines that require one; reread when it changes
    key_file: key of that certificate (PEM)
    """

    whose = "worker"
    token_file: str | None = flag(None, "--worker-token-file", each=path)
    ca_file: str | None = flag(None, "--worker-ca-file", each=path)
    cert_file: str | None = flag(
        None, "--worker-cert-file", each=path, needs=("--worker-key-file",)
    )
    key_file: str | None = flag(None, "--worker-key-file", each=path, needs=("--worker-cert-file",))


class HealthFlags(Group):
    """Outlier detection and health checks

    failures: eject a rank temporarily after this many consecutive failed or refused requests; 0:
      never
    interval_s: interval of HTTP health checks of every worker; `none`: no health checks,
      the default of the selector
    path: path of the health check at the worker's endpoint; any 2xx is healthy
    """

    failures: int = flag(_EJECTION.failures, "--worker-ejection-failures", ge=0, le=2**31)
    interval_s: float | None = flag(None, "--worker-health-interval-secs", ge=0.01, none=True)
    path: str = flag("/health", "--worker-health-path", each=_url_path, needs=_POLLS)


class PromptsFlags(Group):
    """Raw prompts

    mode: who tokenizes text; tokenize: engines, local: this process, off: nobody; learn: nobody,
      token ids are learned from responses (gateway, endpoint picker); unset: no /route
    tokenizer: folder with tokenizer.json and the chat template, for --prompts local
    ask_from_bytes: tokenize a prompt if at least this many bytes follow the part seen before;
      `none`: never; unset: 0, but with learn (gateway) 16384 where answers contain token ids
    passes_engine_fields: let clients set the fields by which engines speak to each other, such as
      kv_transfer_params, which can end an engine's process
    """

    mode: Literal["tokenize", "local", "off", "learn"] | None = flag(None, "--prompts", common=True)
    tokenizer: str | None = flag(None, "--prompts-tokenizer", each=path)
    ask_from_bytes: int | None = flag(
        None, "--prompts-tokenize-from", each=_bytes, needs=("--prompts",)
    )
    passes_engine_fields: bool = flag(False, "--pass-engine-fields", needs=("--prompts",))

    def __post_init__(self) -> None:
        if self.mode == "local" and self.tokenizer is None:
            raise ValueError(
                "--prompts local requires --prompts-tokenizer: a folder with tokenizer.json"
            )
        if self.mode != "local" and self.tokenizer is not None:
            raise ValueError("--prompts-tokenizer requires --prompts local")

    @property
    def settings(self) -> "PromptSettings | None":
        """Return the settings for text prompts, or None if text prompts are not accepted."""
        if self.mode is None:
            return None
        from lean_selector.gateway.prompt_shapes import Mode, PromptSettings

        from_bytes = self.ask_from_bytes
        if from_bytes is None:
            from_bytes = _ASK_WHEN_LEARNING_BYTES if self.mode == "learn" else 0
        return made_of(
            PromptSettings,
            self,
            mode=Mode(self.mode),
            ask_from_bytes=from_bytes,
            render_from_bytes=self.ask_from_bytes or 0,
        )


class AccessLogsFlags(Group):
    """Gateways' access logs

    addresses: receive gateways' access logs at this address, and free each logged request's
      reservation; syslog:HOST:PORT or unixgram:PATH; may be repeated
    allowed: networks besides loopback from which logs are accepted, such as 10.0.0.0/8; may be
      repeated
    """

    addresses: list[str] = flag([], "--lifecycle-from", each=_address)
    allowed: list[str] = flag(
        [], "--lifecycle-allow", each=_network, filled=True, needs=("--lifecycle-from",)
    )


class PageFlags(Group):
    """Web page

    is_off: disable the page /ui and its data: /choices, /fleet, /prefixes
    """

    is_off: bool = flag(False, "--no-ui")


class DecisionLogFlags(Group):
    """Decision log

    path: append a line per request to this file, for lean-selector simulate and replay; a line has
      lengths, times, hashes and the choice, but no text
    share: fraction of requests that are logged, sampled by id
    """

    path: str | None = flag(None, "--decision-log", each=path)
    share: float = flag(1.0, "--decision-log-share", ge=0.0, le=1.0, needs=("--decision-log",))


class IgnoredFlags(Group):
    """For compatibility

    threads: accepted, without effect: one thread serves everything
    policy_config: not supported: with this flag, the service does not start
    track_active_blocks: accepted, without effect
    track_output_blocks: accepted, without effect
    replica_sync: accepted, without effect
    """

    threads: int = flag(4, "--threads", ge=0, le=2**31)
    policy_config: str | None = dyn_flag(None, "--router-policy-config", each=_path)
    track_active_blocks: bool | None = dyn_flag(None, "--router-track-active-blocks")
    track_output_blocks: bool | None = dyn_flag(None, "--router-track-output-blocks")
    replica_sync: bool | None = dyn_flag(None, "--router-replica-sync")


# -- the configuration -----------------------------------------------------------------------------


class SelectorConfig(ServiceConfig):
    """The configuration of `lean-selector`."""

    dialect: DialectFlags
    router: RouterFlags
    queue: QueueFlags
    busy: BusyFlags
    sessions: SessionsFlags
    selection_cache: SelectionCacheFlags
    index: IndexFlags
    discover: DiscoverFlags
    engines: EnginesFlags
    health: HealthFlags
    prompts: PromptsFlags
    access_logs: AccessLogsFlags
    decisions: DecisionLogFlags
    page: PageFlags
    ignored: IgnoredFlags = field(compare=False)
    needs_kv_events: bool = True  # False: a worker without KV events is chosen by load alone
    asks_pairs: bool = False  # raw requests ask for a pair, whatever workers are registered

    def __post_init__(self) -> None:
        super().__post_init__()
        router = self.router
        if router.use_kv_events and router.approximate_cache_policy == "lru":
            raise ValueError("the approximate cache policy lru requires KV events to be off")
        if not router.use_kv_events and router.predicted_ttl_s is not None:
            raise ValueError("router_predicted_ttl_secs requires use_kv_events=true")
        if router.overlap_score_credit > 1.0 and self.dialect.name == "1.3":
            raise ValueError(
                "--router-kv-overlap-score-credit, DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT: invalid "
                f"value `{router.overlap_score_credit:g}`: expected 0 to 1, or --api 1.6"
            )
        if self.queue.trust_priority and self.listen.auth_token_file is not None:
            raise ValueError(
                "--trust-priority is for a service without --auth-token-file, in which lines of "
                "urgent clients have max-priority=high"
            )
        if self.dialect.no_assume_kv_reuse and self._by_flag("--router-assume-kv-reuse"):
            raise ValueError(
                "--router-assume-kv-reuse and --no-router-assume-kv-reuse exclude each other"
            )

    def _by_flag(self, name: str) -> bool:
        return self.given.get(name) == FLAG

    @cached_property
    def settings(self) -> RouterSettings:
        router, dialect, refresh_s = self.router, self.dialect, self.queue.overlap_refresh_after_s
        scale, credit = router.prefill_load_scale, router.overlap_score_credit
        weight = router.overlap_score_weight
        if weight is not None:
            # In the environment it overrides the other two flags; on the command line it does not
            # (D15).
            wins = self._by_flag("--router-kv-overlap-score-weight")
            if wins or not self._by_flag("--router-prefill-load-scale"):
                scale = weight
            if weight == 0.0 and (wins or not self._by_flag("--router-kv-overlap-score-credit")):
                credit = 0.0
        is_16 = dialect.name == "1.6"
        ttl_s = (_ROUTED_TTL_S if is_16 else 0.0) if router.ttl_s is None else router.ttl_s
        return made_of(
            RouterSettings,
            *(router, self.queue, self.reservations, dialect),
            needs_kv_events=self.needs_kv_events,
            asks_pairs=self.asks_pairs,
            prefill_load_scale=scale,
            overlap_score_credit=credit,
            ttl_s=ttl_s,
            predicted_ttl_s=router.predicted_ttl_s or 0.0,
            policy=router.policy or "dynamo",
            model_policies=dict(text.rsplit("=", 1) for text in router.model_policies),
            overlap_refresh_after_s=refresh_s if refresh_s and refresh_s > 0.0 else None,
            assume_kv_reuse=dialect.assume_kv_reuse and not dialect.no_assume_kv_reuse,
            dialect=DIALECTS[dialect.name],
            queue_weights={
                name: float(weight)
                for name, weight in (text.rsplit("=", 1) for text in self.queue.weights)
            },
            ejection=made_of(EjectionSettings, self.health),
            selection_cache=made_of(SelectionCacheSettings, self.selection_cache),
            sessions=self.sessions.settings,
        )

    @property
    def thresholds(self) -> BusyThreshold:
        """Return the busy thresholds for models without thresholds of their own."""
        return made_of(BusyThreshold, self.busy)

    @property
    def overload_status(self) -> int:
        return self.busy.overload_status or (429 if self.dialect.name == "1.6" else 503)

    @property
    def warnings(self) -> list[str]:
        router, found = self.router, list[str]()
        if router.overlap_score_weight is not None:
            found.append(
                "the overlap score weight is deprecated: set the prefill load scale "
                "and the overlap score credit instead"
            )
        if router.use_kv_events and router.ttl_s is not None:
            found.append("--router-ttl-secs has no effect while KV events are on")
        if router.approximate_cache_policy == "lru":
            found.append("the approximate cache policy lru is not supported: ttl is used")
        if self.index.recover_from and not router.use_kv_events:
            found.append("--indexer-peers has no effect while KV events are off")
        return found
