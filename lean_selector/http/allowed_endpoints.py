"""The endpoints that we may connect to: URL parsing, and the patterns of `--allow-endpoint`.

A pattern is `SCHEME://HOST:PORT`. Its host is a name, a network or `*`. For `ipc` and `inproc`, a
path replaces host and port (docs/guide/operations.md). If the host of an endpoint is an IP address,
in any spelling, the address is compared with the networks. A host name is compared with the names;
if no name matches, the name is resolved at connect time, and we connect only to addresses that a
network contains. An endpoint that cannot be parsed unambiguously matches nothing."""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

_HTTP_PORTS: Final = {"http": 80, "https": 443}
# Characters that may stand unescaped in a request line and a host header.
_PLAIN: Final = re.compile(r"[!-~]+")


class Url:
    """A parsed http or https URL. The constructor raises ValueError with the reason."""

    __slots__ = ("authority", "host", "is_secure", "port", "target")

    def __init__(self, text: str) -> None:
        if _PLAIN.fullmatch(text) is None:
            raise ValueError(f"`{text}` has characters that are invalid in a URL")
        parts = urlsplit(text)
        if parts.scheme not in _HTTP_PORTS:
            raise ValueError(f"`{text}` is not an http:// or https:// URL")
        if "@" in parts.netloc:
            raise ValueError(f"`{parts.hostname}`: credentials in a URL are not supported")
        if not parts.hostname:
            raise ValueError(f"`{text}` has no host")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"`{text}` has no valid port") from None
        self.is_secure: Final = parts.scheme == "https"
        self.host: Final = parts.hostname  # lower case, without brackets
        self.port: Final = _HTTP_PORTS[parts.scheme] if port is None else port
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.authority: Final = f"{name}:{self.port}"
        query = f"?{parts.query}" if parts.query else ""
        self.target: Final = (parts.path or "/") + query

    @property
    def origin(self) -> str:
        """Return `http(s)://host:port`, the same for every spelling of an endpoint."""
        return f"{'https' if self.is_secure else 'http'}://{self.authority}"


def endpoint_url(endpoint: str) -> Url:
    """Parse a worker's endpoint. The default scheme is http. Raises ValueError."""
    return Url(_with_scheme(endpoint))


def base_without_version(endpoint: str) -> str:
    """Return the base URL to which a caller appends `/v1/...`. Adds http:// if `endpoint` has no
    scheme, and removes a final /v1, which the base URLs of OpenAI's clients have."""
    if not endpoint:
        return ""
    scheme, separator, rest = _with_scheme(endpoint).rstrip("/").rpartition("://")
    return scheme + separator + rest.removesuffix("/v1").rstrip("/")


def url_at(endpoint: str | None, path: str) -> str | None:
    """Return the URL of `path` on the worker with this endpoint; None if the endpoint is not HTTP.

    The endpoint may lack a scheme. A path in the endpoint, such as /v1, is dropped."""
    if not endpoint:
        return None
    try:
        url = urlsplit(_with_scheme(endpoint))
        if url.scheme not in ("http", "https") or not url.hostname:
            return None
        _ = url.port  # raises for an invalid port
    except ValueError:
        return None
    return f"{url.scheme}://{url.netloc}{path}"


def _with_scheme(endpoint: str) -> str:
    return endpoint if "://" in endpoint else f"http://{endpoint}"


# -- patterns -------------------------------------------------------------------------------------

FLAG: Final = "--allow-endpoint"
_LOCAL: Final = ("ipc", "inproc")  # these schemes are followed by a path or a name, not by a host
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_NAME: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_GLOB: Final = re.compile(r"[a-z0-9_*-]+(\.[a-z0-9_*-]+)*")
_PORT_RANGE: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<port>[0-9]{1,5}))?")
_PORT_MAX: Final = 0xFFFF

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Family and socket address, as resolvers return them: (ip, port, ...).
A = TypeVar("A", bound=tuple[int, tuple[Any, ...] | bytes])


class _Pattern:
    """A parsed pattern of `--allow-endpoint`. The constructor raises ValueError with the reason."""

    def __init__(self, text: str) -> None:
        self.text: Final = text
        scheme, separator, rest = text.strip().partition("://")
        if not separator or not rest:
            raise ValueError(f"`{text}` is not SCHEME://HOST:PORT")
        self.scheme: Final = scheme.lower()
        if self.scheme != "*" and _SCHEME.fullmatch(self.scheme) is None:
            raise ValueError(f"`{text}` has no valid scheme")
        self.is_local: Final = self.scheme in _LOCAL
        self.network: Network | None = None
        self.name: re.Pattern[str] | None = None  # None without a network: any host or path
        self.ports = range(_PORT_MAX + 1)
        if self.is_local:
            self.name = None if rest == "*" else _glob(rest, "[^/]*")
            return
        host, colon, port = rest.rpartition(":")
        if not colon or not host or host.endswith(":"):
            raise ValueError(f"`{text}` has no port: a number, a range such as 5557-5564, or *")
        self.ports = _ports(text, port)
        self._read_host(text, host.lower())

    def _read_host(self, text: str, host: str) -> None:
        if host == "*":
            return
        if host.startswith("[") or "/" in host or not set(host) - set("0123456789."):
            try:
                self.network = ipaddress.ip_network(host.replace("[", "").replace("]", ""))
            except ValueError as error:
                raise ValueError(f"`{text}`: {error}") from None
            if ("[" in host) != (self.network.version == 6):
                raise ValueError(f"`{text}`: brackets are for IPv6 addresses, which require them")
            return
        host = host.removesuffix(".")
        if _GLOB.fullmatch(host) is None:
            raise ValueError(f"`{text}` has no valid host: a name, a network, or *")
        if not set(host) - set("0123456789.*"):
            raise ValueError(f"`{text}`: write addresses as a network, such as 10.0.0.0/8")
        self.name = _glob(host, "[^.]*")

    def concerns(self, target: "_Target") -> bool:
        """Whether the pattern's scheme and port match those of `target`, a parsed endpoint."""
        if self.is_local or target.scheme in _LOCAL:
            return self.scheme == target.scheme
        return self.scheme in (target.scheme, "*") and target.port in self.ports

    def has_name(self, name: str) -> bool:
        """Whether the pattern matches `name`, a host or path. The host `*` matches any name."""
        if self.name is not None:
            return self.name.fullmatch(name) is not None
        return self.network is None

    def has_address(self, address: IpAddress) -> bool:
        if self.network is not None:
            return address.version == self.network.version and address in self.network
        return self.name is None


