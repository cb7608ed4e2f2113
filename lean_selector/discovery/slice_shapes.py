"""EndpointSlices of Kubernetes (discovery.k8s.io/v1), as far as they are read."""

import msgspec


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Conditions(msgspec.Struct):
    """None is what an older server does not tell: then an endpoint is ready."""

    ready: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: Conditions | None = None


class Port(msgspec.Struct, rename="camel"):
    name: str | None = None
    port: int | None = None
    protocol: str | None = None
    app_protocol: str | None = None


class Slice(msgspec.Struct, rename="camel"):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class SliceList(msgspec.Struct):
    metadata: ListMetadata = msgspec.field(default_factory=ListMetadata)
    items: list[Slice] | None = None


class Status(msgspec.Struct):
    """Why a watch ends, in an event of the type ERROR."""

    code: int | None = None
    message: str = ""
    reason: str = ""


class WatchEvent(msgspec.Struct):
    """A line of a watch; what `object` is depends on the type."""

    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")
