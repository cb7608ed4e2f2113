"""The options of discovery, and the structs made of them. What they mean is read by what is
imported only when one is given."""

import importlib
from collections.abc import Mapping
from typing import Any

from lean_selector.process.options import Option, integer, number, path, text

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"


def _targets(reader: str) -> Any:
    """Comma-separated targets of a discovery, as they are given, each once."""

    def read(value: str) -> list[str]:
        read_one = getattr(importlib.import_module("lean_selector.workers.targets"), reader)
        items = list(dict.fromkeys(item.strip() for item in value.split(",") if item.strip()))
        for item in items:
            read_one(item)
        return items

    return read


def _defaults(value: str) -> str:
    read = importlib.import_module("lean_selector.workers.particulars").defaults_of
    read(value)
    return value


FINDER_OPTIONS = (
    Option(
        "--replica-sync-discover",
        _targets("peer_target_of"),
        [],
        "find the other replicas: dns:NAME:PORT or kubernetes:NAMESPACE/SERVICE:PORT; may be "
        "repeated",
        metavar="WHERE",
        repeats=True,
    ),
    Option(
        "--replica-sync-discover-http-port",
        integer(1, 65535),
        None,
        "HTTP port of the replicas that are found, to catch up from; unset: as --port",
    ),
    Option(
        "--discover-interval-secs",
        number(0.01),
        2.0,
        "how often files and names are looked at again",
    ),
    Option(
        "--discover-grace-secs",
        number(0.0),
        10.0,
        "how long what is not found any more stays",
    ),
    Option(
        "--kubernetes-api",
        text,
        None,
        "URL of the API server; unset: that of the pod's environment",
        metavar="URL",
    ),
    Option(
        "--kubernetes-token-file",
        path,
        _ACCOUNT + "token",
        "token of the service account; read again when it changes",
        metavar="PATH",
    ),
    Option(
        "--kubernetes-ca-file",
        path,
        _ACCOUNT + "ca.crt",
        "certificate authorities of the API server; read again when they change",
        metavar="PATH",
    ),
)

WORKER_OPTIONS = (
    Option(
        "--discover",
        _targets("target_of"),
        [],
        "find workers: file:PATH, dns:NAME:PORT, dns:_SERVICE._tcp.NAME, "
        "kubernetes:NAMESPACE/SERVICE or url:URL; may be repeated",
        metavar="WHERE",
        repeats=True,
    ),
    Option(
        "--discover-defaults",
        _defaults,
        "{}",
        "JSON object with fields of a registration for found workers where neither the discovery "
        "nor the engine says them; also events_port and replay_port",
        metavar="JSON",
    ),
    Option(
        "--discover-refresh-secs",
        number(0.01),
        30.0,
        "how often engines that were found are asked whether they have changed",
    ),
    Option(
        "--worker-token-file",
        path,
        None,
        "bearer token for every request that we make of an engine; read again when it changes",
        metavar="PATH",
    ),
    Option(
        "--worker-ca-file",
        path,
        None,
        "certificate authorities (PEM) of engines with https URLs; unset: the system's",
        metavar="PATH",
    ),
    Option(
        "--worker-cert-file",
        path,
        None,
        "our certificate (PEM) for engines that ask for one; read again when it changes",
        metavar="PATH",
    ),
    Option("--worker-key-file", path, None, "the key of that certificate (PEM)", metavar="PATH"),
)


def finder_of(values: Mapping[str, object]) -> dict[str, object]:
    return {
        "interval_s": values["discover_interval_secs"],
        "grace_s": values["discover_grace_secs"],
        "api": values["kubernetes_api"],
        "api_token_file": values["kubernetes_token_file"],
        "api_ca_file": values["kubernetes_ca_file"],
    }


def worker_discovery_of(values: Mapping[str, object]) -> dict[str, object] | None:
    """None while no workers are to be found."""
    if not values["discover"]:
        return None
    return {
        "targets": values["discover"],
        "defaults": values["discover_defaults"],
        "refresh_s": values["discover_refresh_secs"],
    }


def peer_discovery_of(values: Mapping[str, object]) -> dict[str, object] | None:
    """None while no peers are to be found."""
    if not values["replica_sync_discover"]:
        return None
    port = values["replica_sync_discover_http_port"]
    return {
        "targets": values["replica_sync_discover"],
        "http_port": values["port"] if port is None else port,
        "is_secure": values["tls_cert"] is not None,  # replicas are alike
    }
