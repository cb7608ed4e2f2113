"""What a service was told of keys for CURVE. Paths only; nothing is read yet."""

import msgspec


class ReplicaKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas encrypt, and admit each other by their keys."""

    secret_key_file: str
    peer_keys_file: str | None  # None: our own public key is that of all


class EngineKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Engines encrypt their events."""

    server_keys_file: str
    secret_key_file: str | None  # None: a pair that is made at each start
