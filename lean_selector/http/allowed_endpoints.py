"""The endpoints that we may connect to, by the values of `--allow-endpoint`: HOST[:PORT[-PORT]].

If the host of an endpoint is an IP address, in any spelling, it is compared with the networks and
addresses of the list. A host name is compared with the names. If no name is equal, the name is
resolved at connect time, and we connect only to addresses that a network contains. An endpoint that
cannot be parsed unambiguously, or that is no host and port (`ipc`, `inproc`), is refused."""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

from lean_selector.http.urls import HTTP_PORTS

FLAG: Final = "--allow-endpoint"
_LOCAL: Final = ("ipc", "inproc")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*")
_NAME: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_AUTHORITY: Final = re.compile(r"(?P<host>\[[^\[\]]*\]|[^\[\]:]*)(?::(?P<port>[0-9]{1,5}))?")
_PORTS: Final = re.compile(r"(?::([0-9]{1,5})(?:-([0-9]{1,5}))?)?")
_PORT_MAX: Final = 0xFFFF
_FORM: Final = (
    "expected HOST[:PORT[-PORT]]; HOST is a name, an address, or a network such as 10.0.0.0/8 or "
    "[fd00::/8]"
)

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
# Family and socket address, as resolvers return them: (ip, port, ...).
A = TypeVar("A", bound=tuple[int, tuple[Any, ...] | bytes])


class _Allowed:
    """One value of the flag. The constructor raises ValueError with the reason."""

    def __init__(self, text: str) -> None:
        value = text.strip().lower()
        if "://" in value or "*" in value:
            what = "a scheme" if "://" in value else "*"
            raise ValueError(f"`{text}`: {what} has no meaning here: {_FORM}, without PORT any")
        bare = value.count(":") > 1 and "[" not in value  # an IPv6 address without a port
        end = len(value) if bare else value.find(":", value.find("]") + 1)
        host, port = (value, "") if end < 0 else (value[:end], value[end:])
        found = _PORTS.fullmatch(port)
        if found is None or not host:
            raise ValueError(f"`{text}`: {_FORM}")
        first, last = int(found[1] or 0), int(found[2] or found[1] or _PORT_MAX)
        if not first <= last <= _PORT_MAX:
            raise ValueError(f"`{text}`: there are no ports {port[1:]}")
        self.ports: Final = range(first, last + 1)
        self.name: Final = host.removesuffix(".")
        self.network: Final = _network(text, host)

    def has(self, address: IpAddress | None) -> bool:
        """Whether the value is a network or address that contains `address`."""
        return address is not None and self.network is not None and address in self.network


def _network(text: str, host: str) -> Network | None:
    """Parse an address or network; None for a name. Raises ValueError if it is neither."""
    is_six = host.startswith("[") and host.endswith("]")
    try:
        network = ipaddress.ip_network(host[1:-1] if is_six else host)
        if is_six and network.version == 4:
            raise ValueError("brackets are for IPv6")
        return network
    except ValueError as error:
        is_name = _NAME.fullmatch(host.removesuffix(".")) is not None
        if is_name and set(host) - set("0123456789.") and _address(host) is None:
            return None
        raise ValueError(f"`{text}`: {error}; {_FORM}") from None


class AllowedEndpoints:
    """The values of `--allow-endpoint`. An empty list allows no endpoint."""

    def __init__(self, values: Iterable[str]) -> None:
        """Parse the values. Raises ValueError with the invalid value and the reason."""
        self._allowed: Final = [_Allowed(text) for text in values]

    def refusal(self, endpoint: str) -> str | None:
        """Return in one line why `endpoint` is refused; None if it is not. A host name is not
        resolved here. After the name is resolved, `among` may still refuse the addresses."""
        name, address, allowed = self._judged(endpoint)
        for each in allowed:
            may_be = address is None and (each.network is not None or each.name == name)
            if may_be or each.has(address):
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
        name, address, allowed = self._judged(endpoint)
        if address is None and any(each.name == name for each in allowed):
            return list(addresses)
        found = [(each, _address(str(each[1][0]))) for each in addresses]
        able = [each for each, at in found if any(one.has(at) for one in allowed)]
        if not able:
            told = ", ".join(str(each[1][0]) for each in addresses[:3]) or "no address"
            raise PermissionError(f"`{endpoint}` is {told}, which is not allowed by {FLAG}")
        return able

    def _judged(self, endpoint: str) -> tuple[str, IpAddress | None, list[_Allowed]]:
        """Return the host of an endpoint, its address if it is one, and the values that have its
        port. There are none for an endpoint that cannot be parsed."""
        scheme, separator, rest = endpoint.partition("://")
        if not separator:  # an HTTP endpoint of a worker, without scheme
            scheme, rest = "http", endpoint
        scheme = scheme.lower()
        authority = rest if scheme == "tcp" else re.split(r"[/?#]", rest, maxsplit=1)[0]
        found = _AUTHORITY.fullmatch(authority)
        if found is None or scheme in _LOCAL or _SCHEME.fullmatch(scheme) is None:
            return "", None, []
        name, port = found["host"].lower().removesuffix("."), found["port"]
        address, number = _address(name), int(port) if port else HTTP_PORTS.get(scheme)
        if address is None and _NAME.fullmatch(name) is None:
            return "", None, []
        return name, address, [each for each in self._allowed if number in each.ports]


def _address(host: str) -> IpAddress | None:
    """Parse an IP address as a connection would, also 127.1 or 0x7f000001. None for a name."""
    text = host[1:-1] if host.startswith("[") else host
    try:
        told = socket.getaddrinfo(text, None, flags=socket.AI_NUMERICHOST)[0][4][0]
    except (OSError, UnicodeError):
        return None
    found = ipaddress.ip_address(told)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
