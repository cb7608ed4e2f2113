"""Keys for CURVE, read at the start. Imported only where some are given."""

import zmq.asyncio

from lean_selector.curve.client import CurveClient
from lean_selector.curve.gate import CurveGate
from lean_selector.curve.keys import KeyList, KeyPair, Keys, check_curve, new_pair, read_pair
from lean_selector.process.curve_config import EngineKeys, ReplicaKeys
from lean_selector.process.curve_options import (
    EVENTS_SECRET,
    EVENTS_SERVERS,
    REPLICA_PEERS,
    REPLICA_SECRET,
)
from lean_selector.process.host import StartError

_REPLICAS = b"replicas"


def replica_gate(context: zmq.asyncio.Context, config: ReplicaKeys) -> CurveGate:
    """What admits replicas to our PUB, with the pair that is ours. Raises StartError."""
    pair = _pair(REPLICA_SECRET, config.secret_key_file)
    if config.peer_keys_file is None:
        own = (pair.public,)
        return CurveGate(context, pair, lambda: own, _REPLICAS)
    return CurveGate(context, pair, _list(REPLICA_PEERS, config.peer_keys_file), _REPLICAS)


def engine_client_keys(config: EngineKeys) -> CurveClient:
    """What we are to engines, and which we believe. Raises StartError."""
    believed = _list(EVENTS_SERVERS, config.server_keys_file)
    if config.secret_key_file is None:
        return CurveClient(new_pair(), believed)
    return CurveClient(_pair(EVENTS_SECRET, config.secret_key_file), believed)


def _pair(flag: str, path: str) -> KeyPair:
    try:
        check_curve(flag)
        return read_pair(path)
    except (OSError, ValueError) as error:
        raise StartError(_line(flag, path, error)) from None


def _list(flag: str, path: str) -> Keys:
    try:
        check_curve(flag)
        return KeyList(path)
    except (OSError, ValueError) as error:
        raise StartError(_line(flag, path, error)) from None


def _line(flag: str, path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{flag}: {path}: {error.strerror or error}"
    return f"{flag}: {error}".replace(f"{flag}: {flag}: ", f"{flag}: ")
