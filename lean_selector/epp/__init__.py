"""The endpoint picker of Gateway API gateways (`--epp-port`): Envoy's ext_proc over gRPC."""
