"""The endpoint check for socket code; the rules are pure and live in `core.endpoints`."""

from lean_selector.core.endpoints import check_endpoint, replay_endpoint_for

__all__ = ["check_endpoint", "replay_endpoint_for"]
