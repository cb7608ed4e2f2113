"""A set of equally loaded ranks, as the order of loads keeps it."""


class Bucket:
    """Ranks of one load. Read it anywhere; only LoadOrder changes it.

    A rank knows its bucket, so leaving it looks nothing up.
    """

    __slots__ = ("key", "ranks", "standing", "tokens")

    def __init__(self, tokens: int, standing: float, key: float) -> None:
        self.tokens = tokens  # active_prefill_tokens of each
        self.standing = standing  # of each
        self.key = key  # its place in the order: what the load costs by itself
        self.ranks = 0  # a set, as bits of `RankBits`; never empty while it is in the order
