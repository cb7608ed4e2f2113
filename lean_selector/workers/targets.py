"""The texts of --discover and --replica-sync-discover, read."""

import re
from typing import Final, Literal

import msgspec

from lean_selector.http.endpoints import Url


class Target(msgspec.Struct, frozen=True):
    """`text` is as it was given; of the others, those that its kind has."""

    text: str
    kind: Literal["file", "dns", "kubernetes", "url"]
    name: str  # a path, a host's or a service's name, a URL
    namespace: str = ""
    port: str | None = None  # of dns and kubernetes
    is_secure: bool = False


_FORMS: Final = (
    "file:PATH, dns:NAME:PORT, dns:_SERVICE._tcp.NAME, kubernetes:NAMESPACE/SERVICE or url:URL"
)
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?\.?")
_SERVICE_HOST: Final = re.compile(r"_[A-Za-z0-9-]+\._(tcp|udp)(\.[A-Za-z0-9_-]+)+\.?")
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_PORT_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def target_of(text: str) -> Target:
    """Raises ValueError, saying what was expected."""
    kind, colon, rest = text.partition(":")
    if not colon or not rest:
        raise ValueError(f"`{text}`: expected {_FORMS}")
    if kind == "file":
        return Target(text, "file", rest)
    if kind == "url":
        Url(rest)
        if "?" in rest or "#" in rest:
            raise ValueError(f"`{text}`: expected a URL without a query")
        return Target(text, "url", rest)
    if kind == "dns":
        return _dns(text, rest)
    if kind == "kubernetes":
        return _kubernetes(text, rest)
    raise ValueError(f"`{text}`: expected {_FORMS}")


def peer_target_of(text: str) -> Target:
    """A target that finds peers. Raises ValueError."""
    target = target_of(text)
    if target.kind not in ("dns", "kubernetes") or target.is_secure:
        raise ValueError(
            f"`{text}`: peers are found by dns:NAME:PORT or kubernetes:NAMESPACE/SERVICE"
        )
    return target


def _dns(text: str, rest: str) -> Target:
    name = rest.removeprefix("https://")
    is_secure = name != rest
    if name.startswith("_"):
        if _SERVICE_HOST.fullmatch(name) is None:
            raise ValueError(f"`{text}`: expected dns:_SERVICE._tcp.NAME, without a port")
        return Target(text, "dns", name, is_secure=is_secure)
    host, _, port = name.rpartition(":")
    if _HOST.fullmatch(host) is None or not _is_port(port):
        raise ValueError(f"`{text}`: expected dns:NAME:PORT")
    return Target(text, "dns", host, port=port, is_secure=is_secure)


def _kubernetes(text: str, rest: str) -> Target:
    namespace, _, service = rest.partition("/")
    service, colon, port = service.partition(":")
    if _LABEL.fullmatch(namespace) is None or _LABEL.fullmatch(service) is None:
        raise ValueError(
            f"`{text}`: expected kubernetes:NAMESPACE/SERVICE, and :PORT if it has several"
        )
    if colon and _PORT_NAME.fullmatch(port) is None:
        raise ValueError(f"`{text}`: `{port}` is neither the name of a port nor its number")
    return Target(text, "kubernetes", service, namespace, port or None)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) <= 0xFFFF
