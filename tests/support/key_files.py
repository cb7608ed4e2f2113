"""Files with keys for CURVE, as services and engines are given them."""

import os
from pathlib import Path

import zmq
import zmq.auth

from lean_selector.links.curve_keys import KeyPair, read_pair


def new_pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


class KeyFiles:
    """Pairs by name, and lists of their public keys."""

    def __init__(self, path: Path, *names: str) -> None:
        self._path = path
        self.pairs: dict[str, KeyPair] = {}
        for name in names:
            zmq.auth.create_certificates(path, name)
            self.pairs[name] = read_pair(self.secret(name))

    def secret(self, name: str) -> str:
        return str(self._path / f"{name}.key_secret")

    def public(self, name: str) -> str:
        return self.pairs[name].public.decode()

    def list(self, file: str, *names: str) -> str:
        """Writes it, in one step."""
        path = self._path / file
        text = "".join(f"{self.public(name)} {name}\n" for name in names)
        path.with_suffix(".new").write_text(text)
        os.replace(path.with_suffix(".new"), path)
        return str(path)
