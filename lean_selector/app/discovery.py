"""Creates the discovery of workers and replicas. Imported only if a flag enables discovery."""

import importlib
import os
import time
from collections.abc import Callable

from lean_selector.api.header_warnings import mend_of_incomplete, registration_warnings
from lean_selector.app.host import StartError
from lean_selector.app.replication import Replication
from lean_selector.app.selector_parts import SelectorCore
from lean_selector.app.service_flags import FinderFlags, ServiceConfig, TrackerConfig
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.discovery.discoveries import Discoveries
from lean_selector.discovery.engine_questions import ask_engine
from lean_selector.discovery.particulars import Target, defaults_of, peer_target_of, target_of
from lean_selector.discovery.peer_roster import PeerRoster
from lean_selector.discovery.roster import Asking, Roster
from lean_selector.http.allowed_endpoints import AllowedEndpoints
from lean_selector.http.outbound import OutboundClient, Resolve
from lean_selector.http.trust import Credentials, TokenFile, Trust
from lean_selector.links.links import Links


def selector_discovery(core: SelectorCore, replication: Replication | None) -> Discoveries:
    """Creates the objects that discover workers and other replicas. Raises StartError."""
    config, links, selector = core.config, core.links, core.selector
    finding, workers, others = _discoveries_of(
        config.finder,
        links.resolver.resolve,
        config.discover.targets,
        config.replica.discover,
        config.discover.role_label,
    )
    if workers:
        engines, defaults = core.engine_client(), defaults_of(config.discover.defaults)

        def register(spec: WorkerSpec, anew: bool) -> list[str]:
            worker = selector.upsert_worker(spec, time.monotonic(), anew=anew)
            warnings = registration_warnings(worker, core.subscriptions, selector.settings)
            if (flags := mend_of_incomplete(worker.reasons)) is not None:
                warnings.append(f"cannot be chosen: {'; '.join(worker.reasons)}: give {flags}")
            if defaults.events_port is not None and any(" also that of " in w for w in warnings):
                warnings.append(
                    "engines on one host need ports of their own: list them in a file (--discover "
                    "file:PATH), not in --discover-defaults"
                )
            return warnings

        roster = Roster(
            selector.catalog,
            register,
            lambda worker_id: selector.remove_worker(worker_id, time.monotonic()),
            defaults=defaults,
            grace_s=config.finder.grace_s,
            use_kv_events=config.router.use_kv_events,
            on_new=lambda known: asking.begin(known),
            on_gone=lambda known: asking.end(known),
            refusal=_refusal_of(links.allowed),
        )
        asking = Asking(
            lambda base: ask_engine(engines, base),
            roster.engine_answered,
            roster.failed,
            config.discover.refresh_s,
        )
        finding.find_workers(workers, roster, asking)
    if others and replication is not None:
        _find_peers(finding, others, config, replication, links.allowed)
    return finding


def tracker_discovery(config: TrackerConfig, replication: Replication, links: Links) -> Discoveries:
    """Creates the objects that discover other replicas. Raises StartError."""
    finding, _, targets = _discoveries_of(
        config.finder, links.resolver.resolve, [], config.replica.discover
    )
    _find_peers(finding, targets, config, replication, links.allowed)
    return finding


def _discoveries_of(
    finder: FinderFlags,
    resolve: Resolve,
    workers: list[str],
    peers: list[str],
    role_label: str = "",
) -> tuple[Discoveries, list[Target], list[Target]]:
    """Parses the targets `workers` and `peers`, such as `dns:NAME:PORT`. Return a Discoveries
    object without targets, the parsed `workers`, and the parsed `peers`. Raises StartError."""
    worker_targets, peer_targets = list(map(target_of, workers)), list(map(peer_target_of, peers))
    targets = [*worker_targets, *peer_targets]
    for target in targets:
        if target.kind == "file" and not target.name.lower().endswith(".json"):
            _check_yaml(target)
    api, api_client = "", None
    if any(target.kind == "kubernetes" for target in targets):
        api, api_client = _api_client(finder, resolve)
    finding = Discoveries(resolve, finder.interval_s, api, api_client, role_label)
    return finding, worker_targets, peer_targets


def _find_peers(
    discoveries: Discoveries,
    targets: list[Target],
    config: ServiceConfig,
    replication: Replication,
    allowed: AllowedEndpoints | None,
) -> None:
    """Makes `discoveries` register the peers found at `targets`, and deregister vanished peers."""
    http_port = config.replica.discover_http_port
    port = replication.sync.bound_endpoint.rpartition(":")[2]
    own_port = int(port) if port.isdigit() else 0
    roster = PeerRoster(
        replication,
        own_port,
        replication.advertise,
        config.listen.port if http_port is None else http_port,
        config.finder.grace_s,
        refusal=_refusal_of(allowed),
        is_secure=config.listen.tls is not None,  # assume the same settings on all replicas
    )
    discoveries.find_peers(targets, roster)


def _refusal_of(allowed: AllowedEndpoints | None) -> Callable[[str], str | None]:
    return (lambda endpoint: None) if allowed is None else allowed.refusal


def _api_client(finder: FinderFlags, resolve: Resolve) -> tuple[str, OutboundClient]:
    api = finder.api
    if api is None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise StartError(
                "discovery by kubernetes: not in a pod (KUBERNETES_SERVICE_HOST is not set), and "
                "--kubernetes-api is not given"
            )
        api = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        token = TokenFile(finder.api_token_file)
        trust = Trust(finder.api_ca_file)
        trust.context()
    except (OSError, ValueError) as error:
        raise StartError(f"discovery by kubernetes: {error}") from None
    return api.removesuffix("/"), OutboundClient(resolve, Credentials(token, trust))


def _check_yaml(target: Target) -> None:
    """Raises StartError if the module `yaml`, which reads the file of `target`, is missing."""
    try:
        importlib.import_module("yaml")
    except ImportError:
        raise StartError(
            f'{target.text} needs pip install "lean-selector[discovery]": no module yaml'
        ) from None
