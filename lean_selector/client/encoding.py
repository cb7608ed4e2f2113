"""How bodies are encoded that callers gave in pieces: numbers may be of types of their own."""

import msgspec


def _bare(value: object) -> int:
    """What is sent of such a number. Raises ValueError for anything else."""
    if isinstance(value, int):
        return int(value)
    raise ValueError(f"{type(value).__name__} is no type of JSON's")


encode_json = msgspec.json.Encoder(enc_hook=_bare).encode
encode_msgpack = msgspec.msgpack.Encoder(enc_hook=_bare).encode
