"""What we give to servers that ask for keys, and which servers we believe."""

from typing import Final

from lean_selector.curve.keys import KeyPair, Keys


class CurveClient:
    """Our pair, and the public keys that a server may have: it must have one of them."""

    __slots__ = ("believed", "pair")

    def __init__(self, pair: KeyPair, believed: Keys) -> None:
        self.pair: Final = pair
        self.believed: Final = believed

    def candidates(self, last: bytes | None) -> list[bytes]:
        """The keys to try, in order: the one that was right last, if it is still believed."""
        keys = list(self.believed())
        if last in keys:
            keys.remove(last)
            keys.insert(0, last)
        return keys
