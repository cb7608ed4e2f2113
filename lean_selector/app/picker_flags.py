"""The flags of `lean-selector`: the selector's, and those of its endpoint picker."""

from lean_selector.app.flags import Group, flag
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.service_flags import path

_NEEDS = ("--epp-port",)


class PickerFlags(Group):
    """Endpoint picker

    port: serve the endpoint picker of Gateway API gateways (ext_proc over gRPC) on this port; 0:
      any free port; unset: off
    host: address to bind for it
    tls_cert: serve it over TLS with this certificate chain (PEM); reread when it changes
    tls_key: key of that certificate (PEM)
    tenant: tenant whose workers it chooses
    fallbacks: how many further workers an answer names, for gateways that try the next
    max_wait_s: answer 429 to a request that finds no worker for this long
    """

    port: int | None = flag(None, "--epp-port", ge=0, le=65535, common=True, needs=("--prompts",))
    host: str = flag("0.0.0.0", "--epp-host", filled=True, needs=_NEEDS)
    tls_cert: str | None = flag(None, "--epp-tls-cert", each=path, needs=("--epp-tls-key",))
    tls_key: str | None = flag(None, "--epp-tls-key", each=path, needs=("--epp-tls-cert",))
    tenant: str = flag("default", "--epp-tenant", filled=True, needs=_NEEDS)
    fallbacks: int = flag(0, "--epp-fallbacks", ge=0, le=1, needs=_NEEDS)
    max_wait_s: float = flag(2.0, "--epp-max-wait-secs", ge=0.001, le=3600, needs=_NEEDS)

    def __post_init__(self) -> None:
        if self.port is None and self.tls_cert is not None:
            raise ValueError("--epp-tls-cert requires --epp-port")


class SelectorServiceConfig(SelectorConfig):
    """The configuration of `lean-selector`."""

    picker: PickerFlags

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts.mode == "learn" and self.picker.port is None:
            raise ValueError(
                "--prompts: invalid value `learn`: learn needs the engines' responses, which only "
                "the gateway sees, or an endpoint picker (--epp-port)"
            )
