"""Reads the CURVE keys of replicas at start. Imported only if flags name key files."""

from collections.abc import Callable
from typing import TypeVar

import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from lean_selector.app.host import StartError
from lean_selector.app.service_flags import ReplicaKeysFlags
from lean_selector.links.curve_keys import CurveGate, check_curve, read_list, read_pair

_T = TypeVar("_T")
_REPLICA_SECRET = "--replica-sync-curve-secret-key-file"
_REPLICA_PEERS = "--replica-sync-curve-peer-keys-file"


def replica_gate(context: zmq.asyncio.Context, config: ReplicaKeysFlags) -> CurveGate:
    """Return the gate, which admits subscribing replicas by CURVE key. Raises StartError."""
    pair = _read(_REPLICA_SECRET, config.secret_key_file, read_pair)
    admitted: tuple[bytes, ...] = (pair.public,)
    if config.peer_keys_file is not None:
        admitted = _read(_REPLICA_PEERS, config.peer_keys_file, read_list)
    return CurveGate(AsyncioAuthenticator(context), pair, admitted)


def _read(flag: str, path: str | None, read: Callable[[str], _T]) -> _T:
    assert path is not None
    try:
        check_curve(flag)
        return read(path)
    except (OSError, ValueError) as error:
        raise StartError(_line(flag, path, error)) from None


def _line(flag: str, path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{flag}: {path}: {error.strerror or error}"
    return f"{flag}: {error}".replace(f"{flag}: {flag}: ", f"{flag}: ")
