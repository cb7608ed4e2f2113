"""Who can reach us, as far as the address that we bind tells."""

import ipaddress


def is_beyond_loopback(host: str) -> bool:
    """Whether others than this machine reach what is bound to `host`, the text of --host; a name
    but `localhost` counts as if they did."""
    if host.lower().rstrip(".") == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


def exposure_warnings(host: str, *, asks_who: bool, has_allowed: bool) -> list[str]:
    """What a stranger could make a service do that is bound to `host`. `asks_who`: who
    calls must have a token, or a certificate; `has_allowed`: endpoints are held against a list."""
    if asks_who or not is_beyond_loopback(host):
        return []
    if has_allowed:
        return [
            f"whoever reaches --host {host} can call every route: give --auth-token-file, or bind "
            "127.0.0.1"
        ]
    return [
        f"whoever reaches --host {host} can register workers and peers, and so make this process "
        "connect to any endpoint: give --auth-token-file or --allow-endpoint, or bind 127.0.0.1"
    ]
