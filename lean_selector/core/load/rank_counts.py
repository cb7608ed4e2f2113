"""What was ever given to a rank, and what was told of it: sums that only a scrape reads."""


class RankCounts:
    """Of one rank, since it was registered."""

    __slots__ = (
        "cached_tokens",
        "compared_overlap_tokens",
        "compared_tokens",
        "failed",
        "ok",
        "overlap_tokens",
        "prompt_tokens",
        "refused",
        "selections",
        "ttft_count",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.selections = 0  # requests that were given it
        self.prompt_tokens = 0  # of those
        self.overlap_tokens = 0  # of those, found cached
        self.ok = self.failed = self.refused = 0  # reported
        self.ttft_s = 0.0  # to the first token, as reported, in sum; and of how many
        self.ttft_count = 0
        self.cached_tokens = 0  # of prompts, as the engine counted them: whoever told it
        # Of the reservations whose end told it: what the engine counted, what had been found.
        self.compared_tokens = self.compared_overlap_tokens = 0

    def add(self, other: "RankCounts") -> None:
        """Takes in the sums of another."""
        self.selections += other.selections
        self.prompt_tokens += other.prompt_tokens
        self.overlap_tokens += other.overlap_tokens
        self.ok += other.ok
        self.failed += other.failed
        self.refused += other.refused
        self.ttft_s += other.ttft_s
        self.ttft_count += other.ttft_count
        self.cached_tokens += other.cached_tokens
        self.compared_tokens += other.compared_tokens
        self.compared_overlap_tokens += other.compared_overlap_tokens
