"""What is remembered of selections by their ids, as metrics."""

from lean_selector.core.selection.selection_cache import SelectionCache
from lean_selector.observing.load_metrics import Families
from lean_selector.observing.metrics import Family, labels


def selection_cache_families(cache: SelectionCache) -> Families:
    return [
        Family(
            "lean_selector_cached_selections",
            "gauge",
            "Selections that can be booked by their id.",
            lambda: [("", len(cache))],
        ),
        Family(
            "lean_selector_cached_selection_bytes",
            "gauge",
            "Of their hashes and names.",
            lambda: [("", cache.size_bytes)],
        ),
        Family(
            "lean_selector_cached_selections_ended_total",
            "counter",
            "Selections that can be booked by their id no more.",
            lambda: [
                (labels(reason="booked"), cache.used),
                (labels(reason="expired"), cache.expired),
                (labels(reason="evicted"), cache.evicted),
            ],
        ),
    ]
