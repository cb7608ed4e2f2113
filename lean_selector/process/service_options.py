"""What every service can be told: where it listens, its replicas, when a reservation expires.

Rows of the table of options, and the structs made of them.
"""

import argparse
from collections.abc import Mapping

import msgspec

from lean_selector.core.replication.ledger import RESERVATION_EXPIRY_S
from lean_selector.process.curve_config import ReplicaKeys
from lean_selector.process.curve_options import REPLICA_CURVE_OPTIONS, replica_keys_of
from lean_selector.process.discovery_config import PeerDiscovery
from lean_selector.process.discovery_options import FINDER_OPTIONS, peer_discovery_of
from lean_selector.process.options import (
    Option,
    boolean,
    endpoint,
    integer,
    number,
    path,
    peer_endpoints,
    text,
    urls,
    word,
    zmq_port,
)


class TlsFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a service shows over TLS, and whom it lets in; paths of PEM files."""

    cert: str
    key: str
    client_ca: str | None  # None: clients need no certificate


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a service is reached, and how it leaves."""

    host: str
    port: int
    uds: str | None
    tls: TlsFiles | None  # on the port; never on the UNIX socket
    drain_s: float
    max_connections: int
    log_level: str
    log_format: str
    access_log: bool
    auth_token_file: str | None  # None: whoever connects may do everything

    @property
    def asks_who(self) -> bool:
        """Whether who calls on the port must have something to show: a token, or a certificate."""
        is_mutual = self.tls is not None and self.tls.client_ca is not None
        return is_mutual or self.auth_token_file is not None


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a service speaks to its replicas."""

    bind: str  # ZMQ endpoint of the PUB
    advertise: str | None
    peers: list[str]
    catch_up: list[str]  # HTTP URLs
    discover: PeerDiscovery | None  # peers besides
    keys: ReplicaKeys | None  # None: nothing is encrypted


# -- the table ------------------------------------------------------------------------------------

POSITIVE_SECONDS = number(1e-3)


def port_option(default: int) -> Option:
    return Option("--port", integer(0, 65535), default, "HTTP port; 0 takes a free one")


LISTEN_OPTIONS = (
    Option("--host", text, "0.0.0.0", "address to bind", metavar="ADDRESS"),
    Option("--uds", path, None, "listen on this UNIX socket too (mode 0660)", metavar="PATH"),
    Option(
        "--tls-cert",
        path,
        None,
        "speak TLS on the port, with this certificate and its chain (PEM); read again when it "
        "changes, and on SIGHUP",
        metavar="PATH",
    ),
    Option("--tls-key", path, None, "the key of that certificate (PEM)", metavar="PATH"),
    Option(
        "--tls-client-ca",
        path,
        None,
        "let in only clients with a certificate of these authorities (PEM)",
        metavar="PATH",
    ),
    Option("--drain-secs", number(0.0), 5.0, "how long a stop may take"),
    Option(
        "--max-connections",
        integer(1, 2**20),
        16_384,
        "most HTTP connections at a time; one more is answered 503 and closed",
    ),
    Option(
        "--log-level",
        word("debug", "info", "warning", "error"),
        "info",
        "least severe lines to log",
        metavar="LEVEL",
    ),
    Option(
        "--log-format",
        word("text", "json"),
        "text",
        "how a line is written to stderr",
        metavar="FORMAT",
    ),
    Option("--access-log", boolean, False, "log every request", metavar="BOOL"),
    Option(
        "--auth-token-file",
        path,
        None,
        "ask every request but /health and /ready for a bearer token of this file: a line for each,"
        " `ROLE TOKEN`, ROLE one of read, write, admin; read again when it changes and on SIGHUP",
        metavar="FILE",
    ),
)

REPLICA_OPTIONS = (
    Option(
        "--replica-sync-port",
        zmq_port,
        None,
        "ZMQ PUB port for load events to other replicas, bound on every IPv4 interface",
    ),
    Option(
        "--replica-sync-bind",
        endpoint,
        None,
        "the same as a ZMQ endpoint, such as tcp://*:9092",
        metavar="ENDPOINT",
    ),
    Option(
        "--replica-sync-advertise",
        endpoint,
        None,
        "that endpoint as other replicas reach it; refused as a peer",
        metavar="ENDPOINT",
    ),
    Option(
        "--replica-sync-peers",
        peer_endpoints,
        [],
        "comma-separated ZMQ PUB endpoints of other replicas; may be repeated",
        metavar="ENDPOINTS",
        repeats=True,
    ),
    Option(
        "--replica-sync-catch-up",
        urls,
        [],
        "comma-separated HTTP URLs of other replicas: take over the live reservations of the first "
        "that answers, at start, and ask all of them when events were missed",
        metavar="URLS",
        repeats=True,
    ),
    *REPLICA_CURVE_OPTIONS,
    *FINDER_OPTIONS,
)

EXPIRY_OPTION = Option(
    "--reservation-expiry-secs",
    POSITIVE_SECONDS,
    RESERVATION_EXPIRY_S,
    "drop a reservation this long after its last lifecycle call",
    ("DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",),
)


# -- putting it together -----------------------------------------------------------------------


def replica_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """Both families of replica flags as one; None while replica sync is off."""
    port, bind = values["replica_sync_port"], values["replica_sync_bind"]
    advertise, peers = values["replica_sync_advertise"], values["replica_sync_peers"]
    assert isinstance(peers, list)
    keys = replica_keys_of(parser, values, is_on=port is not None or bind is not None)
    if port is not None and bind is not None:
        parser.error("--replica-sync-port and --replica-sync-bind mean one socket: give only one")
    if port is None and bind is None:
        if values["replica_sync_catch_up"]:
            parser.error("--replica-sync-catch-up requires --replica-sync-port")
        if values["replica_sync_discover"]:
            parser.error("--replica-sync-discover requires --replica-sync-port")
        if advertise is not None or peers:
            parser.error(
                "--replica-sync-advertise and --replica-sync-peers require --replica-sync-bind "
                "or --replica-sync-port"
            )
        return None
    if advertise in peers:
        parser.error(
            f"--replica-sync-peers: `{advertise}` is this replica's own --replica-sync-advertise"
        )
    return {
        "bind": bind if port is None else f"tcp://*:{port}",
        "advertise": advertise,
        "peers": peers,
        "catch_up": values["replica_sync_catch_up"],
        "discover": peer_discovery_of(values),
        "keys": keys,
    }


def tls_of(
    parser: argparse.ArgumentParser, values: Mapping[str, object]
) -> dict[str, object] | None:
    """None while the port speaks no TLS."""
    cert, key, client_ca = values["tls_cert"], values["tls_key"], values["tls_client_ca"]
    if cert is None and key is None and client_ca is None:
        return None
    for flag, value in (("--tls-cert", cert), ("--tls-key", key)):
        if value is None:
            others = [f for f, v in (("--tls-cert", cert), ("--tls-key", key)) if v is not None]
            parser.error(f"{(others or ['--tls-client-ca'])[0]} requires {flag}")
    return {"cert": cert, "key": key, "client_ca": client_ca}


def listen_of(parser: argparse.ArgumentParser, values: Mapping[str, object]) -> dict[str, object]:
    return {
        "host": values["host"],
        "port": values["port"],
        "uds": values["uds"],
        "tls": tls_of(parser, values),
        "drain_s": values["drain_secs"],
        "max_connections": values["max_connections"],
        "log_level": values["log_level"],
        "log_format": values["log_format"],
        "access_log": values["access_log"],
        "auth_token_file": values["auth_token_file"],
    }
