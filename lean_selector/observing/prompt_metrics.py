"""What a scrape shows of the prompts of raw requests."""

from collections.abc import Mapping

from lean_selector.observing.load_metrics import Families
from lean_selector.observing.metrics import Family, labels


def prompt_families(unknown: Mapping[str, int]) -> Families:
    """`unknown` counts prompts by a word of a few."""
    return [
        Family(
            "lean_selector_unknown_prompts_total",
            "counter",
            "Prompts of raw requests of which not all blocks are known, by reason.",
            lambda: [(labels(reason=why), count) for why, count in sorted(unknown.items())],
        )
    ]