class _Target:
    """A parsed endpoint, to compare with the patterns. The constructor raises ValueError if the
    endpoint is invalid."""

    __slots__ = ("address", "name", "port", "scheme")

    def __init__(self, endpoint: str) -> None:
        scheme, separator, rest = endpoint.partition("://")
        if not separator:  # an HTTP endpoint of a worker, without scheme
            scheme, rest = "http", endpoint
        self.scheme: Final = scheme.lower()
        self.port = 0
        self.address: IpAddress | None = None
        self.name = rest
        if _SCHEME.fullmatch(self.scheme) is None:
            raise ValueError("no scheme")
        if self.scheme in _LOCAL:
            if "\0" in rest or {".", ".."} & set(rest.split("/")) or "//" in rest:
                raise ValueError("a path that leads elsewhere")
            return
        authority = rest if self.scheme == "tcp" else re.split(r"[/?#]", rest, maxsplit=1)[0]
        found = _AUTHORITY.fullmatch(authority)
        if found is None:
            raise ValueError("no host and port")
        port = found["port"] or _HTTP_PORTS.get(self.scheme)
        if port is None or int(port) > _PORT_MAX:
            raise ValueError("no port")
        self.port = int(port)
        self.name = found["host"].lower().removesuffix(".")
        self.address = _address(self.name)
        if self.address is None and _NAME.fullmatch(self.name) is None:
            raise ValueError("no host")


class AllowedEndpoints:
    """The patterns of `--allow-endpoint`. An empty list of patterns allows no endpoint."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Parse the patterns. Raises ValueError with the invalid pattern and the reason."""
        self._patterns: Final = [_Pattern(text) for text in patterns]

    def refusal(self, endpoint: str) -> str | None:
        """Return in one line why `endpoint` is refused; None if it is not. A host name is not
        resolved here. After the name is resolved, `among` may still refuse the addresses."""
        try:
            target, patterns = self._judged(endpoint)
        except ValueError:
            patterns = []
        for each in patterns:
            if target.address is not None:
                if each.has_address(target.address):
                    return None
            elif each.has_name(target.name) or each.network is not None:
                return None
        return f"`{endpoint}` is not allowed by {FLAG}"

    def check(self, endpoint: str) -> None:
        """Raise PermissionError if `endpoint` is refused. A host name is not resolved for this."""
        reason = self.refusal(endpoint)
        if reason is not None:
            raise PermissionError(reason)

    def among(self, endpoint: str, addresses: Sequence[A]) -> list[A]:
        """Return the allowed addresses. `addresses` are the resolved addresses of the endpoint's
        host. Raises PermissionError if no address is allowed."""
        self.check(endpoint)
        target, patterns = self._judged(endpoint)
        if target.address is None and any(each.has_name(target.name) for each in patterns):
            return list(addresses)
        allowed: list[A] = []
        refused: list[A] = []
        for each in addresses:
            address = _address(str(each[1][0]))
            is_allowed = address is not None and any(p.has_address(address) for p in patterns)
            (allowed if is_allowed else refused).append(each)
        if not allowed:
            found = ", ".join(str(each[1][0]) for each in refused[:3]) or "no address"
            raise PermissionError(f"`{endpoint}` is {found}, which is not allowed by {FLAG}")
        return allowed

    def _judged(self, endpoint: str) -> tuple[_Target, list[_Pattern]]:
        """Return the parsed endpoint, and the patterns that match its scheme and port."""
        target = _Target(endpoint)
        return target, [each for each in self._patterns if each.concerns(target)]


def _glob(text: str, star: str) -> re.Pattern[str]:
    return re.compile(star.join(re.escape(part) for part in text.split("*")))


def _ports(text: str, port: str) -> range:
    if port == "*":
        return range(_PORT_MAX + 1)
    found = _PORT_RANGE.fullmatch(port)
    if found is None:
        raise ValueError(f"`{text}`: the port is a number, a range such as 5557-5564, or *")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last <= _PORT_MAX:
        raise ValueError(f"`{text}`: there are no ports {port}")
    return range(first, last + 1)


def _address(host: str) -> IpAddress | None:
    """Parse an IP address, also in forms such as 127.1 or 0x7f000001. None for a host name."""
    text = host[1:-1] if host.startswith("[") else host
    try:
        found: IpAddress = ipaddress.ip_address(text)
    except ValueError:
        if re.fullmatch(r"[0-9a-fx.]+", text) is None:
            return None
        try:  # such as 127.1, 0x7f000001, 017700000001
            return ipaddress.IPv4Address(socket.inet_aton(text))
        except OSError:
            return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found
