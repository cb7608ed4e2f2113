"""Keys for engines that encrypt (CURVE), by flags that are the selector's own."""

import re
from typing import Final

from lean_selector.curve.keys import CurveClient, check_curve, new_pair, read_list, read_pair

SERVERS: Final = "--kv-events-curve-server-keys-file"
SECRET: Final = "--kv-events-curve-secret-key-file"

_OF_KEYS: Final = re.compile(r"\bkeys?\b")


def client_keys(servers_file: str | None, secret_file: str | None) -> CurveClient | None:
    """None: engines are asked in plain text. Raises OSError and ValueError."""
    if servers_file is None:
        if secret_file is not None:
            raise ValueError(f"{SECRET} requires {SERVERS}")
        return None
    check_curve(SERVERS)
    pair = new_pair() if secret_file is None else read_pair(secret_file)
    return CurveClient(pair, read_list(servers_file))


def is_about_keys(why: str) -> bool:
    """Whether there is no connection for want of the right keys, by the words of its failure."""
    return _OF_KEYS.search(why) is not None
