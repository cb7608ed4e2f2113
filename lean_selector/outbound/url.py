"""URLs that we make requests of: `http://host:port/path` and `https://`."""

import re
from typing import Final
from urllib.parse import urlsplit

_PORTS: Final = {"http": 80, "https": 443}
# What a request line and a host header can carry as it stands.
_PLAIN: Final = re.compile(r"[!-~]+")


class Url:
    """A URL taken apart. Raises ValueError, saying what is wrong with it."""

    __slots__ = ("authority", "host", "is_secure", "port", "target")

    def __init__(self, text: str) -> None:
        if _PLAIN.fullmatch(text) is None:
            raise ValueError(f"`{text}` has characters that a URL has not")
        parts = urlsplit(text)
        if parts.scheme not in _PORTS:
            raise ValueError(f"`{text}` is not an http:// or https:// URL")
        if "@" in parts.netloc:
            raise ValueError(f"`{parts.hostname}`: credentials in a URL are not supported")
        if not parts.hostname:
            raise ValueError(f"`{text}` names no host")
        try:
            port = parts.port
        except ValueError:
            raise ValueError(f"`{text}` has no valid port") from None
        self.is_secure: Final = parts.scheme == "https"
        self.host: Final = parts.hostname  # in lower case, without brackets
        self.port: Final = _PORTS[parts.scheme] if port is None else port
        name = f"[{self.host}]" if ":" in self.host else self.host
        self.authority: Final = f"{name}:{self.port}"
        query = f"?{parts.query}" if parts.query else ""
        self.target: Final = (parts.path or "/") + query

    @property
    def origin(self) -> str:
        """`http://host:port`: the same for every spelling of one endpoint."""
        return f"{'https' if self.is_secure else 'http'}://{self.authority}"


def endpoint_url(endpoint: str) -> Url:
    """That of a worker's endpoint, which is plain HTTP where it says no scheme. Raises
    ValueError."""
    return Url(_with_scheme(endpoint))


def origin_of(text: str) -> str:
    """The origin of a URL; raises ValueError."""
    return Url(text).origin


def base_without_version(endpoint: str) -> str:
    """What `/v1/...` is put behind, of an endpoint that may end in /v1 itself, as the base URLs of
    OpenAI's clients do."""
    scheme, separator, rest = endpoint.rstrip("/").rpartition("://")
    return scheme + separator + rest.removesuffix("/v1").rstrip("/")


def url_at(endpoint: str | None, path: str) -> str | None:
    """The URL of a path of the worker with this endpoint; None: it is none that speaks HTTP.

    An endpoint is where requests go, with or without a scheme, with or without /v1; the path
    begins at the root of its host.
    """
    if not endpoint:
        return None
    try:
        url = urlsplit(_with_scheme(endpoint))
        if url.scheme not in ("http", "https") or not url.hostname:
            return None
        _ = url.port  # raises for what is none
    except ValueError:
        return None
    return f"{url.scheme}://{url.netloc}{path}"


def _with_scheme(endpoint: str) -> str:
    return endpoint if "://" in endpoint else f"http://{endpoint}"
