"""What a flag asks to be discovered."""

from typing import Literal

import msgspec


class Target(msgspec.Struct, frozen=True):
    """`text` is as it was given; of the others, those that its kind has."""

    text: str
    kind: Literal["file", "dns", "kubernetes", "url"]
    name: str  # a path, a host's or a service's name, a URL
    namespace: str = ""
    port: str | None = None  # of dns and kubernetes
    is_secure: bool = False
