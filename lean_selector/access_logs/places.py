"""Where lines are read from, and from whom: the values of two flags."""

import ipaddress
from typing import Final

from lean_selector.access_logs.place_shapes import Place

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: Final[tuple[Network, ...]] = (
    ipaddress.ip_network("127.0.0.0/8"),
    ipaddress.ip_network("::1/128"),
)
_MAX_KNOWN: Final = 4096  # senders whose permission is remembered


def place_of(text: str) -> Place:
    """`syslog:HOST:PORT` or `unixgram:PATH`; raises ValueError."""
    kind, colon, rest = text.partition(":")
    if kind == "unixgram" and rest:
        return Place(path=rest)
    if kind != "syslog" or not colon:
        raise ValueError(f"expected syslog:HOST:PORT or unixgram:PATH, not `{text}`")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"`{text}`: an IPv6 address stands in brackets")
    if not host or not colon:
        raise ValueError(f"`{text}` lacks a host or a port: syslog:HOST:PORT")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        raise ValueError(f"`{text}` has no port from 1 to 65535")
    return Place(host=host, port=int(port))


def places_of(text: str) -> list[str]:
    """Comma-separated places, as they are given, each once; raises ValueError."""
    items = list(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))
    for item in items:
        place_of(item)
    return items


def networks_of(text: str) -> list[str]:
    """Comma-separated networks, `10.0.0.0/8`, or addresses, each once; raises ValueError."""
    items = (item.strip() for item in text.split(",") if item.strip())
    return [str(ipaddress.ip_network(item)) for item in dict.fromkeys(items)]


class Senders:
    """Who may write: the loopback addresses, and networks besides."""

    def __init__(self, networks: list[str]) -> None:
        self._networks = (*LOOPBACK, *map(ipaddress.ip_network, networks))
        self._known: dict[str, bool] = {}

    def may_write(self, host: str) -> bool:
        """`host` is an address, as a socket gives that of a sender."""
        known = self._known.get(host)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[host] = self._judged(host)
        return known

    def _judged(self, host: str) -> bool:
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        return any(address in network for network in self._networks)


def is_loopback(host: str) -> bool:
    """Of an address."""
    return Senders([]).may_write(host)
