"""URLs of workers: parsing, normalization, and the base that requests are appended to."""

import re
from typing import Final
from urllib.parse import urlsplit

HTTP_PORTS: Final = {"http": 80, "https": 443}
# Characters that may stand unescaped in a request line and a host header.
_PLAIN: Final = re.compile(r"[!-~]+")


class Url:
    """A parsed http or https URL. The constructor raises ValueError with the reason."""

    def __init__(self, text: str) -> None:
        if _PLAIN.fullmatch(text) is None:
            raise ValueError(f"`{text}` has characters that are invalid in a URL")
        parts = urlsplit(text)
        if parts.scheme not in HTTP_PORTS:
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
        self.port: Final = HTTP_PORTS[parts.scheme] if port is None else port
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
    try:
        return endpoint_url(endpoint or "").origin + path
    except ValueError:
        return None


def _with_scheme(endpoint: str) -> str:
    return endpoint if "://" in endpoint else f"http://{endpoint}"
