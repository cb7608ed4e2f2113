"""The flags of every service: listening, state, replicas and outbound connections."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from lean_selector.app.flags import Config, Group, flag
from lean_selector.core.replication.ledger import RESERVATION_EXPIRY_S
from lean_selector.core.zmq_endpoints import check_endpoint

if TYPE_CHECKING:
    from lean_selector.http.allowed_endpoints import AllowedEndpoints

_REPLICA = ("--replica-sync-bind", "--replica-sync-port")
_REPLICA_SECRET = "--replica-sync-curve-secret-key-file"
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount/"


# -- reading one value -----------------------------------------------------------------------------


def path(value: str) -> str:
    """Parses a path that is not empty. (A UNIX socket with an empty path gets a random address.)"""
    if not value:
        raise ValueError("expected a path")
    return value


def url(value: str) -> str:
    """Parses a base URL, and removes a trailing slash."""
    from lean_selector.http.urls import Url

    value = value.removesuffix("/")
    Url(value)
    return value


def endpoint(value: str) -> str:
    check_endpoint(value.strip())
    return value.strip()


def _host(value: str) -> str:
    _allowed([value])
    return value


def _allowed(values: list[str]) -> "AllowedEndpoints":
    from lean_selector.http.allowed_endpoints import AllowedEndpoints

    return AllowedEndpoints(values)


def checked_by(module: str, name: str, metavar: str) -> Callable[[str], str]:
    """Return a parser that checks a flag's value with the function `name` of `module`."""

    def check(value: str) -> str:
        getattr(importlib.import_module(module), name)(value)
        return value

    check.__name__ = metavar
    return check


_where = checked_by("lean_selector.discovery.particulars", "peer_target_of", "where")


# -- the groups ------------------------------------------------------------------------------------


class TlsFiles(NamedTuple):
    """Paths of PEM files. If `client_ca` is None, clients need no certificate."""

    cert: str
    key: str
    client_ca: str | None


class ListenFlags(Group):
    """Listening, logging and stopping

    port: HTTP port; 0: any free port
    host: address to bind
    uds: also listen on this UNIX socket (mode 0660)
    tls_cert: serve TLS on the port with this certificate chain (PEM); reread when it changes, and
      on SIGHUP
    tls_key: key of that certificate (PEM)
    tls_client_ca: require client certificates issued by these authorities (PEM)
    drain_s: maximum duration of a shutdown; responses in progress may continue until then
    max_connections: maximum HTTP connections; further connections are answered 503 and closed
    log_level: minimum severity of log lines
    log_format: format of log lines on stderr
    access_log: log every request
    auth_token_file: require a bearer token from this file; each line is `ROLE TOKEN [NAME]
      [max-priority=high]`, where ROLE is read, write or admin; required for every request except
      /health and /ready; the file is reread when it changes, and on SIGHUP
    """

    port: int = flag(8092, "--port", ge=0, le=65535, common=True)
    host: str = flag("0.0.0.0", "--host", filled=True, common=True)
    uds: str | None = flag(None, "--uds", each=path)
    tls_cert: str | None = flag(None, "--tls-cert", each=path, common=True, needs=("--tls-key",))
    tls_key: str | None = flag(None, "--tls-key", each=path, common=True, needs=("--tls-cert",))
    tls_client_ca: str | None = flag(None, "--tls-client-ca", each=path, needs=("--tls-cert",))
    drain_s: float = flag(5.0, "--drain-secs", ge=0)
    max_connections: int = flag(16_384, "--max-connections", ge=1, le=2**20)
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "--log-level", common=True
    )
    log_format: Literal["text", "json"] = flag("text", "--log-format")
    access_log: bool = flag(False, "--access-log")
    auth_token_file: str | None = flag(None, "--auth-token-file", each=path, common=True)

    @property
    def tls(self) -> TlsFiles | None:
        """Return the TLS files; None if the port has no TLS. The UNIX socket never has TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    @property
    def is_guarded(self) -> bool:
        """Whether a client of the HTTP port needs a token or a certificate."""
        return self.tls_client_ca is not None or self.auth_token_file is not None


class StateFlags(Group):
    """State across restarts

    path: save workers, thresholds, peers and live reservations in this directory, and restore them
      at start
    """

    path: str | None = flag(None, "--state-dir", each=path, common=True)


class ReplicaFlags(Group):
    """Replicas

    port: ZMQ PUB port for load events to other replicas; bound on every IPv4 interface
    bind: ZMQ endpoint to bind instead of a port, such as tcp://*:9092
    advertise: the endpoint at which other replicas reach this replica; must not be listed as a peer
    peers: comma-separated ZMQ PUB endpoints of other replicas; may be repeated
    catch_up: comma-separated HTTP URLs of all other replicas, to copy live reservations from; may
      be repeated
    discover: find other replicas at dns:NAME:PORT or kubernetes:NAMESPACE/SERVICE:PORT; may be
      repeated
    discover_http_port: HTTP port at which found replicas' live reservations are copied; unset: the
      same as --port
    secret_key_file: encrypt replica sync (CURVE) with the key pair in this file
    peer_keys_file: public keys of the trusted replicas, one per line; unset: all replicas use
      the same key pair
    """

    port: int | None = flag(None, "--replica-sync-port", ge=1, le=65535, common=True)
    bind: str | None = flag(None, "--replica-sync-bind", each=endpoint)
    advertise: str | None = flag(None, "--replica-sync-advertise", each=endpoint, needs=_REPLICA)
    peers: list[str] = flag([], "--replica-sync-peers", each=endpoint, common=True, needs=_REPLICA)
    catch_up: list[str] = flag([], "--replica-sync-catch-up", each=url, common=True, needs=_REPLICA)
    discover: list[str] = flag([], "--replica-sync-discover", each=_where, needs=_REPLICA)
    discover_http_port: int | None = flag(
        None,
        "--replica-sync-discover-http-port",
        ge=1,
        le=65535,
        needs=("--replica-sync-discover",),
    )
    secret_key_file: str | None = flag(None, _REPLICA_SECRET, each=path, needs=_REPLICA)
    peer_keys_file: str | None = flag(
        None, "--replica-sync-curve-peer-keys-file", each=path, needs=(_REPLICA_SECRET,)
    )

    def __post_init__(self) -> None:
        if self.port is not None and self.bind is not None:
            raise ValueError(
                "--replica-sync-port and --replica-sync-bind set the same socket: give only one"
            )
        if self.advertise in self.peers:
            raise ValueError(
                f"--replica-sync-peers: `{self.advertise}` is this replica's own "
                "--replica-sync-advertise"
            )

    @property
    def endpoint(self) -> str | None:
        """Return the endpoint of the PUB socket; None if replica sync is off."""
        return self.bind if self.port is None else f"tcp://*:{self.port}"


class FinderFlags(Group):
    """Discovery

    interval_s: interval at which files are reread and names resolved again
    grace_s: keep a worker or peer this long after discovery no longer finds it
    api: URL of the Kubernetes API server; unset: from the pod's environment
    api_token_file: token of the service account; reread when it changes
    api_ca_file: certificate authorities of the API server; reread when they change
    """

    interval_s: float = flag(2.0, "--discover-interval-secs", ge=0.01)
    grace_s: float = flag(10.0, "--discover-grace-secs", ge=0)
    api: str | None = flag(None, "--kubernetes-api")
    api_token_file: str = flag(f"{_ACCOUNT}token", "--kubernetes-token-file", each=path)
    api_ca_file: str = flag(f"{_ACCOUNT}ca.crt", "--kubernetes-ca-file", each=path)


class AccessFlags(Group):
    """Flags for the credentials and certificates of our outbound requests."""

    whose: ClassVar[str]  # the flags begin with --WHOSE, as in --WHOSE-token-file
    token_file: str | None
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    tls_name: str | None = None


class PeersFlags(AccessFlags):
    """Requests to replicas and index peers

    token_file: bearer token for every request to another replica or an index peer; reread when it
      changes
    ca_file: certificate authorities (PEM) for peers with https URLs; unset: the system's
    cert_file: client certificate (PEM) for peers that require one; reread when it changes
    key_file: key of that certificate (PEM)
    tls_name: name that the certificates of peers must carry; unset: the host of the URL
    """

    whose = "peer"
    token_file: str | None = flag(None, "--peer-token-file", each=path)
    ca_file: str | None = flag(None, "--peer-ca-file", each=path)
    cert_file: str | None = flag(None, "--peer-cert-file", each=path, needs=("--peer-key-file",))
    key_file: str | None = flag(None, "--peer-key-file", each=path, needs=("--peer-cert-file",))
    tls_name: str | None = flag(None, "--peer-tls-name", filled=True)


class EndpointsFlags(Group):
    """Allowed endpoints

    allowed: allowlist for connections to workers, events, replays and peers; HOST[:PORT[-PORT]];
      HOST is a name, an address, or a network such as 10.0.0.0/8; may be repeated; unset: all
    """

    allowed: list[str] = flag([], "--allow-endpoint", each=_host, filled=True, common=True)

    @property
    def rules(self) -> "AllowedEndpoints | None":
        """Return the allowlist; None if everything is allowed."""
        return _allowed(self.allowed) if self.allowed else None

    def check(self, what: str, endpoints: list[str]) -> None:
        """Raises ValueError, with a text that begins with `what`, if an endpoint is not allowed."""
        rules = self.rules
        for each in endpoints:
            refusal = None if rules is None else rules.refusal(each)
            if refusal is not None:
                raise ValueError(what + refusal)


class ReservationsFlags(Group):
    """Reservations

    reservation_expiry_s: drop a reservation this long after the last API call for this reservation
    """

    reservation_expiry_s: float = flag(
        RESERVATION_EXPIRY_S,
        "--reservation-expiry-secs",
        "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        ge=0.001,
        common=True,
    )

    @property
    def touch_after_s(self) -> float:
        """Return after how many seconds to renew a reservation while its request is in progress."""
        return self.reservation_expiry_s / 3


# -- the configurations ----------------------------------------------------------------------------


class ServiceConfig(Config):
    """The configuration of every service."""

    listen: ListenFlags
    state: StateFlags
    replica: ReplicaFlags
    finder: FinderFlags
    peers: PeersFlags
    endpoints: EndpointsFlags
    reservations: ReservationsFlags

    def __post_init__(self) -> None:
        self.endpoints.check("--replica-sync-peers: ", self.replica.peers)

    @property
    def warnings(self) -> list[str]:
        return []


class TrackerConfig(ServiceConfig):
    """The configuration of `lean-slot-tracker`."""

    defaults = {"--port": 8091}
